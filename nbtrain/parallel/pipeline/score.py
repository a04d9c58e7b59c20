"""`Score`: what one forward of a model does, call by call, as data."""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
        strides: Of all its memory: dropout draws in the order of memory, so that it is a part of what crosses.
        requires_grad: Whether a gradient comes back for it; it may be one of zeros.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor, *, requires_grad: bool) -> Meta:
        return Meta(tuple(tensor.shape), torch.empty_like(tensor).stride(), tensor.dtype, requires_grad)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Such a tensor, of anything."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, or a copy of it, of this dtype and with these strides. Differentiable."""
        if tensor.dtype == self.dtype and tensor.stride() == self.strides:
            return tensor
        return self.empty(tensor.device).copy_(tensor)


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
        form: Puts the first of the leaves together.
        kept: What it leaves as attributes, the other leaves: the module's name inside of the unit, and the attribute's.
        reads: Outputs of earlier units from which its inputs come, by no unit in between.
        parameters: Names of parameters outside of units from which its inputs come.
        cost: Floating-point operations of its forward.
    """

    unit: str
    leaves: tuple[Any, ...]
    form: TreeSpec
    kept: tuple[tuple[str, str], ...]
    reads: frozenset[Value]
    parameters: frozenset[str]
    cost: float

    def output(self, tensors: Sequence[Any]) -> Any:
        """``tensors`` in the places of the leaves, without what it keeps."""
        return tree_unflatten(list(tensors)[: self.form.num_leaves], self.form)

    def kept_of(self, tensors: Sequence[Any]) -> list[tuple[tuple[str, str], Any]]:
        """What it keeps, of ``tensors`` in the places of the leaves."""
        return list(zip(self.kept, list(tensors)[self.form.num_leaves :], strict=True))


@dataclass(frozen=True)
class Score:
    """One forward.

    Attributes:
        calls: In their order.
        reads: What the code behind the last call reads: the output, or a loss.
        parameters: Names of parameters outside of units that it reads.
        random: Whether anything draws random numbers.
        written: What units gave and code outside of them writes into: every stage does so again.
        writes_inputs: Whether the model's own code writes into its inputs.
    """

    calls: tuple[Call, ...]
    reads: frozenset[Value]
    parameters: frozenset[str]
    random: bool
    written: frozenset[Value] = frozenset()
    writes_inputs: bool = False

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

    def begin(self, position: int) -> tuple[str, int]:
        """Which unit is called there, and for the how many-th time."""
        unit = self.calls[position].unit
        return unit, sum(call.unit == unit for call in self.calls[:position])

    def starts(self, begins: Sequence[tuple[str, int]]) -> tuple[int, ...]:
        """The first call of each stage.

        Args:
            begins: Of each stage what `begin` says of its first call.

        Raises:
            LookupError: A unit that begins a stage is not called so often, or not behind the stage before.
        """
        places = {self.begin(position): position for position in range(len(self.calls))}
        found = [0]
        for unit, number in begins[1:]:
            if places.get((unit, number), -1) <= found[-1]:
                raise LookupError(unit)
            found.append(places[unit, number])
        return tuple(found)

    def next(self, unit: str, position: int) -> int:
        """The first call of ``unit`` from ``position`` on.

        Raises:
            LookupError: There is none.
        """
        for index in range(position, len(self.calls)):
            if self.calls[index].unit == unit:
                return index
        raise LookupError(unit)
