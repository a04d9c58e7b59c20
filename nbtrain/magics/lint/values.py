"""What is known of a value on one rank before the cell runs."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_BIG = 1 << 64  # no cell's arithmetic on ranks goes there, and Python's would take for ever
MAX_ITEMS = 4096


@dataclass(frozen=True)
class Value:
    """A value, if ``known``. ``ranked`` says that it differs by rank."""

    known: bool = False
    value: Any = None
    ranked: bool = False


UNKNOWN = Value()

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_RANK_0_TAKES = (ast.Eq, ast.In, ast.Lt, ast.LtE, ast.Is)
_PURE: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (int, str, bool, float, len, range, min, max, abs, set, list, tuple)
}


def of_rank(value: Any) -> Value:
    return Value(True, value, ranked=True)


def known(value: Any) -> Value:
    return Value(True, value)


def joined(one: Value, other: Value) -> Value:
    """What is known behind a branch that may have gone either way. Which way counts must not depend on the rank."""
    if one.ranked or other.ranked:
        return one if one.ranked else other
    return one if one == other else UNKNOWN


def binary(op: ast.operator, left: Value, right: Value) -> Value:
    return _applied(_BINARY.get(type(op)), left, right)


def unary(op: ast.unaryop, value: Value) -> Value:
    return _applied(_UNARY[type(op)], value)


def compared(op: ast.cmpop, left: Value, right: Value, rank: int) -> Value:
    """``left op right``. A rank that is compared to what is unknown is taken for one that only rank 0 equals."""
    found = _applied(_COMPARED[type(op)], left, right)
    if found.known or not found.ranked:
        return found
    return of_rank((rank == 0) == isinstance(op, _RANK_0_TAKES))


def called(name: str, args: list[Value]) -> Value:
    """A builtin without effects; unknown for every other name."""
    if name not in _PURE:
        return UNKNOWN
    if name == "range" and len(args) > 1 and args[0].ranked and not all(arg.known for arg in args):
        return UNKNOWN  # range(rank, n, world_size) shares n items out, most often evenly
    return _applied(_PURE[name], *args)


def _applied(function: Callable[..., Any] | None, *args: Value) -> Value:
    ranked = any(arg.ranked for arg in args)
    if function is None or not all(arg.known and _small(arg.value) for arg in args):
        return Value(ranked=ranked)
    try:
        return Value(True, function(*(arg.value for arg in args)), ranked)
    except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError):
        return Value(ranked=ranked)


def _small(value: Any) -> bool:
    if isinstance(value, int | float):
        return -_BIG < value < _BIG
    if isinstance(value, str | bytes | tuple | list | set | frozenset):
        return len(value) <= MAX_ITEMS
    return value is None or (isinstance(value, range) and _small_range(value))


def _small_range(value: range) -> bool:
    return abs(value.stop - value.start) <= MAX_ITEMS * max(1, abs(value.step))
