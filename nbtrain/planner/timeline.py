"""`Timeline`: what the ranks did as the clock showed it, and what they would have done with a device each.

Two timelines, never mixed. *Measured* is wall time: on a CPU with more ranks than cores it shows contention, which no
schedule is to blame for. *Replayed* is the schedule's own dependency graph with the busy time of each action
(`nbtrain.planner.simulate`): what one device a rank would show.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from nbtrain.events import EventKind, TimelineEvent
from nbtrain.planner.schedule import Action, Kind, Schedule
from nbtrain.planner.simulate import Simulation, simulate

EVENT_OF = {
    Kind.FORWARD: EventKind.FORWARD,
    Kind.BACKWARD: EventKind.BACKWARD,
    Kind.BACKWARD_INPUT: EventKind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT: EventKind.BACKWARD_WEIGHT,
}
"""What a recorder calls each kind of action."""

_KIND_OF = {event: kind for kind, event in EVENT_OF.items()}
_Events = tuple[TimelineEvent, ...]


@dataclass(frozen=True)
class Measured:
    """What the clock showed, of whole steps.

    Args:
        events: By rank.
    """

    events: tuple[_Events, ...]

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The training steps, in order."""
        return tuple(sorted({event.step for events in self.events for event in events}))

    @cached_property
    def makespan_s(self) -> float:
        """From the first computation of any rank to the end of the last, all steps together."""
        spans: dict[int, list[TimelineEvent]] = defaultdict(list)
        for events in self.events:
            for event in _computations(events):
                spans[event.step].append(event)
        return sum(max(e.end_s for e in span) - min(e.start_s for e in span) for span in spans.values())

    @cached_property
    def computing_s(self) -> tuple[float, ...]:
        """By rank, the seconds that forwards and backwards took."""
        return tuple(sum(event.wall_s for event in _computations(events)) for events in self.events)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """By rank, the seconds of work in forwards and backwards."""
        return tuple(sum(event.busy_s for event in _computations(events)) for events in self.events)

    @cached_property
    def waiting_s(self) -> tuple[float, ...]:
        """By rank, the seconds that it waited for messages."""
        return tuple(sum(event.wall_s for event in events if event.kind is EventKind.RECEIVE) for events in self.events)

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """By rank, the seconds of the makespan in which it computed nothing."""
        return tuple(self.makespan_s - computing_s for computing_s in self.computing_s)

    @property
    def bubble(self) -> float:
        """Idle over computing time of all ranks together; 0.0 where nothing was computed."""
        computing_s = sum(self.computing_s)
        return sum(self.bubble_s) / computing_s if computing_s else 0.0


