"""The line that this rank runs, written where the notebook can read it when the process is gone.

::

    each top-level statement of a cell      at once
    inside of it                            ten times a second, from a thread
    SIGSEGV, SIGABRT, SIGBUS, ..            faulthandler's dump, behind the record
    os._exit, os.kill of oneself            just before

A file of the session's folder: one record at its start, overwritten in place.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from nbtrain.engine import tracebacks
from nbtrain.events import TRAIL_BYTES, TRAIL_VARIABLE

SAMPLE_S = 0.1
MAX_LINE = 300  # characters of a source line


class Trail:
    """Writes to ``path``; without one it does nothing."""

    def __init__(self, path: str | None) -> None:
        self._owner = os.getpid()  # forked children (DataLoader workers) are not the rank
        self._running = threading.Event()
        self._file: int | None = None
        if path:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            os.lseek(self._file, TRAIL_BYTES, os.SEEK_SET)  # faulthandler appends here
            faulthandler.enable(self._file, all_threads=False)
            _before_the_process_ends(self.look)
            threading.Thread(target=self._sample, name="nbtrain-trail", daemon=True).start()

    def statement(self, code: CodeType) -> None:
        """A top-level statement of a cell begins."""
        if self._file is not None and tracebacks.is_cell(code.co_filename):
            first = next((line for _, _, line in code.co_lines() if line), 1)
            self._write(tracebacks.source_line(code.co_filename, first, "<module>"))

    def look(self) -> None:
        """Write where the main thread is now."""
        if self._file is not None and os.getpid() == self._owner and (line := tracebacks.cell_line()):
            self._write(line)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A cell runs inside."""
        self._running.set()
        try:
            yield
        finally:
            self._running.clear()
            self._write(None)

    def _sample(self) -> None:
        while self._running.wait():
            time.sleep(SAMPLE_S)
            if self._running.is_set():
                self.look()

    def _write(self, line: dict[str, Any] | None) -> None:
        if self._file is None:
            return
        record = line and {key: line[key] for key in ("file", "number", "cell")}
        if record and line:
            record["line"] = line["line"].strip()[:MAX_LINE]
        data = json.dumps(record).encode()[: TRAIL_BYTES - 1].ljust(TRAIL_BYTES - 1) + b"\n"
        os.pwrite(self._file, data, 0)


def _before_the_process_ends(look: Any) -> None:
    """Call ``look`` before this process ends itself in a way that no signal handler and no `finally` sees."""

    def looking(end: Any, applies: Any) -> Any:
        @functools.wraps(end)
        def look_first(*args: Any) -> Any:
            if applies(*args):
                with contextlib.suppress(Exception):  # what ends the process must not fail over its record
                    look()
            return end(*args)

        return look_first

    os._exit = looking(os._exit, lambda *_: True)
    os.kill = looking(os.kill, lambda pid, number: pid == os.getpid() and number != 0)
    signal.raise_signal = looking(signal.raise_signal, lambda *_: True)


trail = Trail(None)


def begin() -> None:
    """Start to write, if the session asked for it."""
    global trail
    path = os.environ.get(TRAIL_VARIABLE)
    if path and sys.platform != "win32":
        Path(path).parent.mkdir(exist_ok=True)
        trail = Trail(path)
