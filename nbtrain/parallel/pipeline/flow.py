"""`Flow`: one forward of one stage on one microbatch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from nbtrain.errors import ModelError
from nbtrain.parallel.pipeline.score import Call, Meta, Passed, Score, Value
from nbtrain.parallel.tensor.random import Draws


class Conductor(Protocol):
    """Decides what becomes of a unit's call."""

    def call(self, unit: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In the place of ``run(*args, **kwargs)``."""

    def conduct(self, forward: Callable[[], Any]) -> Any:
        """In the place of the model's own ``forward()``."""


class Cut(BaseException):
    """Ends a forward behind the stage's last unit. Not an Exception: a model's own code may catch those."""


class _Current:
    conductor: Conductor | None = None
    losing = False


def current() -> Conductor | None:
    """Whose forward runs; None where the model's units run as they are."""
    return _Current.conductor


@contextmanager
def conducted(conductor: Conductor | None) -> Iterator[None]:
    """Calls of units inside go to ``conductor``."""
    before, _Current.conductor = _Current.conductor, conductor
    try:
        yield
    finally:
        _Current.conductor = before


def is_losing() -> bool:
    """Whether a loss function runs."""
    return _Current.losing


def as_loss(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """``loss_fn``, during which `is_losing`."""

    @functools.wraps(loss_fn)
    def losing(*args: Any, **kwargs: Any) -> Any:
        before, _Current.losing = _Current.losing, True
        try:
            return loss_fn(*args, **kwargs)
        finally:
            _Current.losing = before

    return losing


KEPT_SHAPES = 64
"""Shapes for which blanks and scores are kept: batches may have any."""


class Blanks:
    """Stand-ins for what other stages computed and nobody here reads. NaNs: what read them would show."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[Meta, torch.Tensor] = {}

    def of(self, meta: Meta) -> torch.Tensor:
        """One for each shape: memory of the model's own code, which may write into it."""
        if meta not in self._made:
            if len(self._made) >= KEPT_SHAPES:
                self._made.clear()
            self._made[meta] = blank(meta.empty(self._device))
        return self._made[meta]


def blank(room: torch.Tensor) -> torch.Tensor:
    """``room`` full of NaNs, or of zeros where its dtype has none."""
    return room.fill_(float("nan") if room.is_floating_point() or room.is_complex() else 0)


class Flow:
    """Runs the units of one stage; those before give what was received, those behind are never reached.

    Args:
        score: Of this forward.
        units: Of the model, by name.
        first: The stage's first call.
        end: The call behind its last.
        received: What earlier stages computed and this one, or a later one, reads.
        wanted: What this stage computes and a later one reads.
        blanks: For the rest.
        draws: What random numbers come from; None where none are drawn.
        microbatch: Which of the step.
    """

    def __init__(
        self,
        score: Score,
        units: Mapping[str, nn.Module],
        first: int,
        end: int,
        received: Mapping[Value, torch.Tensor],
        wanted: frozenset[Value],
        blanks: Blanks,
        draws: Draws | None,
        microbatch: int,
    ) -> None:
        self._score, self._units = score, units
        self._first, self._end = first, end
        self._received, self._wanted = received, wanted
        self._blanks = blanks
        self._draws, self._microbatch = draws, microbatch
        self._position = 0
        self.given: dict[Value, torch.Tensor] = {}

    @property
    def is_last(self) -> bool:
        return self._end == len(self._score.calls)

    @property
    def first(self) -> int:
        """The stage's first call."""
        return self._first

    def conduct(self, forward: Callable[[], Any]) -> Any:
        """``forward``'s output; where the stage ends before, what it gives: hooks around the model then see it."""
        try:
            with seeded(self._draws, self._microbatch, -1):
                output = forward()
        except Cut:
            return tuple(self.given.values())
        self._require_end()
        return output

    def run(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``model(*args, **kwargs)`` with this flow around it."""
        with conducted(self):
            output = model(*args, **kwargs)
        if not self.is_last:
            self.given = dict(zip(self.given, output, strict=True))
        return output

    def call(self, unit: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position = self._position
        if position >= self._end and not self.is_last:
            raise Cut
        call = self._expected(unit, position)
        self._position += 1
        if position < self._first:
            stand_ins = [self._leaf(Value(position, i), leaf, (args, kwargs)) for i, leaf in enumerate(call.leaves)]
            for (name, key), stand_in in call.kept_of(stand_ins):
                vars(self._units[unit].get_submodule(name))[key] = stand_in
            return call.output(stand_ins)
        with conducted(None), seeded(self._draws, self._microbatch, position):
            output = run(*args, **kwargs)
        self._take(position, call, output)
        if self._position == self._end and not self.is_last:
            raise Cut
        return output

    def _expected(self, unit: str, position: int) -> Call:
        calls = self._score.calls
        if position < len(calls) and calls[position].unit == unit:
            return calls[position]
        expected = f"'{calls[position].unit}'" if position < len(calls) else "the end of forward"
        raise ModelError(
            f"the forward called '{unit}' where it called {expected} when its stages were found: modules of a pipeline "
            "must be called in one order for inputs of one shape, whatever their values (stages are found on made-up "
            "ones); type pp=1, or put what varies into one block"
        )

    def _leaf(self, value: Value, leaf: Any, given: Any) -> Any:
        if isinstance(leaf, Passed):
            return tree_leaves(given)[leaf.index]
        if not isinstance(leaf, Meta):
            return leaf
        received = self._received.get(value)
        return self._blanks.of(leaf) if received is None else received

    def _take(self, position: int, call: Call, output: Any) -> None:
        unit = self._units[call.unit]
        kept = [vars(unit.get_submodule(name)).get(key) for name, key in call.kept]
        for index, leaf in enumerate((*tree_leaves(output), *kept)):
            if (value := Value(position, index)) in self._wanted:
                # code outside of units writes into some, here and on every later stage
                self.given[value] = leaf.clone() if value in self._score.written else leaf
            expected = call.leaves[index] if index < len(call.leaves) else None
            if type(leaf) in (int, float, bool) and leaf != expected:
                raise ModelError(
                    f"'{call.unit}' gives the number {leaf!r}, and {expected!r} when its shapes were found: other "
                    "pipeline stages do not know it; let it give a tensor, or type pp=1"
                )

    def _require_end(self) -> None:
        if self._position != len(self._score.calls):
            missing = self._score.calls[self._position].unit
            raise ModelError(
                f"the forward ended without calling '{missing}', which it called when its stages were found: modules "
                "of a pipeline must be called in one order for inputs of one shape, whatever their values (stages are "
                "found on made-up ones); type pp=1, or put what varies into one block"
            )


@contextmanager
def seeded(draws: Draws | None, microbatch: int, position: int) -> Iterator[None]:
    """Random numbers by microbatch and call: what every stage draws outside of units is the same on all."""
    if draws is None:
        yield
        return
    with draws.at(microbatch, position):
        yield