@dataclass(frozen=True, repr=False)
class Timeline:
    """What happened on each rank. Plain data: it can be pickled, and the notebook's kernel can hold it.

    The ranks are all that were recorded, in any order: with data parallelism several hold the same stages. Of each
    action the replay takes the least busy time of all steps and of all ranks that did it: neighbours on shared cores
    slow each other down through caches and memory, and never speed each other up. Clocks must agree, as those of one
    host do.

    Args:
        events: By rank, what was recorded, of any number of steps.
        schedule: What the ranks ran; None without a pipeline.
        num_dropped: By rank, how many earlier events gave way; empty where none did.
    """

    events: tuple[_Events, ...]
    schedule: Schedule | None = None
    num_dropped: tuple[int, ...] = ()

    @cached_property
    def measured(self) -> Measured:
        """The steps of which everything was kept on every rank, in wall time."""
        num_dropped = self.num_dropped or (0,) * len(self.events)
        whole = set.intersection(*map(self._whole_steps, self.events, num_dropped)) if self.events else set()
        return Measured(tuple(tuple(event for event in events if event.step in whole) for events in self.events))

    @cached_property
    def replayed(self) -> Simulation | None:
        """The schedule with the least busy time of each action; None without one, or without a whole step of it."""
        if self.schedule is None:
            return None
        busy_s = self._busy_s()
        actions = {action for rank in range(self.schedule.num_ranks) for action in self.schedule.actions(rank)}
        return simulate(self.schedule, busy_s) if busy_s.keys() >= actions else None

    @cached_property
    def equal_stages(self) -> Simulation | None:
        """The schedule with stages that take equally long and messages that take no time: the literature's bubble."""
        return None if self.schedule is None else simulate(self.schedule)

    def _busy_s(self) -> dict[Action, float]:
        samples: dict[Action, list[float]] = defaultdict(list)
        for events in self.measured.events:
            for event in _computations(events):
                if event.stage is not None and event.microbatch is not None:
                    samples[Action(event.stage, _KIND_OF[event.kind], event.microbatch)].append(event.busy_s)
        return {action: min(seconds) for action, seconds in samples.items()}

    def _whole_steps(self, events: _Events, num_dropped: int) -> set[int]:
        """The steps of which all is there: not the oldest one, if events were dropped, nor one that broke off."""
        steps = {event.step for event in events if not num_dropped or event.step != events[0].step}
        if self.schedule is None:
            return steps
        counts = Counter(event.step for event in _computations(events))
        num_actions = self._num_actions(events)
        # gradient accumulation runs the schedule several times a step
        return {step for step in steps if counts[step] and counts[step] % num_actions == 0}

    def _num_actions(self, events: _Events) -> int:
        """How many actions the schedule has for the rank that recorded ``events``; 1 if it computed nothing."""
        stages = [event.stage for event in _computations(events) if event.stage is not None]
        if self.schedule is None or not stages:
            return 1
        return sum(1 for _ in self.schedule.actions(self.schedule.rank_of[stages[0]]))

    def __repr__(self) -> str:
        return _table(self)


def _computations(events: Iterable[TimelineEvent]) -> list[TimelineEvent]:
    return [event for event in events if event.kind in _KIND_OF]


def _table(timeline: Timeline) -> str:
    measured = timeline.measured
    steps = len(measured.steps)
    if not steps:
        dropped = f"; {sum(timeline.num_dropped)} earlier events gave way" if any(timeline.num_dropped) else ""
        return f"Timeline of no step yet, {len(timeline.events)} ranks record; take some and ask again{dropped}"
    what = "" if timeline.schedule is None else f" of {timeline.schedule!r}"
    rows = [_row(timeline, rank) for rank in range(len(timeline.events))]
    header = ("rank", "stages", "busy ms", "wall ms", "waiting ms", "measured", "replayed", "equal stages")
    simulations = (timeline.replayed, timeline.equal_stages)
    total = ("all", "", "", "", "", _ratio(measured.bubble), *(_ratio(s.bubble if s else None) for s in simulations))
    took_ms = measured.makespan_s * 1e3 / steps
    title = (
        f"Timeline{what}, {steps} step{'s' * (steps > 1)} of {took_ms:.1f} ms from first to last computation; times a "
        "step, bubbles as idle over computing time"
    )
    return "\n".join([title, *_aligned([header, *rows, total])])


def _row(timeline: Timeline, rank: int) -> tuple[str, ...]:
    measured = timeline.measured
    stages = sorted({event.stage for event in measured.events[rank] if event.stage is not None})
    simulations = (timeline.replayed, timeline.equal_stages)
    bubbles = [_over(s.bubble_s, s.busy_s, s.schedule.rank_of[stages[0]]) if s else None for s in simulations]
    times_s = (measured.busy_s, measured.computing_s, measured.waiting_s)
    return (
        str(rank),
        ",".join(map(str, stages)),
        *(f"{seconds[rank] * 1e3 / len(measured.steps):.1f}" for seconds in times_s),
        _ratio(_over(measured.bubble_s, measured.computing_s, rank)),
        *map(_ratio, bubbles),
    )


def _over(idle_s: Sequence[float], busy_s: Sequence[float], rank: int) -> float:
    return idle_s[rank] / busy_s[rank] if busy_s[rank] else 0.0


def _ratio(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
