"""`Passage`: what crosses the borders of a stage, and `Microbatch`: what a step does with one.

::

    received   tensors of earlier stages that this or a later stage reads
    relayed    those of them that a later stage reads: sent on as they are; their gradients are added up on the way back
    given      what this stage computes and a later one reads
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nbtrain.parallel.pipeline.flow import Flow
from nbtrain.parallel.pipeline.score import Meta, Score, Value


@dataclass(frozen=True)
class Passage:
    """What a stage does in forwards of one score.

    Attributes:
        first: Its first call.
        end: The call behind its last.
        incoming: What it receives.
        outgoing: What it sends.
    """

    score: Score
    first: int
    end: int
    incoming: tuple[Value, ...]
    outgoing: tuple[Value, ...]

    @cached_property
    def given(self) -> frozenset[Value]:
        return frozenset(value for value in self.outgoing if value.call >= self.first)

    @cached_property
    def relayed(self) -> tuple[Value, ...]:
        return tuple(value for value in self.outgoing if value.call < self.first)

    @cached_property
    def returning(self) -> tuple[Value, ...]:
        """Those of ``incoming`` for which a gradient is sent back."""
        return tuple(value for value in self.incoming if self.meta(value).requires_grad)

    @cached_property
    def awaited(self) -> tuple[Value, ...]:
        """Those of ``outgoing`` for which a gradient comes back."""
        return tuple(value for value in self.outgoing if self.meta(value).requires_grad)

    def meta(self, value: Value) -> Meta:
        return self.score.meta(value)


def passages(score: Score, starts: Sequence[int]) -> list[Passage]:
    """Of all stages, of which ``starts`` are the first calls."""
    routes = [*score.routes(starts), ()]
    ends = [*starts[1:], len(score.calls)]
    return [
        Passage(score, first, end, incoming, outgoing)
        for first, end, (incoming, outgoing) in zip(starts, ends, itertools.pairwise(routes), strict=True)
    ]


@dataclass
class Microbatch:
    """One microbatch of a step.

    Attributes:
        passages: Of all stages.
        index: Its number in the step; random numbers depend on it.
        forward: Runs the model with a flow around it: ``forward(flow)``. On the last stage it gives what backward
            starts from, a 0-d tensor; None where there is no backward.
        watched: What is around its forwards and backwards.
        whole_backward: Whether its gradients of inputs and of weights come together whatever the schedule says.
    """

    passages: Sequence[Passage]
    index: int
    forward: Callable[[Flow], Any]
    watched: Callable[[], Any]
    whole_backward: bool = False
