"""`Timeline`: wall time as measured, and the replay that shows what a device for each rank would have done."""

import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from nbtrain.events import EventKind, TimelineEvent
from nbtrain.planner.schedules import Action, Kind, Schedule, make_schedule
from nbtrain.planner.simulate import simulate
from nbtrain.planner.timeline import EVENT_OF, Timeline
from nbtrain.telemetry.timeline import Recorder

Times = Callable[[Action], float]


def events_of(schedule: Schedule, wall_s: Times, busy_s: Times, step: int = 0) -> list[tuple[TimelineEvent, ...]]:
    """What the ranks would record if actions took ``wall_s``, of which they worked ``busy_s``."""

    def event(action: Action, start_s: float, end_s: float) -> TimelineEvent:
        what = (EVENT_OF[action.kind], action.stage, action.microbatch, step)
        return TimelineEvent(*what, 100 * step + start_s, end_s - start_s, busy_s(action))

    return [tuple(event(*timed) for timed in row) for row in simulate(schedule, wall_s).by_rank]


def test_measured_and_replayed_are_two_timelines() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    timeline = Timeline(tuple(events_of(schedule, lambda action: 2.0 + action.stage, lambda action: 1.0)), schedule)
    assert timeline.measured.bubble == pytest.approx(simulate(schedule, lambda action: 2.0 + action.stage).bubble)
    assert timeline.measured.computing_s == pytest.approx((16, 24))
    assert timeline.replayed == simulate(schedule, lambda action: 1.0)
    assert timeline.equal_stages.bubble == pytest.approx(1 / 4)
    assert pickle.loads(pickle.dumps(timeline)) == timeline


def test_steps_count_together_and_a_step_that_broke_off_does_not_count() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    busy_s = (0.5, 0.25, 0.75, 0.125)
    steps = [events_of(schedule, lambda action: 1.0, lambda action, s=s: s, step) for step, s in enumerate(busy_s)]
    steps[3][1] = steps[3][1][:2]
    events = tuple(sum((step[rank] for step in steps), ()) for rank in range(2))
    timeline = Timeline(events, schedule)
    assert timeline.measured.steps == (0, 1, 2)
    assert timeline.measured.makespan_s == pytest.approx(3 * 6)
    assert timeline.replayed == simulate(schedule, lambda action: 0.25)  # the least
    # the oldest step is not whole where its first events gave way to later ones
    assert Timeline(events, schedule, num_dropped=(0, 1)).measured.steps == (1, 2)


def test_accumulation_runs_a_schedule_twice_and_replicas_hold_the_same_stages() -> None:
    schedule = make_schedule("zbv", 2, 3)
    once = events_of(schedule, lambda action: 1.0, lambda action: 1.0)
    again = [tuple(replace(event, start_s=event.start_s + 50) for event in row) for row in once]
    timeline = Timeline((once[0] + again[0], once[1] + again[1], once[0] + again[0], once[1] + again[1]), schedule)
    assert timeline.measured.steps == (0,)
    assert timeline.replayed == simulate(schedule)
    assert [line.split()[:2] for line in repr(timeline).splitlines()[2:6]] == [
        ["0", "0,3"],
        ["1", "1,2"],
        ["2", "0,3"],
        ["3", "1,2"],
    ]


def test_the_table_of_a_rank_that_waits() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    rows = events_of(schedule, lambda action: 0.002, lambda action: 0.001)
    rows[1] = (TimelineEvent(EventKind.RECEIVE, 1, 0, 0, 0.0, 0.002, 0.0), *rows[1])
    assert repr(Timeline(tuple(rows), schedule)).splitlines() == [
        "Timeline of Schedule('gpipe', 2 ranks, 2 stages, 2 microbatches), 1 step of 12.0 ms from first to last "
        "computation; times a step, bubbles as idle over computing time",
        "rank  stages  busy ms  wall ms  waiting ms  measured  replayed  equal stages",
        "   0       0      4.0      8.0         0.0     0.500     0.500         0.500",
        "   1       1      4.0      8.0         2.0     0.500     0.500         0.500",
        " all                                           0.500     0.500         0.500",
    ]


def test_what_cannot_be_replayed_is_shown_as_far_as_it_goes() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    rows = events_of(schedule, lambda action: 1.0, lambda action: 1.0)
    assert Timeline((rows[0],), schedule).replayed is None  # nobody has the other rank's events
    assert "0.500" in repr(Timeline((rows[0],), schedule))
    plain = Timeline((rows[0],))  # no pipeline
    assert (plain.replayed, plain.equal_stages, plain.measured.steps) == (None, None, (0,))
    cut = Timeline((rows[0][:3],), schedule, num_dropped=(5,))
    assert repr(cut) == "Timeline of no step yet, 1 ranks record; take some and ask again; 5 earlier events gave way"


@pytest.mark.parametrize(("name", "bubble"), [("1f1b", 3 / 8), ("interleaved_zero_bubble", 3 / 48)])
def test_the_replay_of_contending_ranks_has_the_bubble_of_the_formula(name: str, bubble: float) -> None:
    """Four ranks share the interpreter's lock, so that wall time shows no pipeline at all."""
    schedule = make_schedule(name, 4, 8)
    recorders = _run_on_threads(schedule)
    timeline = Timeline(tuple(made.events() for made in recorders), schedule)
    assert timeline.replayed.bubble == pytest.approx(bubble, abs=0.02)
    assert timeline.measured.bubble > 0
    assert sum(timeline.measured.waiting_s) > 0


def _run_on_threads(schedule: Schedule) -> list[Recorder]:
    done = {action: threading.Event() for rank in range(schedule.num_ranks) for action in schedule.actions(rank)}
    recorders = [Recorder() for _ in range(schedule.num_ranks)]
    threads = [
        threading.Thread(target=_run_rank, args=(schedule, rank, made, done)) for rank, made in enumerate(recorders)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    return recorders


def _run_rank(schedule: Schedule, rank: int, made: Recorder, done: dict[Action, threading.Event]) -> None:
    made.start()
    for action in schedule.actions(rank):
        neighbour = action.stage + (-1 if action.kind is Kind.FORWARD else 1)
        needed = done.get(replace(action, stage=neighbour))
        if needed is not None and action.kind is not Kind.BACKWARD_WEIGHT:
            with made.span(EventKind.RECEIVE, action.stage, action.microbatch):
                assert needed.wait(timeout=30)
        with made.span(EVENT_OF[action.kind], action.stage, action.microbatch):
            _work(0.002 if action.kind is Kind.BACKWARD else 0.001)
        done[action].set()


def _work(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass
