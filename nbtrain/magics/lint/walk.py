"""One rank's way through a cell."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nbtrain.magics.lint import names, values
from nbtrain.magics.lint.trace import Exit, Failure, Item, Op, Part, Trace, leaves, ops
from nbtrain.magics.lint.values import UNKNOWN, Value, known, of_rank

MAX_RANKS = 64
MAX_NODES = 200_000  # of the tree that all ranks' walks visit, each call anew: some tenths of a second
MAX_DEPTH = 8  # of calls
Env = dict[str, Value]


class Endless(Exception):
    """The cell takes longer to follow than it is worth."""


@dataclass(frozen=True, eq=False)
class Function:
    """A function of the cell, the names around it, and its object if it is a method."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    around: Env
    owner: Instance | None = None


@dataclass(frozen=True, eq=False)
class Class:
    node: ast.ClassDef
    around: Env


@dataclass(frozen=True, eq=False)
class Instance:
    """An object of a class of the cell; ``attributes`` are those that its methods set."""

    of: Class
    attributes: Env


class Walk:
    """Follows the cell as rank ``rank``; ``prompts`` are the lines where it asks a person, with their text."""

    def __init__(self, rank: int, world_size: int, tree: ast.Module, max_nodes: int = MAX_NODES) -> None:
        self._nodes_left = max_nodes
        self.rank, self.world_size, self.tree = rank, world_size, tree
        self.env: Env = {"__name__": known("__main__")}
        self.modules = dict(names.MODULES)
        self.prompts: dict[int, str] = {}
        self._trace: Trace = []
        self._returned: list[Value] = []
        self._under: list[int] = []
        self._calls: list[ast.AST] = []
        self._walked: set[ast.AST] = set()
        self._left_at = 0  # the line of the last return or continue
        self._open_loops = 0  # those whose number of turns is not known

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

    def _trace_of(self, function: Function) -> Trace:
        return self._captured(lambda: self._inside(function, {}))[0]

    def _functions(self, body: Sequence[ast.stmt], env: Env) -> Iterable[Function]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Function(node, env)
            elif isinstance(node, ast.ClassDef):
                yield from self._methods(Class(node, env))

    def _methods(self, owner: Class) -> Iterable[Function]:
        instance = self._instance(owner, {})
        for node in owner.node.body:
            paired = getattr(node, "name", "") in ("__enter__", "__exit__")  # each is half of what they do
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not paired:
                yield Function(node, owner.around, instance)

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
            ended = self._loop(node, _turns(node.iter, turns), turns.ranked, lambda: self._block(node.body))
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
        if self._is_false(self._eval(node.test)):
            return self._block(node.orelse)
        first = self._eval(node.test)
        self._forget_what_changes(node)
        ended = self._loop(node, ast.unparse(node.test), first.ranked, lambda: self._block(node.body))
        return ended or self._block(node.orelse)

    # -- branches and loops --------------------------------------------------------------------------------------------

    def _branch(self, test: ast.expr, then: Callable[[], str], otherwise: Callable[[], str]) -> str:
        value = self._eval(test)
        if value.known:
            chosen = then if _true(value) else otherwise
            return self._under_condition(test.lineno if value.ranked else 0, chosen)
        return self._fork(ast.unparse(test), test.lineno, then, otherwise)

    def _fork(self, text: str, line: int, then: Callable[[], str], otherwise: Callable[[], str]) -> str:
        """Go both ways: nothing is known."""
        before = dict(self.env)
        first, ended = self._captured(then)
        one, self.env = self.env, before
        second, other = self._captured(otherwise)
        self._join(one, ended, other)
        if ended != other:  # the way that ends is part of what is compared
            first, second = self._closed(first, ended), self._closed(second, other)
        if first or second:
            self._emit(Part("if", text, line, (tuple(first), tuple(second))))
        return ended if ended == other else ""

    def _join(self, one: Env, ended: str, other: str) -> None:
        if other and not ended:
            self._replace_env(one)
        elif not (ended and not other):
            keys = {**one, **self.env}
            both = {name: values.joined(one.get(name, UNKNOWN), self.env.get(name, UNKNOWN)) for name in keys}
            self._replace_env(both)

    def _replace_env(self, env: Env) -> None:
        self.env.clear()
        self.env.update(env)

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

    def _loop(self, node: ast.stmt, text: str, ranked: bool, body: Callable[[], str]) -> str:
        self._open_loops += 1
        before = dict(self.env)
        trace, ended = self._under_condition(node.lineno if ranked else 0, lambda: self._captured(body))
        self._open_loops -= 1
        self._join(before, "", "")
        if any(True for _ in ops(trace)):
            whose = f" on rank {self.rank}" if ranked else ""
            self._trace.append(Part("for", text + whose, node.lineno, (tuple(trace),)))
        elif leaves(trace, "for") and any(isinstance(i, Exit) and i.kind == "return" for i in trace):
            self._trace += [item for item in trace if isinstance(item, Exit) and item.kind == "return"]
        return "raise" if ended == "raise" and not leaves(trace, "for") else ""

    def _under_condition(self, line: int, act: Callable[[], Any]) -> Any:
        if not line:
            return act()
        self._under.append(line)
        ended = act()
        self._under.pop()
        return ended

    def _captured(self, act: Callable[[], str]) -> tuple[Trace, str]:
        outer, self._trace = self._trace, []
        ended = act()
        trace, self._trace = self._trace, outer
        return trace, ended

    def _emit(self, item: Item) -> None:
        self._trace.append(item)

    def _closed(self, trace: Trace, ended: str) -> Trace:
        """A branch with the way it ends: ranks that differ in it part there."""
        last = trace[-1] if trace else None
        if not ended or isinstance(last, Exit | Failure):
            return trace
        return [*trace, Exit(ended, self._left_at, 0)]

    def _drop_exit(self) -> None:
        """A loop whose turns are known was left: what follows is known too."""
        if self._trace and isinstance(self._trace[-1], Exit):
            self._trace.pop()

    def _condition(self) -> int:
        return self._under[-1] if self._under else 0

    def _is_false(self, value: Value) -> bool:
        return value.known and not _true(value)

    def _forget_what_changes(self, node: ast.stmt) -> None:
        """What a loop binds has another value at each turn."""
        for child in ast.walk(node):
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store) and child.id in self.env:
                self.env[child.id] = Value(ranked=self.env[child.id].ranked)

    # -- names ---------------------------------------------------------------------------------------------------------

    def _bind(self, target: ast.expr, value: Value, source: ast.expr | None) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            self._bind_each(target.elts, value, source)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, UNKNOWN, source)
        elif (name := _dotted(target)) is not None:
            self.modules.pop(name, None)
            self._store(target, name, value if value.known or value.ranked or source is None else self._promised(name))

    def _store(self, target: ast.expr, name: str, value: Value) -> None:
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            owner = self.env.get(target.value.id, UNKNOWN).value
            if isinstance(owner, Instance):
                owner.attributes[target.attr] = value
                return
        self.env[name] = value

    def _bind_each(self, targets: list[ast.expr], value: Value, source: ast.expr | None) -> None:
        parts: Sequence[Any] = value.value if value.known and isinstance(value.value, tuple | list) else ()
        fits = len(parts) == len(targets)
        for position, target in enumerate(targets):
            part = Value(True, parts[position], value.ranked) if fits else Value()
            self._bind(target, part, source)

    def _bind_unknown(self, target: ast.expr) -> None:
        for child in ast.walk(target):
            if isinstance(child, ast.Name):
                self.env[child.id] = UNKNOWN

    def _promised(self, name: str) -> Value:
        """What a name stands for by its last word, where nothing else is known of it."""
        last = name.rpartition(".")[2]
        if last in names.RANKS:
            return of_rank(self.rank)
        if last in names.MAINS:
            return of_rank(self.rank == 0)
        return known(self.world_size) if last in names.WORLD_SIZES else UNKNOWN

    def _path(self, node: ast.expr) -> str:
        """The full dotted name of what ``node`` names, through imports; empty for anything else."""
        name = _dotted(node)
        if name is None or name in self.env:
            return ""
        first, dot, rest = name.partition(".")
        if first in self.env:
            return ""
        return self.modules.get(first, first) + dot + rest

    # -- expressions ---------------------------------------------------------------------------------------------------

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

    def _of_Attribute(self, node: ast.Attribute) -> Value:
        owner = self._eval(node.value)
        if isinstance(owner.value, Instance):
            return self._member(owner.value, node.attr)
        name = _dotted(node)
        return self.env[name] if name in self.env else self._promised(node.attr)

    def _member(self, owner: Instance, name: str) -> Value:
        if name in owner.attributes:
            return owner.attributes[name]
        for node in owner.of.node.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                method = Function(node, owner.of.around, owner)
                is_value = any(_dotted(d) in ("property", "functools.cached_property") for d in node.decorator_list)
                return self._inside(method, {}, value=True) if is_value else known(method)
        return self._promised(name)

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
            found = _both(found, values.compared(op, left, right, self.rank))
            left = right
        return found

    def _of_BoolOp(self, node: ast.BoolOp) -> Value:
        stops = isinstance(node.op, ast.Or)
        return self._operands(node.values, stops)

    def _operands(self, operands: list[ast.expr], stops: bool) -> Value:
        """``a and b and c``: the first that is false ends it, and for ``or`` the first that is true."""
        first, *rest = operands
        value = self._eval(first)
        if not rest or (value.known and _true(value) == stops):
            return value
        if value.known:
            found: Value = self._under_condition(
                first.lineno if value.ranked else 0, lambda: self._operands(rest, stops)
            )
            return replace(found, ranked=found.ranked or value.ranked) if found.known else found
        tail: list[Value] = []
        self._fork(ast.unparse(first), first.lineno, lambda: _silent(tail, self._operands(rest, stops)), lambda: "")
        decided = tail[0].known and _true(tail[0]) == stops
        return replace(tail[0], ranked=tail[0].ranked) if decided else Value(ranked=value.ranked)

    def _of_IfExp(self, node: ast.IfExp) -> Value:
        found: list[Value] = []
        self._branch(
            node.test,
            lambda: _silent(found, self._eval(node.body)),
            lambda: _silent(found, self._eval(node.orelse)),
        )
        chosen = found[0] if len(found) == 1 else values.joined(*found)
        return replace(chosen, ranked=True) if len(found) == 1 and self._eval(node.test).ranked else chosen

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
        return self._loop(line, _turns(first.iter, turns), turns.ranked, body)

    def _conditions(self, tests: list[ast.expr], act: Callable[[], str]) -> str:
        if not tests:
            return act()
        return self._branch(tests[0], lambda: self._conditions(tests[1:], act), lambda: "")

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _of_Call(self, node: ast.Call) -> Value:
        callee = self._callee(node.func)
        args = [self._eval(arg.value if isinstance(arg, ast.Starred) else arg) for arg in node.args]
        words = {word.arg or "**": self._eval(word.value) for word in node.keywords}
        if isinstance(callee.value, Function):
            starred = any(isinstance(arg, ast.Starred) for arg in node.args)
            return self._inside(callee.value, words, [] if starred else args, value=True)
        if isinstance(callee.value, Class):
            return known(self._instance(callee.value, words, args))
        if any(self._calls_back(arg) for arg in (*args, *words.values())):
            self._emit(Failure())  # when it is called, and on which ranks, is not to be seen
        return self._outside(node, self._path(node.func), args)

    def _callee(self, node: ast.expr) -> Value:
        """The function, without taking a method's name for a value."""
        if isinstance(node, ast.Attribute):
            owner = self._eval(node.value)
            return self._member(owner.value, node.attr) if isinstance(owner.value, Instance) else UNKNOWN
        if isinstance(node, ast.Name):
            return self.env.get(node.id, UNKNOWN)
        return self._eval(node)

    def _calls_back(self, value: Value) -> bool:
        """Whether a value that is handed out is a function of the cell with collectives, or a class with such."""
        given = value.value
        functions = [given] if isinstance(given, Function) else []
        if isinstance(given, Class):
            functions = list(self._methods(given))
        walked = set(self._walked)
        found = any(any(True for _ in ops(self._trace_of(one))) for one in functions)
        self._walked = walked
        return found

    def _outside(self, node: ast.Call, path: str, args: list[Value]) -> Value:
        """A function that is not the cell's."""
        name = path or getattr(node.func, "attr", "")
        last = name.rpartition(".")[2]
        if path in names.COLLECTIVES or path in names.MAKERS:
            return self._collective(node, path)
        if isinstance(node.func, ast.Attribute) and self._is_method(node.func):
            self._op(node, f"*.{node.func.attr}", takes_group=False)
            return UNKNOWN
        if path in names.PROMPTS or _magic(node) in ("debug", "pdb"):
            self.prompts[node.lineno] = f"%{_magic(node)}" if _magic(node) else f"{ast.unparse(node.func)}()"
            return UNKNOWN
        if path in names.LEAVES:
            self._emit(Failure())
            return UNKNOWN
        if last in names.RANK_CALLS:
            return of_rank(self.rank)
        if last in names.MAINS:
            return of_rank(self.rank == 0)
        if last in names.WORLD_SIZES and not node.args and not node.keywords:
            return known(self.world_size)
        if path in ("os.environ.get", "os.getenv", "getenv", "environ.get") and args and args[0].known:
            return self._environment(args[0].value)
        return values.called(path, args) if not node.keywords else UNKNOWN

    def _collective(self, node: ast.Call, path: str) -> Value:
        position = names.COLLECTIVES.get(path, names.MAKERS.get(path, 99))
        if not _has_group(node, position):
            self._op(node, path, takes_group=path in names.COLLECTIVES)
        return known(names.TRAINER) if path == names.TRAINER else UNKNOWN

    def _is_method(self, func: ast.Attribute) -> bool:
        if func.attr in names.METHODS:
            return True
        if func.attr not in names.TRAINER_METHODS:
            return False
        owner = self._eval(func.value)
        if owner.known or not isinstance(func.value, ast.Name):
            return bool(owner.value == names.TRAINER)
        unbound = func.value.id not in self.env and func.value.id not in self.modules
        return unbound and names.TRAINER_NAME.match(func.value.id) is not None

    def _op(self, node: ast.Call, name: str, *, takes_group: bool) -> None:
        text = ast.unparse(node.func)
        self._emit(
            Op(name, text if len(text) <= 60 else f"….{text[-50:]}", node.lineno, self._condition(), takes_group)
        )

    def _instance(self, of: Class, words: Env, args: list[Value] | None = None) -> Instance:
        instance = Instance(of, {})
        for node in of.node.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                self._inside(Function(node, of.around, instance), words, args or [])
        return instance

    def _inside(self, function: Function, words: Env, args: list[Value] | None = None, *, value: bool = False) -> Any:
        """Walk a function's body; gives its value, or with ``value=False`` how it ended."""
        node = function.node
        if node in self._calls or len(self._calls) >= MAX_DEPTH:
            return UNKNOWN if value else ""
        self._walked.add(node)
        env, self.env = self.env, {**function.around, **self._arguments(function, words, args)}
        returned, self._returned = self._returned, []
        loops, self._open_loops = self._open_loops, 0
        self._calls.append(node)
        try:
            body = node.body
            act = (lambda: _silent(self._returned, self._eval(body))) if isinstance(body, ast.expr) else None
            trace, ended = self._captured(act or (lambda: self._block(body)))  # type: ignore[arg-type]
            found = self._returned
        finally:
            self._calls.pop()
            self.env, self._returned, self._open_loops = env, returned, loops
        if any(True for _ in ops(trace)):
            self._emit(Part("def", getattr(node, "name", "lambda"), node.lineno, (tuple(trace),)))
        self._trace += [item for item in trace if isinstance(item, Failure)]
        if not value:
            return ended
        return found[0] if len(found) == 1 else (UNKNOWN if found else known(None))

    def _arguments(self, function: Function, words: Env, args: list[Value] | None) -> Env:
        spec = function.node.args
        positional = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
        given: Env = {}
        if function.owner is not None and positional:
            given[positional.pop(0)] = known(function.owner)
        for name, default in zip(reversed(positional), reversed(spec.defaults), strict=False):
            given[name] = known(default.value) if isinstance(default, ast.Constant) else UNKNOWN
        given.update(zip(positional, args or [], strict=False))
        given.update({name: value for name, value in words.items() if name != "**"})
        every = [*positional, *(arg.arg for arg in spec.kwonlyargs)]
        for name in every:
            found = given.get(name, UNKNOWN)
            given[name] = found if found.known or found.ranked else self._promised(name)
        return given

    def _count(self) -> None:
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise Endless


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def _loaded(target: ast.expr) -> ast.expr:
    """``target`` of an assignment as an expression."""
    expression: ast.expr = ast.parse(ast.unparse(target), mode="eval").body
    return expression


