"""`Score`: what one forward of a model does, call by call, as data."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten


class Value(NamedTuple):
    """A tensor that a unit gave: which call of the forward, and which leaf of its output."""

    call: int
    leaf: int


@dataclass(frozen=True)
class Meta:
    """What is known of a tensor before it is there.

    Attributes:
        requires_grad: Whether a gradient comes back for it; it may be one of zeros.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Passed:
    """An argument that a unit gives back as it is: no tensor, but for instance a cache of keys and values.

    Attributes:
        index: Among the leaves of the call's ``(args, kwargs)``.
    """

    index: int


@dataclass(frozen=True)
class Call:
    """One call of a unit.

    Attributes:
        unit: Its name.
        leaves: Of its output: a `Meta` for each tensor, `Passed` for objects that it was given, anything else as it is.
        form: Puts the leaves together.
        reads: Outputs of earlier units from which its inputs come, by no unit in between.
        parameters: Names of parameters outside of units from which its inputs come.
        cost: Floating-point operations of its forward.
    """

    unit: str
    leaves: tuple[Any, ...]
    form: TreeSpec
    reads: frozenset[Value]
    parameters: frozenset[str]
    cost: float

    def output(self, tensors: Sequence[Any]) -> Any:
        """``tensors`` in the places of the leaves."""
        return tree_unflatten(list(tensors), self.form)


@dataclass(frozen=True)
class Score:
    """One forward.

    Attributes:
        calls: In their order.
        reads: What the code behind the last call reads: the output, or a loss.
        parameters: Names of parameters outside of units that it reads.
        random: Whether anything draws random numbers.
    """

    calls: tuple[Call, ...]
    reads: frozenset[Value]
    parameters: frozenset[str]
    random: bool

    def meta(self, value: Value) -> Meta:
        """Of a tensor."""
        meta: Meta = self.calls[value.call].leaves[value.leaf]
        return meta

    def crossing(self, position: int) -> tuple[Value, ...]:
        """What calls before ``position`` give and those from there on, or the end, read: in order."""
        later: set[Value] = set(self.reads)
        for call in self.calls[position:]:
            later |= call.reads
        return tuple(sorted(value for value in later if value.call < position))

    def routes(self, starts: Sequence[int]) -> tuple[tuple[Value, ...], ...]:
        """What crosses into each stage, of which ``starts`` are the first calls."""
        return tuple(self.crossing(start) for start in starts)

    @functools.cached_property
    def costs(self) -> list[float]:
        return [call.cost for call in self.calls]

    def starts(self, begins: Sequence[str]) -> tuple[int, ...]:
        """The first call of each stage: that of the unit that begins it.

        Raises:
            LookupError: A unit that begins a stage is not called behind the stage before.
        """
        return tuple(self._starts(begins))

    def _starts(self, begins: Iterable[str]) -> Iterator[int]:
        position = 0
        for index, name in enumerate(begins):
            if index:
                position = self._next(name, position + 1)
            yield position

    def _next(self, name: str, position: int) -> int:
        for index in range(position, len(self.calls)):
            if self.calls[index].unit == name:
                return index
        raise LookupError(name)
