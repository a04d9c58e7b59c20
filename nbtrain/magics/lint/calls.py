"""Calls: into functions and classes of the cell, of collectives, and of what is not the cell's."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from nbtrain.magics.lint import names, values
from nbtrain.magics.lint.expressions import Expressions, silent
from nbtrain.magics.lint.state import MAX_DEPTH, Class, Env, Function, Instance, dotted
from nbtrain.magics.lint.trace import Failure, Op, Part, Trace, ops
from nbtrain.magics.lint.values import UNKNOWN, Value, known, of_rank


class Calls(Expressions):
    """Follows calls into the cell's own functions, and knows the collectives by name."""

    def _trace_of(self, function: Function) -> Trace:
        return self._captured(lambda: self._inside(function, {}))[0]

    def _methods(self, owner: Class) -> Iterable[Function]:
        instance = self._instance(owner, {})
        for node in owner.node.body:
            paired = getattr(node, "name", "") in ("__enter__", "__exit__")  # each is half of what they do
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not paired:
                yield Function(node, owner.around, instance)

    def _of_Attribute(self, node: ast.Attribute) -> Value:
        owner = self._eval(node.value)
        if isinstance(owner.value, Instance):
            return self._member(owner.value, node.attr)
        name = dotted(node)
        return self.env[name] if name in self.env else self._promised(node.attr)

    def _member(self, owner: Instance, name: str) -> Value:
        if name in owner.attributes:
            return owner.attributes[name]
        for node in owner.of.node.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                method = Function(node, owner.of.around, owner)
                is_value = any(dotted(d) in ("property", "functools.cached_property") for d in node.decorator_list)
                return self._inside(method, {}, value=True) if is_value else known(method)
        return self._promised(name)

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
            act = (lambda: silent(self._returned, self._eval(body))) if isinstance(body, ast.expr) else None
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