def _true(value: Value) -> bool:
    return isinstance(value.value, Function | Class | Instance) or bool(value.value)


def _both(one: Value, other: Value) -> Value:
    """``one and other``, both of them worked out."""
    if any(side.known and not _true(side) for side in (one, other)):
        return Value(True, False, one.ranked or other.ranked)
    if one.known and other.known:
        return Value(True, True, one.ranked or other.ranked)
    return Value(ranked=one.ranked or other.ranked)


def _silent(found: list[Value], value: Value) -> str:
    found.append(value)
    return ""


def _items(turns: Value, world_size: int) -> list[Any] | None:
    """What a loop goes through, if it is known and short enough to follow each turn."""
    found = turns.value
    if not turns.known or not isinstance(found, range | tuple | list | str):
        return None
    return list(found) if len(found) <= max(world_size, 16) else None


def _turns(node: ast.expr, turns: Value) -> str:
    if turns.known and isinstance(turns.value, range | tuple | list | str):
        return f"{len(turns.value)} turns"
    return ast.unparse(node)


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


def _magic(node: ast.Call) -> str:
    """The name of a line magic, which IPython has made a call of."""
    is_magic = isinstance(node.func, ast.Attribute) and node.func.attr == "run_line_magic"
    first = node.args[0] if is_magic and node.args else None
    return str(first.value) if isinstance(first, ast.Constant) else ""


def _has_group(node: ast.Call, position: int) -> bool:
    """Whether the call is about a group that may be some ranks'."""
    given = [word.value for word in node.keywords if word.arg in names.GROUP_WORDS or word.arg is None]
    if any(isinstance(arg, ast.Starred) for arg in node.args):
        return True
    given += node.args[position : position + 1]
    return any(not _is_world(ast.unparse(value)) for value in given)


def _is_world(text: str) -> bool:
    return text in names.WORLD or text.endswith("group.WORLD")
