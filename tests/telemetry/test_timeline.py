"""The recorder: what it keeps, and that busy time is work and not waiting."""

import itertools
import pickle
import threading
import time

import pytest
import torch

from nbtrain.events import EventKind, TimelineEvent
from nbtrain.telemetry.timeline import Recorder, recorder


@pytest.fixture
def on() -> Recorder:
    made = Recorder()
    made.start()
    return made


def test_nothing_is_recorded_before_it_is_started_or_after_it_is_stopped() -> None:
    made = Recorder()
    assert not recorder().enabled
    assert recorder() is recorder()
    off = made.span(EventKind.FORWARD, 0, 0)
    with off:
        assert made.span(EventKind.SEND) is off  # nothing is made for a span that is off
    made.start()
    with made.span(EventKind.FORWARD, 0, 0):
        pass
    made.stop()
    with made.span(EventKind.FORWARD, 0, 1):
        pass
    assert [event.microbatch for event in made.events()] == [0]
    made.start()
    assert made.events() == ()


def test_events_say_what_when_and_in_which_step(on: Recorder) -> None:
    began_s = time.perf_counter()
    with on.span(EventKind.FORWARD, stage=2, microbatch=5):
        pass
    on.step = 7
    with pytest.raises(ValueError, match="broken"), on.span(EventKind.COLLECTIVE, name="all-reduce"):
        raise ValueError("broken")
    first, second = on.events()
    assert (first.kind, first.stage, first.microbatch, first.step, first.name) == ("forward", 2, 5, 0, "")
    assert (second.kind, second.stage, second.microbatch, second.step, second.name) == (
        "collective",
        None,
        None,
        7,
        "all-reduce",
    )
    assert began_s <= first.start_s <= first.end_s <= second.start_s <= second.end_s <= time.perf_counter()
    assert pickle.loads(pickle.dumps((first, second))) == (first, second)


def test_only_the_latest_events_are_kept() -> None:
    made = Recorder(capacity=3)
    made.start()
    for microbatch in range(5):
        with made.span(EventKind.FORWARD, 0, microbatch):
            pass
    assert [event.microbatch for event in made.events()] == [2, 3, 4]
    assert made.num_dropped == 2
    made.clear()
    assert (made.events(), made.num_dropped) == ((), 0)


def test_busy_time_is_work_and_wall_time_waiting_too(on: Recorder) -> None:
    with on.span(EventKind.RECEIVE):
        threading.Event().wait(0.05)
    weight = torch.randn(300, 300, requires_grad=True)
    with on.span(EventKind.FORWARD):
        loss = (weight @ weight).tanh().sum()
    with on.span(EventKind.BACKWARD):  # autograd runs on the calling thread for a CPU
        loss.backward()
    waited, *worked = on.events()
    assert waited.wall_s >= 0.05
    assert waited.busy_s < 0.02
    assert all(1e-5 < event.busy_s <= event.wall_s for event in worked)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_times_are_the_devices() -> None:
    made = Recorder()
    made.start("cuda")
    matrix = torch.randn(4096, 4096, device="cuda")
    began_s = time.perf_counter()
    for microbatch in range(3):
        with made.span(EventKind.FORWARD, 0, microbatch):
            for _ in range(20):
                matrix = torch.tanh(matrix @ matrix)
    events = made.events()
    ended_s = time.perf_counter()
    assert all(isinstance(event, TimelineEvent) and event.busy_s == event.wall_s > 1e-4 for event in events)
    assert all(before.end_s <= after.start_s + 1e-4 for before, after in itertools.pairwise(events))
    assert began_s - 1e-3 <= events[0].start_s
    assert events[-1].end_s <= ended_s + 1e-3
    assert made.events() == events
