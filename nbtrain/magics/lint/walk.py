"""One rank's way through a cell."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Any

from nbtrain.magics.lint import values
from nbtrain.magics.lint.calls import Calls
from nbtrain.magics.lint.expressions import turns_text
from nbtrain.magics.lint.state import Class, Env, Function, true
from nbtrain.magics.lint.trace import Exit, Failure, Trace
from nbtrain.magics.lint.values import UNKNOWN, Value, known, of_rank


class Walk(Calls):
    """Follows the cell as one rank; ``prompts`` are the lines where it asks a person, with their text."""

    def cell(self) -> Trace:
        """What the rank does in the cell."""
        trace, _ = self._captured(lambda: self._block(self.tree.body))
        return trace

    def uncalled(self) -> dict[int, Trace]:
        """What it would do in the functions that the cell defines and does not call, by line."""
        asked, self.prompts = self.prompts, {}
        functions = [one for one in self._functions(self.tree.body, self.env) if one.node not in self._walked]
        traces = {one.node.lineno: self._trace_of(one) for one in functions}
        self.prompts = asked
        return traces

    def _functions(self, body: Sequence[ast.stmt], env: Env) -> Iterable[Function]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Function(node, env)
            elif isinstance(node, ast.ClassDef):
                yield from self._methods(Class(node, env))

    # -- statements: each gives how the block ends, "" for going on ----------------------------------------------------

    def _block(self, body: Sequence[ast.stmt]) -> str:
        for node in body:
            self._count()
            visit = getattr(self, f"_do_{type(node).__name__}", None)
            ended = visit(node) if visit else self._simple(node)
            if ended:
                return str(ended)
        return ""

    def _simple(self, node: ast.stmt) -> str:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._eval(child)
        return ""

    def _do_Return(self, node: ast.Return) -> str:
        self._returned.append(self._eval(node.value) if node.value else known(None))
        self._left_at = node.lineno
        if self._open_loops:
            self._emit(Exit("return", node.lineno, self._condition()))
        return "return"

    def _do_Break(self, node: ast.Break) -> str:
        self._emit(Exit("break", node.lineno, self._condition()))
        return "break"

    def _do_Continue(self, node: ast.Continue) -> str:
        self._left_at = node.lineno
        return "continue"

    def _do_Raise(self, node: ast.Raise) -> str:
        self._simple(node)
        self._emit(Failure())
        return "raise"

    def _do_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.modules[name] = alias.name if alias.asname else name
            self.env.pop(name, None)

    def _do_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name
            self.modules[name] = f"{node.module}.{alias.name}"
            self.env.pop(name, None)

    def _do_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.decorator_list, *node.args.defaults):
            self._eval(part)
        self.env[node.name] = known(Function(node, self.env))

    _do_AsyncFunctionDef = _do_FunctionDef

    def _do_ClassDef(self, node: ast.ClassDef) -> None:
        self.env[node.name] = known(Class(node, self.env))

    def _do_Assign(self, node: ast.Assign) -> None:
        value = self._eval(node.value)
        for target in node.targets:
            self._bind(target, value, node.value)

    def _do_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._bind(node.target, self._eval(node.value), node.value)

    def _do_AugAssign(self, node: ast.AugAssign) -> None:
        before = self._eval(ast.copy_location(_loaded(node.target), node))
        self._bind(node.target, values.binary(node.op, before, self._eval(node.value)), node.value)

    def _do_If(self, node: ast.If) -> str:
        return self._branch(node.test, lambda: self._block(node.body), lambda: self._block(node.orelse))

    def _do_Match(self, node: ast.Match) -> str:
        return self._cases(self._eval(node.subject), ast.unparse(node.subject), node.cases)

    def _do_Try(self, node: ast.Try) -> str:
        """As if nothing failed: what is caught may fail on all ranks alike."""
        ended = self._block(node.body) or self._block(node.orelse)
        if ended == "raise" and node.handlers:
            self._trace = [item for item in self._trace if not isinstance(item, Failure)]
            ended = ""
        return self._block(node.finalbody) or ended

    _do_TryStar = _do_Try

    def _do_With(self, node: ast.With | ast.AsyncWith) -> str:
        for item in node.items:
            value = self._eval(item.context_expr)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, value, item.context_expr)
        return self._block(node.body)

    _do_AsyncWith = _do_With

    def _do_For(self, node: ast.For | ast.AsyncFor) -> str:
        turns = self._eval(node.iter)
        items = _items(turns, self.world_size)
        if items is None:
            self._forget_what_changes(node)
            self._bind_unknown(node.target)
            ended = self._loop(node, turns_text(node.iter, turns), turns.ranked, lambda: self._block(node.body))
            return ended or self._block(node.orelse)
        with_condition = turns.ranked
        for item in items:
            self._bind(node.target, known(item), None)
            ended = self._under_condition(node.lineno if with_condition else 0, lambda: self._block(node.body))
            if ended == "break":
                self._drop_exit()
                return ""
            if ended in ("return", "raise"):
                return ended
        return self._block(node.orelse)

    _do_AsyncFor = _do_For

    def _do_While(self, node: ast.While) -> str:
        first = self._eval(node.test)
        if first.known and not true(first):
            return self._block(node.orelse)
        self._forget_what_changes(node)
        ended = self._loop(node, ast.unparse(node.test), first.ranked, lambda: self._block(node.body))
        return ended or self._block(node.orelse)

    def _cases(self, subject: Value, text: str, cases: Sequence[ast.match_case]) -> str:
        if not cases:
            return ""
        case, *rest = cases
        matches = UNKNOWN if case.guard is not None else _matches(case.pattern, subject)
        if not matches.known and subject.ranked:
            matches = of_rank(self.rank == 0)
        then = lambda: self._block(case.body)  # noqa: E731
        otherwise = lambda: self._cases(subject, text, rest)  # noqa: E731
        if matches.known:
            return self._under_condition(
                case.pattern.lineno if subject.ranked else 0, then if matches.value else otherwise
            )
        return self._fork(f"{text}: {ast.unparse(case.pattern)}", case.pattern.lineno, then, otherwise)


def _loaded(target: ast.expr) -> ast.expr:
    """``target`` of an assignment as an expression."""
    expression: ast.expr = ast.parse(ast.unparse(target), mode="eval").body
    return expression


def _items(turns: Value, world_size: int) -> list[Any] | None:
    """What a loop goes through, if it is known and short enough to follow each turn."""
    found = turns.value
    if not turns.known or not isinstance(found, range | tuple | list | str):
        return None
    return list(found) if len(found) <= max(world_size, 16) else None


def _matches(pattern: ast.pattern, subject: Value) -> Value:
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
        return known(True)
    if isinstance(pattern, ast.MatchOr):
        parts = [_matches(part, subject) for part in pattern.patterns]
        decided = all(part.known for part in parts)
        return known(any(part.value for part in parts)) if decided else UNKNOWN
    if isinstance(pattern, ast.MatchValue) and isinstance(pattern.value, ast.Constant) and subject.known:
        return known(subject.value == pattern.value.value)
    return UNKNOWN
