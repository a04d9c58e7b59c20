"""When each action of a schedule starts and ends, given how long each takes: one device a rank, no contention.

An action starts once its rank is free and what it needs has come::

    sF   needs   (s-1)F
    sB   needs   sF and (s+1)B                sI likewise; either kind of backward gives the next one its gradient
    sW   needs   sI

A rank keeps to its order, so that one walk over the actions gives all times (a longest path). Fed with durations of a
model it predicts; fed with the measured busy times of a run it is the replay: the timeline that the run would have had
if each rank had had a device for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from nbtrain.errors import PlanError, UsageError
from nbtrain.planner.schedule import Action, Kind, Schedule

Duration = Mapping[Any, float] | Callable[[Action], float]
Delay = float | Callable[[int, int], float]

EQUAL_STAGES = {Kind.FORWARD: 1.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}
"""Stages that take equally long, with a whole backward of twice a forward."""

_FORWARD, _GRADIENT, _WEIGHT = "F", "B", "W"
_GIVES = {
    Kind.FORWARD: _FORWARD,
    Kind.BACKWARD: _GRADIENT,
    Kind.BACKWARD_INPUT: _GRADIENT,
    Kind.BACKWARD_WEIGHT: _WEIGHT,
}
_Result = tuple[str, int, int]
"""What an action gives: an output, the gradient of an input, or of weights; and of which stage and microbatch."""


class TimedAction(NamedTuple):
    """An action with its times, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """The times of all actions.

    Args:
        schedule: What was simulated.
        by_rank: For each rank its actions in order.
    """

    schedule: Schedule
    by_rank: tuple[tuple[TimedAction, ...], ...]

    @cached_property
    def makespan_s(self) -> float:
        """From the start of the step to the end of the last action."""
        return max(actions[-1].end_s for actions in self.by_rank)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """By rank, the seconds in which it computes."""
        return tuple(sum(timed.end_s - timed.start_s for timed in actions) for actions in self.by_rank)

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """By rank, the seconds of the makespan in which it does nothing."""
        return tuple(self.makespan_s - busy_s for busy_s in self.busy_s)

    @property
    def bubble(self) -> float:
        """Idle over busy time of all ranks together; 0.0 where nothing takes any time.

        With equal stages it is (p-1)/m for gpipe and 1f1b and (p-1)/(v m) for interleaved_1f1b and looped_bfs, for p
        ranks, v stages a rank and m microbatches, a multiple of p (arXiv 2104.04473, sections 2.2.1 and 2.2.2).
        """
        busy_s = sum(self.busy_s)
        return sum(self.bubble_s) / busy_s if busy_s else 0.0


def simulate(schedule: Schedule, duration: Duration = EQUAL_STAGES, *, communication_s: Delay = 0.0) -> Simulation:
    """The times of each action of ``schedule``.

    The two actions of an overlapped step run one after the other: a device computes one thing at a time, and what the
    overlap hides is communication.

    Args:
        schedule: What the ranks do.
        duration: Seconds of an action: a function of it, or a mapping from actions, from ``(stage, kind)`` or from
            kinds. A whole backward that a mapping lacks takes as long as its two parts.
        communication_s: Seconds from the end of an action until another rank has what it gave, or a function of the
            sending and the receiving rank. It takes none of the ranks' own time.

    Raises:
        PlanError: The schedule stands still; it names the actions that wait.
        UsageError: An action has no duration.
    """
    return _Walk(schedule, _duration_of(duration), _delay_of(communication_s)).run()


class _Walk:
    """Goes through each rank's actions as far as they can, and on where a rank waited for what has just come."""

    def __init__(
        self, schedule: Schedule, duration: Callable[[Action], float], delay: Callable[[int, int], float]
    ) -> None:
        self.schedule, self.duration, self.delay = schedule, duration, delay
        self.left = [schedule.actions(rank) for rank in range(schedule.num_ranks)]
        self.done: list[list[TimedAction]] = [[] for _ in self.left]
        self.free_s = [0.0] * schedule.num_ranks
        self.end_s: dict[_Result, float] = {}
        self.waiting: dict[_Result, list[tuple[int, Action]]] = {}

    def run(self) -> Simulation:
        ready = [(rank, next(actions)) for rank, actions in enumerate(self.left)]
        while ready:
            rank, action = ready.pop()
            ready += self._go_on(rank, action)
        if self.waiting:
            raise PlanError(_standstill(self.schedule, self.waiting))
        return Simulation(self.schedule, tuple(map(tuple, self.done)))

    def _go_on(self, rank: int, action: Action | None) -> list[tuple[int, Action]]:
        """Runs the rank from ``action`` until it waits or is done; which ranks this has freed, with their action."""
        freed: list[tuple[int, Action]] = []
        while action is not None:
            start_s = self.free_s[rank]
            for needed in _needs(action, self.schedule.num_stages):
                if needed not in self.end_s:
                    self.waiting.setdefault(needed, []).append((rank, action))
                    return freed
                start_s = max(start_s, self._arrival_s(needed, rank))
            freed += self._finish(rank, action, start_s)
            action = next(self.left[rank], None)
        return freed

    def _arrival_s(self, result: _Result, rank: int) -> float:
        sender = self.schedule.rank_of[result[1]]
        return self.end_s[result] + (self.delay(sender, rank) if sender != rank else 0.0)

    def _finish(self, rank: int, action: Action, start_s: float) -> list[tuple[int, Action]]:
        end_s = self.free_s[rank] = start_s + self.duration(action)
        self.done[rank].append(TimedAction(action, start_s, end_s))
        result = (_GIVES[action.kind], action.stage, action.microbatch)
        self.end_s[result] = end_s
        return self.waiting.pop(result, [])


def _needs(action: Action, num_stages: int) -> Iterator[_Result]:
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is Kind.BACKWARD_WEIGHT:
        yield _GRADIENT, stage, microbatch
    elif kind is not Kind.FORWARD:
        yield _FORWARD, stage, microbatch
        if stage + 1 < num_stages:
            yield _GRADIENT, stage + 1, microbatch
    elif stage > 0:
        yield _FORWARD, stage - 1, microbatch


def _standstill(schedule: Schedule, waiting: Mapping[_Result, list[tuple[int, Action]]]) -> str:
    waits = sorted(
        (rank, f"rank {rank} in {action} for {stage}{letter}{microbatch}")
        for (letter, stage, microbatch), waiters in waiting.items()
        for rank, action in waiters
    )
    return (
        f"the schedule {schedule.name!r} stands still, each waits for another: {', '.join(text for _, text in waits)}; "
        "reorder these actions so that each comes behind what it needs"
    )


def _delay_of(given: Delay) -> Callable[[int, int], float]:
    if callable(given):
        return given
    return lambda sender, receiver: given


def _duration_of(given: Duration) -> Callable[[Action], float]:
    if callable(given):
        return given
    table = given

    def duration(action: Action) -> float:
        for key in (action, (action.stage, action.kind), action.kind):
            if key in table:
                return table[key]
        if action.kind is Kind.BACKWARD:
            return sum(duration(replace(action, kind=part)) for part in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
        raise UsageError(
            f"the action {action} has no duration; give one for it, for ({action.stage}, Kind.{action.kind.name}) "
            f"or for Kind.{action.kind.name}"
        )

    return duration
