"""The value of expressions, and what they call."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nbtrain.magics.lint import names, values
from nbtrain.magics.lint.state import Function, State, true
from nbtrain.magics.lint.values import UNKNOWN, Value, known, of_rank


class Expressions(State):
    """Evaluates what needs no call."""

    def _eval(self, node: ast.expr) -> Value:
        self._count()
        visit = getattr(self, f"_of_{type(node).__name__}", None)
        if visit:
            found: Value = visit(node)
            return found
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._eval(child)
        return UNKNOWN

    def _of_Constant(self, node: ast.Constant) -> Value:
        return known(node.value)

    def _of_Name(self, node: ast.Name) -> Value:
        if node.id in self.env:
            return self.env[node.id]
        return UNKNOWN if node.id in self.modules else self._promised(node.id)

    def _of_Subscript(self, node: ast.Subscript) -> Value:
        key = self._eval(node.slice)
        if self._path(node.value) in ("os.environ", "environ") and key.known:
            return self._environment(key.value)
        self._eval(node.value)
        return UNKNOWN

    def _environment(self, name: Any) -> Value:
        if name in names.RANK_VARIABLES:
            return of_rank(str(self.rank))
        return known(str(self.world_size)) if name == "WORLD_SIZE" else UNKNOWN

    def _of_NamedExpr(self, node: ast.NamedExpr) -> Value:
        value = self._eval(node.value)
        self._bind(node.target, value, node.value)
        return value

    def _of_Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        parts = [self._eval(part) for part in node.elts]
        ranked = any(part.ranked for part in parts)
        if not all(part.known for part in parts) or any(isinstance(part, ast.Starred) for part in node.elts):
            return Value(ranked=ranked)
        return Value(True, tuple(part.value for part in parts), ranked)

    _of_List = _of_Set = _of_Tuple

    def _of_BinOp(self, node: ast.BinOp) -> Value:
        return values.binary(node.op, self._eval(node.left), self._eval(node.right))

    def _of_UnaryOp(self, node: ast.UnaryOp) -> Value:
        return values.unary(node.op, self._eval(node.operand))

    def _of_Compare(self, node: ast.Compare) -> Value:
        left, found = self._eval(node.left), known(True)
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            right = self._eval(comparator)
            found = both(found, values.compared(op, left, right, self.rank))
            left = right
        return found

    def _of_BoolOp(self, node: ast.BoolOp) -> Value:
        stops = isinstance(node.op, ast.Or)
        return self._operands(node.values, stops)

    def _operands(self, operands: list[ast.expr], stops: bool) -> Value:
        """``a and b and c``: the first that is false ends it, and for ``or`` the first that is true."""
        first, *rest = operands
        value = self._eval(first)
        if not rest or (value.known and true(value) == stops):
            return value
        if value.known:
            found: Value = self._under_condition(
                first.lineno if value.ranked else 0, lambda: self._operands(rest, stops)
            )
            return replace(found, ranked=found.ranked or value.ranked) if found.known else found
        tail: list[Value] = []
        self._fork(ast.unparse(first), first.lineno, lambda: silent(tail, self._operands(rest, stops)), lambda: "")
        decided = tail[0].known and true(tail[0]) == stops
        return tail[0] if decided else Value(ranked=value.ranked)

    def _of_IfExp(self, node: ast.IfExp) -> Value:
        test, found = self._eval(node.test), list[Value]()
        self._decide(
            test,
            node.test,
            lambda: silent(found, self._eval(node.body)),
            lambda: silent(found, self._eval(node.orelse)),
        )
        if len(found) > 1:
            return values.joined(*found)
        return replace(found[0], ranked=found[0].ranked or test.ranked)

    def _of_Lambda(self, node: ast.Lambda) -> Value:
        return known(Function(node, self.env))

    def _of_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        before = dict(self.env)
        self._generate(node.generators, parts, node)
        self._replace_env(before)
        return UNKNOWN

    _of_SetComp = _of_GeneratorExp = _of_DictComp = _of_ListComp

    def _generate(self, generators: list[ast.comprehension], parts: list[ast.expr], node: ast.expr) -> str:
        if not generators:
            for part in parts:
                self._eval(part)
            return ""
        first, *rest = generators
        turns = self._eval(first.iter)
        self._bind_unknown(first.target)

        def body() -> str:
            return self._conditions(first.ifs, lambda: self._generate(rest, parts, node))

        line = ast.copy_location(ast.Pass(), node)
        return self._loop(line, turns_text(first.iter, turns), turns.ranked, body)

    def _conditions(self, tests: list[ast.expr], act: Callable[[], str]) -> str:
        if not tests:
            return act()
        return self._branch(tests[0], lambda: self._conditions(tests[1:], act), lambda: "")


def both(one: Value, other: Value) -> Value:
    """``one and other``, both of them worked out."""
    if any(side.known and not true(side) for side in (one, other)):
        return Value(True, False, one.ranked or other.ranked)
    if one.known and other.known:
        return Value(True, True, one.ranked or other.ranked)
    return Value(ranked=one.ranked or other.ranked)


def silent(found: list[Value], value: Value) -> str:
    found.append(value)
    return ""


def turns_text(node: ast.expr, turns: Value) -> str:
    if turns.known and isinstance(turns.value, range | tuple | list | str):
        return f"{len(turns.value)} turns"
    return ast.unparse(node)
