"""A directory of checkpoints, which is whole at every moment, whenever a process dies or the disk is full.

::

    runs/
      latest                                    the name of one: replaced by a rename
      step-00000100/  step-00000120/            whole: they were renamed to this when everything was on the disk
      .step-00000140.HOST.PID.BORN.TOKEN/       being written; removed by a later save where that process is dead
      .old.TOKEN/                               being removed

A second checkpoint of one step is ``step-00000120.2``; the first is removed when it is there. Only what the same
trainer has written before is removed: several may save to one directory, also at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from nbtrain.errors import CheckpointError
from nbtrain.parallel.cell import say
from nbtrain.parallel.checkpoint.manifest import NAME as MANIFEST
from nbtrain.parallel.checkpoint.manifest import Manifest
from nbtrain.parallel.checkpoint.together import told

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
        CheckpointError: ``directory`` is a checkpoint or a file, or holds a directory in the place of ``latest``.
    """
    if (directory / MANIFEST).exists():
        raise CheckpointError(f"{directory} is a checkpoint itself; save to {directory.parent}, which holds it")
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; give a directory")
    if (directory / LATEST).is_dir():
        raise CheckpointError(
            f"{directory / LATEST} is a directory, where the name of the latest checkpoint is written; rename it, or "
            "save to another directory"
        )
    directory.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(directory, active)
    process = psutil.Process()
    owner = f"{_host()}.{process.pid}.{_born(process)}"
    made = directory / f".step-{step:08}.{owner}.{secrets.token_hex(4)}"
    made.mkdir()
    return made


class Published(NamedTuple):
    """A checkpoint that is one of its directory's.

    Attributes:
        path: Of it.
        warning: What could not be done in the directory when it was there; "" where nothing failed.
    """

    path: Path
    warning: str


def publish(written: Path, manifest: Manifest, keep: int | None = None) -> Published:
    """Makes a checkpoint that is on the disk one of its directory's, and the latest.

    Args:
        written: What `begin` gave.
        manifest: Of it.
        keep: How many of the trainer's stay, the newest; None: all, but for others of the same step.
    """
    directory = written.parent
    _sync(written)
    final = _renamed(written, manifest.step)
    try:
        _sync(directory)
        _point(directory, final.name)
        for old in _superseded(directory, final, manifest, keep):
            remove(old)
    except OSError as problem:
        return Published(
            final, f"{final} is whole, but {LATEST} may name an older one, and older ones may stay: {told(problem)}"
        )
    return Published(final, "")


def require_same_model(directory: Path, manifest: Manifest) -> None:
    """Raises `CheckpointError` where another model's checkpoint of the same step is there: `load` would mix them up."""
    for entry, other in _readable(directory):
        if other.step != manifest.step or other.trainer == manifest.trainer:
            continue
        if differ := sorted({name for name, _ in manifest.shapes.items() ^ other.shapes.items()}):
            raise CheckpointError(
                f"{entry} is of the same step and of another model ({other.model}, and the trainer's is "
                f"{manifest.model}; '{differ[0]}' differs); give each model a directory of its own, e.g. "
                f"{directory / manifest.model}"
            )


def find(path: Path) -> Path:
    """The checkpoint that ``path`` is, or the latest that it holds, said where that is not the one that ``latest``
    names; so too by ``directory/latest``.

    Raises:
        CheckpointError: There is none.
    """
    if path.name == LATEST and path.is_file():
        path = path.parent
    if (path / MANIFEST).is_file():
        return path
    if not path.is_dir():
        if path.is_file():
            raise CheckpointError(
                f"{path.absolute()} is a file, and a checkpoint is a directory; trainer.import_weights reads the "
                "weights of one safetensors file"
            )
        held = ", ".join(entry.name for entry in numbered(path.parent)) if path.parent.is_dir() else ""
        raise CheckpointError(
            f"there is no directory {path.absolute()}" + (f"; {path.parent} holds {held}" if held else "")
        )
    name = ""
    with contextlib.suppress(OSError, ValueError):
        name = (path / LATEST).read_text().strip()
        if (pointed := path / name).parent == path and (pointed / MANIFEST).is_file():
            return pointed
    if whole := numbered(path):
        if name:
            say(f"{path / LATEST} names {name!r}, which is not there; taking {whole[-1].name}, the newest that is")
        return whole[-1]
    there = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise CheckpointError(
        f"{path.absolute()} is no checkpoint and holds none (it holds {there}); give what trainer.save was given"
    )


def numbered(directory: Path) -> list[Path]:
    """The whole checkpoints of a directory, the oldest first. One whose manifest is damaged is not among them."""
    return [entry for entry, _ in _readable(directory)]


def remove(path: Path) -> None:
    """First hides it, so that nobody takes a half of it for a whole. What is not there needs nothing."""
    hidden = path
    if not path.name.startswith("."):
        hidden = path.with_name(f".old.{secrets.token_hex(4)}")
        try:
            os.rename(path, hidden)
        except FileNotFoundError:
            return
    shutil.rmtree(hidden, ignore_errors=True)  # what stays is removed by a later save


def _readable(directory: Path) -> list[tuple[Path, Manifest]]:
    """In the order in which they were saved."""
    return sorted(_manifests(directory), key=lambda found: (found[1].saved_ns, _number(found[0])))


def _manifests(directory: Path) -> Iterator[tuple[Path, Manifest]]:
    for entry in directory.iterdir():
        if _WHOLE.fullmatch(entry.name):
            # damaged, of a later nbtrain, or removed meanwhile by who wrote it
            with contextlib.suppress(CheckpointError):
                yield entry, Manifest.read(entry)


def _point(directory: Path, name: str) -> None:
    # in the checkpoint itself, where no other trainer cleans up
    fresh = directory / name / f".{LATEST}"
    with fresh.open("w") as file:
        file.write(f"{name}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, directory / LATEST)
    _sync(directory)


def _renamed(written: Path, step: int) -> Path:
    """Under a name that was free, also where others take one at the same time: a directory replaces no full one."""
    while True:
        final = _free(written.parent, step)
        try:
            os.rename(written, final)
        except OSError as problem:
            if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not final.exists():
                raise
        else:
            return final


def _free(directory: Path, step: int) -> Path:
    first = directory / f"step-{step:08}"
    candidate, number = first, 1
    while candidate.exists():
        number += 1
        candidate = first.with_name(f"{first.name}.{number}")
    return candidate


def _superseded(directory: Path, newest: Path, manifest: Manifest, keep: int | None) -> list[Path]:
    """Of the same trainer, and older: what another one saves is not this one's, not even at the same moment."""
    mark = manifest.saved_ns, _number(newest)
    older = [
        entry
        for entry, other in _readable(directory)
        if other.trainer == manifest.trainer and (other.saved_ns, _number(entry)) < mark
    ]
    same = [entry for entry in older if _number(entry)[0] == manifest.step]
    rest = [entry for entry in older if entry not in same]
    return same if keep is None else same + rest[: max(len(rest) - keep + 1, 0)]


def _number(path: Path) -> tuple[int, int]:
    match = _WHOLE.fullmatch(path.name)
    assert match is not None, "only those are asked for"
    return int(match[1]), int(match[2] or 1)


def _remove_leftovers(directory: Path, active: Collection[str]) -> None:
    for entry in directory.iterdir():
        if _OLD.fullmatch(entry.name):
            entry.unlink(missing_ok=True) if entry.is_file() else shutil.rmtree(entry, ignore_errors=True)
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
