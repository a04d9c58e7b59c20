"""What a walk knows and keeps: values of names, the trace so far, and the conditions that it stands under."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nbtrain.magics.lint import names, values
from nbtrain.magics.lint.trace import Exit, Failure, Item, Part, Trace, leaves, ops
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


class State(ABC):
    """One rank's walk, without the grammar: that is what the classes built on it add, one kind of node each."""

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

    @abstractmethod
    def _eval(self, node: ast.expr) -> Value:
        """The value of an expression. What it calls goes into the trace."""

    @abstractmethod
    def _block(self, body: Sequence[ast.stmt]) -> str:
        """Walk statements; gives how they end, "" for going on."""

    # -- branches and loops --------------------------------------------------------------------------------------------

    def _branch(self, test: ast.expr, then: Callable[[], str], otherwise: Callable[[], str]) -> str:
        return self._decide(self._eval(test), test, then, otherwise)

    def _decide(self, value: Value, test: ast.expr, then: Callable[[], str], otherwise: Callable[[], str]) -> str:
        """Go the way that ``value``, which is the test's, tells; both where it is unknown."""
        if value.known:
            chosen = then if true(value) else otherwise
            return self._under_condition(test.lineno if value.ranked else 0, chosen)
        return self._fork(ast.unparse(test), test.lineno, then, otherwise)

    def _fork(self, text: str, line: int, then: Callable[[], str], otherwise: Callable[[], str]) -> str:
        """Go both ways: nothing is known."""
        before = dict(self.env)
        first, ended = self._captured(then)
        one = dict(self.env)
        self._replace_env(before)  # the same object: the cell's functions look names up in it when they are called
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
        elif (name := dotted(target)) is not None:
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
        name = dotted(node)
        if name is None or name in self.env:
            return ""
        first, dot, rest = name.partition(".")
        if first in self.env:
            return ""
        return self.modules.get(first, first) + dot + rest

    def _count(self) -> None:
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise Endless


def dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def true(value: Value) -> bool:
    return isinstance(value.value, Function | Class | Instance) or bool(value.value)
