"""Makes the pipeline schedule of a name: the seven of `nbtrain.plan.fields.SCHEDULES`, and those without backwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from nbtrain.errors import PlanError, nearest
from nbtrain.plan.pipeline import require_microbatches, virtual_stages
from nbtrain.planner import loops, vees
from nbtrain.planner.schedule import Action, Kind, Schedule, Step

__all__ = ["Action", "Kind", "Schedule", "Step", "forward_only", "make_schedule", "virtual_stages"]

_STEPS: dict[str, Callable[[int, int, int, int], list[Step]]] = {
    "gpipe": loops.gpipe,
    "1f1b": loops.one_forward_one_backward,
    "interleaved_1f1b": loops.interleaved_1f1b,
    "looped_bfs": loops.looped_bfs,
    "interleaved_zero_bubble": loops.interleaved_zero_bubble,
    "zbv": vees.zbv,
    "dualpipev": vees.dualpipev,
}
_V_SHAPED = ("zbv", "dualpipev")


def make_schedule(name: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int | None = None) -> Schedule:
    """The schedule of that name.

    Args:
        name: One of `nbtrain.plan.fields.SCHEDULES`.
        num_ranks: Pipeline-parallel ranks, at least 1.
        num_microbatches: Microbatches a step.
        num_virtual_stages: Stages a rank; None takes the schedule's own number, else 2.

    Raises:
        PlanError: There is no such schedule, or it takes other numbers; the message has the nearest that fit.
    """
    if name not in _STEPS:
        raise PlanError(f"schedule={name!r} is not one of {', '.join(map(repr, _STEPS))}; {nearest(name, _STEPS)}")
    for given, number in (("pp", num_ranks), ("num_microbatches", num_microbatches)):
        if number < 1:
            raise PlanError(f"{given}={number} must be at least 1, e.g. {given}=2")
    stages_a_rank = virtual_stages(name, num_virtual_stages)
    require_microbatches(name, num_ranks, num_microbatches)
    steps = (_STEPS[name](rank, num_ranks, stages_a_rank, num_microbatches) for rank in range(num_ranks))
    return Schedule(
        name,
        num_ranks,
        num_ranks * stages_a_rank,
        num_microbatches,
        _rank_of(name, num_ranks, stages_a_rank),
        tuple(map(tuple, steps)),
    )


def forward_only(schedule: Schedule, num_microbatches: int | None = None) -> Schedule:
    """The same stages on the same ranks without backwards, as evaluation runs them.

    A rank takes what could start first if all forwards took equally long, so that few outputs wait at a time.

    Args:
        schedule: Whose stages.
        num_microbatches: At least 1, and no schedule's constraint holds; None takes the schedule's own.
    """
    number = schedule.num_microbatches if num_microbatches is None else num_microbatches
    if number < 1:
        raise PlanError(f"num_microbatches={number} must be at least 1, e.g. num_microbatches=1")
    order = _descent_and_ascent if schedule.is_v_shaped else _rounds(schedule)
    steps = []
    for rank in range(schedule.num_ranks):
        chunks = itertools.product(schedule.stages_of(rank), range(number))
        steps.append(tuple((Action(stage, Kind.FORWARD, index),) for stage, index in sorted(chunks, key=order)))
    name = f"{schedule.name} without backwards"
    return replace(schedule, name=name, num_microbatches=number, steps=tuple(steps))


def _rank_of(name: str, num_ranks: int, stages_a_rank: int) -> tuple[int, ...]:
    loop = tuple(range(num_ranks))
    return loop + loop[::-1] if name in _V_SHAPED else loop * stages_a_rank


def _descent_and_ascent(chunk: tuple[int, int]) -> int:
    """When a forward starts if each takes 1 and a rank's two stages take turns: one is even, the other odd."""
    stage, microbatch = chunk
    return 2 * microbatch + stage


def _rounds(schedule: Schedule) -> Callable[[tuple[int, int]], tuple[int, int, int]]:
    """Rounds of as many microbatches as there are ranks, each through all stages of a rank."""

    def order(chunk: tuple[int, int]) -> tuple[int, int, int]:
        stage, microbatch = chunk
        return microbatch // schedule.num_ranks, stage, microbatch

    return order
