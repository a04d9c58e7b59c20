"""A directory of checkpoints, which is whole at every moment, whenever a process dies or the disk is full.

::

    runs/
      latest                                    the name of one: replaced by a rename
      step-00000100/  step-00000120/            whole: they were renamed to this when everything was on the disk
      .step-00000140.HOST.PID.BORN.TOKEN/       being written; removed by a later save where that process is dead
      .old.TOKEN/                               being removed

A second checkpoint of one step is ``step-00000120.2``; the first is removed when it is there.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Collection
from pathlib import Path

import psutil

from nbtrain.errors import CheckpointError
from nbtrain.parallel.checkpoint.manifest import NAME as MANIFEST
from nbtrain.parallel.checkpoint.manifest import Manifest

LATEST = "latest"
_SAME_MS = 2000  # a clock that is set moves the times at which processes began
_WHOLE = re.compile(r"step-(\d+)(?:\.(\d+))?")
_UNFINISHED = re.compile(r"\.step-\d+\.([^.]+)\.(\d+)\.(\d+)\.([0-9a-f]+)")
_OLD = re.compile(r"\.old\.[0-9a-f]+")


def begin(directory: Path, step: int, active: Collection[str] = ()) -> Path:
    """A new hidden directory to write a checkpoint to; what dead processes left behind is removed.

    Args:
        directory: Is made where it is missing.
        step: How many were done.
        active: Names of hidden ones that this process still writes.

    Raises:
        CheckpointError: ``directory`` is a checkpoint or a file.
    """
    if (directory / MANIFEST).exists():
        raise CheckpointError(f"{directory} is a checkpoint itself; save to {directory.parent}, which holds it")
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; give a directory")
    directory.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(directory, active)
    process = psutil.Process()
    owner = f"{_host()}.{process.pid}.{_born(process)}"
    made = directory / f".step-{step:08}.{owner}.{secrets.token_hex(4)}"
    made.mkdir()
    return made


def publish(written: Path, keep: int | None = None) -> Path:
    """Makes a checkpoint that is on the disk one of its directory's, and the latest.

    Args:
        written: What `begin` gave.
        keep: How many stay, the newest; None: all, but for others of the same step.
    """
    directory = written.parent
    step = int(written.name.split(".")[1].removeprefix("step-"))
    _sync(written)
    final = _free(directory, step)
    os.rename(written, final)
    _sync(directory)
    _point(directory, final.name)
    for old in _superseded(directory, final, keep):
        remove(old)
    return final


def find(path: Path) -> Path:
    """The checkpoint that ``path`` is, or the latest that it holds.

    Raises:
        CheckpointError: There is none.
    """
    if (path / MANIFEST).is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"there is no directory {path.absolute()}")
    with contextlib.suppress(FileNotFoundError):
        pointed = path / (path / LATEST).read_text().strip()
        if pointed.parent == path and (pointed / MANIFEST).is_file():
            return pointed
    if whole := numbered(path):
        return whole[-1]
    there = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise CheckpointError(
        f"{path.absolute()} is no checkpoint and holds none (it holds {there}); give what trainer.save was given"
    )


def numbered(directory: Path) -> list[Path]:
    """The whole checkpoints of a directory, the oldest first."""
    whole = [entry for entry in directory.iterdir() if _WHOLE.fullmatch(entry.name) and (entry / MANIFEST).is_file()]
    return sorted(whole, key=lambda entry: (Manifest.read(entry).saved_ns, _number(entry)))


def remove(path: Path) -> None:
    """First hides it, so that nobody takes a half of it for a whole."""
    hidden = path
    if not path.name.startswith("."):
        hidden = path.with_name(f".old.{secrets.token_hex(4)}")
        os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)  # what stays is removed by a later save


def _point(directory: Path, name: str) -> None:
    fresh = directory / f".old.{secrets.token_hex(4)}"
    with fresh.open("w") as file:
        file.write(f"{name}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, directory / LATEST)
    _sync(directory)


def _free(directory: Path, step: int) -> Path:
    first = directory / f"step-{step:08}"
    candidate, number = first, 1
    while candidate.exists():
        number += 1
        candidate = first.with_name(f"{first.name}.{number}")
    return candidate


def _superseded(directory: Path, newest: Path, keep: int | None) -> list[Path]:
    others = [entry for entry in numbered(directory) if entry != newest]
    same = [entry for entry in others if _number(entry)[0] == _number(newest)[0]]
    rest = [entry for entry in others if entry not in same]
    return same if keep is None else same + rest[: max(len(rest) - keep + 1, 0)]


def _number(path: Path) -> tuple[int, int]:
    match = _WHOLE.fullmatch(path.name)
    assert match is not None, "only those are asked for"
    return int(match[1]), int(match[2] or 1)


def _remove_leftovers(directory: Path, active: Collection[str]) -> None:
    for entry in directory.iterdir():
        if _OLD.fullmatch(entry.name):
            entry.unlink() if entry.is_file() else shutil.rmtree(entry, ignore_errors=True)
        elif (match := _UNFINISHED.fullmatch(entry.name)) and entry.name not in active and _is_dead(match):
            shutil.rmtree(entry, ignore_errors=True)


def _is_dead(match: re.Match[str]) -> bool:
    """Whether nobody writes any more. Of another host's processes nothing is known."""
    host, pid, born, _ = match.groups()
    if host != _host():
        return False
    try:
        process = psutil.Process(int(pid))
        alive = abs(_born(process) - int(born)) < _SAME_MS
    except psutil.NoSuchProcess:
        return True
    return not alive or process.pid == os.getpid()


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()) or "host"


def _born(process: psutil.Process) -> int:
    # in milliseconds: tells a process from a later one of the same number
    return round(process.create_time() * 1000)


def _sync(directory: Path) -> None:
    """Makes the names in a directory last; Windows has no such call."""
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
