"""A stretch of code that an interrupt does not cut.

An optimizer that stepped half of its parameters has no state, and a cell that half of its ranks got has no end.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delivers a SIGINT that falls inside behind the end. Off the main thread it does nothing: no signal goes there."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pending:
            handler(*pending[-1])
