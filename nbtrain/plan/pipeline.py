"""What a pipeline schedule asks of a plan: how many stages a rank, and how many microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

from nbtrain.errors import PlanError

if TYPE_CHECKING:
    from nbtrain.plan.plan import Plan

DEFAULT_ROUNDS = 4
"""Microbatches a step and rank, where the plan leaves them open: the bubble is then below 1/4 of the rest."""

_SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv", "dualpipev")

_VIRTUAL_STAGES = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}
"""Of the schedules that fix their number; the others take 2 or more."""

_IN_ROUNDS = ("interleaved_1f1b", "interleaved_zero_bubble")


def virtual_stages(schedule: str, num_virtual_stages: int | None = None) -> int:
    """How many stages each rank holds.

    Args:
        schedule: One of `nbtrain.plan.fields.SCHEDULES`.
        num_virtual_stages: The user's wish; None takes the schedule's own number, else 2.

    Raises:
        PlanError: The schedule takes another number.
    """
    own = _VIRTUAL_STAGES.get(schedule)
    if num_virtual_stages is None:
        return own or 2
    if own is not None and num_virtual_stages != own:
        others = "; several stages a rank take e.g. schedule=interleaved_1f1b" if own == 1 else ""
        raise PlanError(
            f"schedule={schedule!r} has {_stages(own)} a rank, not num_virtual_stages={num_virtual_stages}; "
            f"type num_virtual_stages={own} or leave it out{others}"
        )
    if own is None and num_virtual_stages < 2:
        raise PlanError(
            f"schedule={schedule!r} needs at least 2 stages a rank, not num_virtual_stages={num_virtual_stages}; "
            "type num_virtual_stages=2, or schedule=1f1b for one stage a rank"
        )
    return num_virtual_stages


def require_microbatches(schedule: str, num_ranks: int, num_microbatches: int) -> None:
    """Raises `PlanError`, with the nearest number that fits, where ``num_microbatches`` does not fit the schedule."""
    if fits(schedule, num_ranks, num_microbatches):
        return
    nearby = _nearest(schedule, num_ranks, num_microbatches)
    raise PlanError(
        f"schedule={schedule!r} with pp={num_ranks} needs {_need(schedule, num_ranks, num_microbatches)}, "
        f"not num_microbatches={num_microbatches}; type {' or '.join(f'num_microbatches={n}' for n in nearby)}"
    )


def fits(schedule: str, num_ranks: int, num_microbatches: int) -> bool:
    """Whether the schedule can run that many microbatches on that many ranks."""
    rounds = num_rounds(schedule, num_ranks, num_microbatches)
    return num_microbatches >= fewest_microbatches(schedule, num_ranks) and num_microbatches % rounds == 0


def fewest_microbatches(schedule: str, num_ranks: int) -> int:
    """The smallest number of microbatches that the schedule can run."""
    return {"1f1b": num_ranks, "dualpipev": 2 * num_ranks}.get(schedule, 1)


def num_rounds(schedule: str, num_ranks: int, num_microbatches: int) -> int:
    """Into how many equal rounds an interleaved schedule divides the microbatches; 1 for the others.

    A round runs through all stages of a rank. With fewer microbatches in it than there are ranks, a rank's next stage
    would wait for its first one.
    """
    return max(1, num_microbatches // num_ranks) if schedule in _IN_ROUNDS else 1


def _nearest(schedule: str, num_ranks: int, num_microbatches: int) -> list[int]:
    """The nearest numbers that fit, below and above."""
    below = next(_fitting(schedule, num_ranks, iter(range(num_microbatches, 0, -1))), None)
    above = next(_fitting(schedule, num_ranks, count(num_microbatches)))
    return [above] if below is None else [below, above]


def _fitting(schedule: str, num_ranks: int, numbers: Iterator[int]) -> Iterator[int]:
    return (number for number in numbers if fits(schedule, num_ranks, number))


def _need(schedule: str, num_ranks: int, num_microbatches: int) -> str:
    if schedule in _IN_ROUNDS:
        rounds = num_rounds(schedule, num_ranks, num_microbatches)
        return f"microbatches that divide into {num_microbatches} // {num_ranks} = {rounds} equal rounds"
    return f"at least {fewest_microbatches(schedule, num_ranks)} microbatches"


def _stages(number: int) -> str:
    return "1 stage" if number == 1 else f"{number} stages"


def num_microbatches(plan: Plan) -> int:
    """Of a step: the plan's, else its default."""
    return plan.num_microbatches or DEFAULT_ROUNDS * plan.pp


def bubble(plan: Plan) -> float:
    """Idle over computing time of a rank, where stages take equally long and messages no time.

    (p - 1) / (v m) with p ranks, v stages each and m microbatches (arXiv 2104.04473, section 2.2); a third of that
    where gradients of weights fill the gaps, and take as long as those of inputs and as forwards (arXiv 2401.10241).
    """
    stages = virtual_stages(plan.schedule, plan.num_virtual_stages)
    thirds = 3 if plan.schedule in _SPLIT_BACKWARD else 1
    return (plan.pp - 1) / (stages * num_microbatches(plan) * thirds)
