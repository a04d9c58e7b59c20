"""The private folder of a session: connection files, logs, spilled output. It goes when the session stops."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import psutil

from nbtrain.events import REGISTRY

PREFIX = "nbtrain-"
_OWNER = "owner"  # pid and create time of the kernel that the folder belongs to


def create() -> Path:
    """A new folder that only this user can read. Folders of kernels that were killed are removed first."""
    remove_stale()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    (folder / _OWNER).write_text(f"{os.getpid()} {psutil.Process().create_time()}")
    return folder


def register(folder: Path, processes: Iterable[psutil.Process]) -> None:
    """Write down which processes must not outlive this one; `nbtrain.engine.registry` reads it."""
    (folder / REGISTRY).write_text("".join(f"{p.pid} {p.create_time()}\n" for p in processes if p.is_running()))


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def remove_stale() -> None:
    """Remove this user's folders whose kernel no longer runs."""
    for owner in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_OWNER}"):
        try:
            mine = owner.stat().st_uid == os.getuid() if hasattr(os, "getuid") else True
            pid, created = owner.read_text().split()
        except (OSError, ValueError):  # being removed or written by another kernel
            continue
        if mine and not is_alive(int(pid), float(created)):
            remove(owner.parent)


def is_alive(pid: int, created: float) -> bool:
    """Whether the process of that pid is still the one that was created then."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - created) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
