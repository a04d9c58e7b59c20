"""A pipeline schedule as data: for each rank the compute actions, in order.

::

    Schedule.steps[rank] = (step, step, ...)      what the rank does, one step after another
    Step                 = (action,)              or two, where dualpipev overlaps a forward with a backward
    Action               = 3F0                    stage 3, forward, microbatch 0

There are no times and no idle slots in it: those come from a simulation (`nbtrain.planner.simulate`). Messages are not
in it either: they follow from the stages, since ``sF`` needs what ``(s-1)F`` gave, and ``sB`` what ``(s+1)B`` gave.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate


class Kind(StrEnum):
    """What an action computes. A whole backward is the part for the inputs followed by that for the weights."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One computation of one stage on one microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


Step = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """Who computes what, in which order.

    Args:
        name: One of `nbtrain.plan.fields.SCHEDULES`; a schedule without backwards says so behind it.
        num_ranks: Pipeline-parallel ranks.
        num_stages: Stages of all ranks together.
        num_microbatches: Microbatches a step.
        rank_of: The rank that holds each stage.
        steps: By rank, what it does in order.
    """

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    rank_of: tuple[int, ...]
    steps: tuple[tuple[Step, ...], ...]

    @property
    def num_virtual_stages(self) -> int:
        """Stages a rank."""
        return self.num_stages // self.num_ranks

    @property
    def is_v_shaped(self) -> bool:
        """Whether the stages go down the ranks and up again, so that rank 0 holds the first and the last stage."""
        return self.num_stages > 1 and self.rank_of[0] == self.rank_of[-1]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, first to last."""
        return tuple(stage for stage, holder in enumerate(self.rank_of) if holder == rank)

    def actions(self, rank: int) -> Iterator[Action]:
        """What ``rank`` does in order; of a step that overlaps two actions, first the forward."""
        return (action for step in self.steps[rank] for action in step)

    def live_chunks(self, until: Kind = Kind.BACKWARD_INPUT) -> tuple[int, ...]:
        """By rank, of how many (stage, microbatch) pairs it keeps activations at most, at one time.

        Args:
            until: What ends a life where a backward has two parts. After ``Kind.BACKWARD_INPUT`` only what the
                weights' gradients need is left; ``Kind.BACKWARD_WEIGHT`` counts these remains as if they were whole.
        """
        return tuple(_peak(self.actions(rank), until) for rank in range(self.num_ranks))

    def __repr__(self) -> str:
        return (
            f"Schedule({self.name!r}, {self.num_ranks} ranks, {self.num_stages} stages, "
            f"{self.num_microbatches} microbatches)"
        )

    def __str__(self) -> str:
        """One line a rank; what is overlapped stands in brackets."""
        return "\n".join(
            f"rank {rank}: {' '.join(_spelled(step) for step in steps)}" for rank, steps in enumerate(self.steps)
        )


def _peak(actions: Iterator[Action], until: Kind) -> int:
    changes = {Kind.FORWARD: 1, Kind.BACKWARD: -1, until: -1}
    return max(accumulate(changes.get(action.kind, 0) for action in actions))


def _spelled(step: Step) -> str:
    return repr(step[0]) if len(step) == 1 else f"[{' '.join(map(repr, step))}]"
