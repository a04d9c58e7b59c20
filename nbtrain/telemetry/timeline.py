"""`Recorder`: what this rank did and when, in a bounded buffer. Off until it is started.

::

    with recorder().span(EventKind.FORWARD, stage=0, microbatch=3):
        output = stage(inputs)

A span that is off costs one test of `Recorder.enabled` and a shared context manager that does nothing. On a CPU the
busy time is that of the calling thread, which takes part in what an operation does with several threads. On CUDA a pair
of events on the current stream tells when the device began and ended; they are read when `Recorder.events` is called,
which waits for the device, and not before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter, thread_time
from typing import cast

import torch

from nbtrain.events import EventKind, TimelineEvent

CAPACITY = 65_536
"""Events that a recorder keeps: of 8 microbatches and 4 stages a rank, some hundred steps."""

_What = tuple[EventKind, int | None, int | None, str]
_Timed = tuple[_What, int, float, float, float]  # a tuple takes a third of the time that making a `TimelineEvent` does
_OFF: AbstractContextManager[None] = nullcontext()


class Recorder:
    """Keeps the latest events of this rank.

    Args:
        capacity: How many; older ones give way.

    Attributes:
        enabled: Whether spans are recorded.
        step: The training step that new events belong to; whoever runs the steps sets it.
        owner: Who began to record; steps of others are not recorded.
    """

    __slots__ = ("_device", "_kept", "_num_recorded", "enabled", "owner", "step")

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.enabled = False
        self.step = 0
        self.owner: object = None
        self._device: torch.device | None = None  # of CUDA, if any
        self._kept: deque[_Timed | _OnDevice] = deque(maxlen=capacity)
        self._num_recorded = 0

    def start(self, device: torch.device | str = "cpu", owner: object = None) -> None:
        """Forgets what there is, and records from now on.

        Args:
            device: Where the work is done; on a CUDA device, its own time is measured.
            owner: Whose steps; None: anybody's.
        """
        self.clear()
        self.owner = owner
        place = torch.device(device)
        self._device = place if place.type == "cuda" else None
        self.enabled = True

    def stop(self) -> None:
        """Records no more. What there is can still be read."""
        self.enabled = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Records nothing inside."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def only_of(self, who: object) -> AbstractContextManager[None]:
        """Around a step of ``who``: records nothing if somebody else's are."""
        return nullcontext() if self.owner is None or self.owner is who else self.paused()

    def clear(self) -> None:
        """Forgets all events."""
        self._kept.clear()
        self._num_recorded = 0

    def span(
        self, kind: EventKind, stage: int | None = None, microbatch: int | None = None, name: str = ""
    ) -> AbstractContextManager[None]:
        """Records an event from entering until leaving it, by an exception too."""
        if not self.enabled:
            return _OFF
        span = _Span if self._device is None else _CudaSpan
        return span(self, (kind, stage, microbatch, name))

    @property
    def num_dropped(self) -> int:
        """How many events gave way to later ones."""
        return self._num_recorded - len(self._kept)

    def events(self) -> tuple[TimelineEvent, ...]:
        """The latest events, in the order in which they ended.

        On CUDA it waits until the device is through, and only the thread that records may ask.
        """
        if self._device is not None:
            self._read_device(self._device)
        return tuple(map(_event, self._kept.copy()))  # a copy: the training thread may append

    def _read_device(self, device: torch.device) -> None:
        anchor = _Anchor(device)
        for position, kept in enumerate(self._kept):
            if isinstance(kept, _OnDevice):
                self._kept[position] = anchor.place(kept)

    def _keep(self, event: _Timed | _OnDevice) -> None:
        self._num_recorded += 1
        self._kept.append(event)


class _Span(AbstractContextManager[None]):
    """A span in which the calling thread does the work."""

    __slots__ = ("_recorder", "_start_s", "_thread_s", "_what")

    def __init__(self, recorder: Recorder, what: _What) -> None:
        self._recorder = recorder
        self._what = what

    def __enter__(self) -> None:
        self._start_s = perf_counter()
        self._thread_s = thread_time()

    def __exit__(self, *error: object) -> None:
        busy_s = thread_time() - self._thread_s
        wall_s = perf_counter() - self._start_s
        self._recorder._keep((self._what, self._recorder.step, self._start_s, wall_s, busy_s))


class _OnDevice:
    """An event whose times the device still has to tell."""

    __slots__ = ("end", "start", "step", "what")

    def __init__(self, what: _What, step: int) -> None:
        self.what, self.step = what, step
        self.start, self.end = _device_event(), _device_event()


class _CudaSpan(AbstractContextManager[None]):
    """A span in which work is put on the current stream."""

    __slots__ = ("_event", "_recorder")

    def __init__(self, recorder: Recorder, what: _What) -> None:
        self._recorder = recorder
        self._event = _OnDevice(what, recorder.step)

    def __enter__(self) -> None:
        self._event.start.record()

    def __exit__(self, *error: object) -> None:
        self._event.end.record()
        self._recorder._keep(self._event)


class _Anchor:
    """A moment on both clocks, the device's and the host's: now, since the device's is exact over short times only."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._event = _device_event()
        self._event.record(torch.cuda.current_stream(device))
        self._event.synchronize()
        self._host_s = perf_counter()

    def place(self, event: _OnDevice) -> _Timed:
        """The event with its times. The stream does nothing else in it, so that wall and busy time are one."""
        start_s = self._host_s - event.start.elapsed_time(self._event) / 1e3
        took_s = event.start.elapsed_time(event.end) / 1e3
        return event.what, event.step, start_s, took_s, took_s


def _device_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _event(kept: _Timed | _OnDevice) -> TimelineEvent:
    (kind, stage, microbatch, name), step, start_s, wall_s, busy_s = cast("_Timed", kept)  # the device's are read
    return TimelineEvent(kind, stage, microbatch, step, start_s, wall_s, busy_s, name)


_recorder = Recorder()


def recorder() -> Recorder:
    """The recorder of this process, which is that of its rank."""
    return _recorder
