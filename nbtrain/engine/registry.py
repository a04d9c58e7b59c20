"""The end of a session whose notebook kernel was killed, where no fork server sees to it.

The rendezvous store holds a pipe to the kernel. When that closes, it ends what the kernel had written down: processes
by pid and create time, with all that they have started.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import psutil

from nbtrain.events import REGISTRY

_SAME_S = 1.0  # a create time is rounded differently by platforms


def end_all(folder: Path) -> None:
    """Kill the processes that ``folder`` names, and remove it."""
    for process in _with_children(_registered(folder)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # psutil compares the create time
    shutil.rmtree(folder, ignore_errors=True)


def _registered(folder: Path) -> list[psutil.Process]:
    found = []
    path = folder / REGISTRY
    for line in path.read_text().splitlines() if path.exists() else ():
        pid, created = line.split()
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            if abs(process.create_time() - float(created)) < _SAME_S:
                found.append(process)
    return found


def _with_children(processes: list[psutil.Process]) -> list[psutil.Process]:
    everything = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            everything += process.children(recursive=True)
    return everything
