"""Where two layouts do not fit into memory at once: how much there is, and the old one in files meanwhile."""

from __future__ import annotations

import itertools
import math
import platform
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from nbtrain.errors import UsageError
from nbtrain.parallel.moving import BATCH_BYTES, Key
from nbtrain.parallel.pieces import Held
from nbtrain.parallel.transfer import gather
from nbtrain.plan.footprint import format_bytes

_CGROUP = Path("/sys/fs/cgroup")


def num_bytes(held: Iterable[Held]) -> int:
    """On this rank."""
    return sum(piece.view.nbytes for one in held for piece in one.pieces)


def fits(needed_bytes: int, device: torch.device | None) -> bool:
    """Whether every rank has so much memory free, beside what moving takes; the same on all ranks. Collective.

    Args:
        needed_bytes: By this rank; ranks may share a place.
        device: Where.
    """
    return not _short(needed_bytes + BATCH_BYTES, *free_memory(device))


def write(held: Mapping[Key, Held], path: Path) -> dict[Key, Held]:
    """The same pieces in a file, mapped: they take no memory that the system could not have back."""
    pieces = [piece for one in held.values() for piece in one.pieces]
    starts = list(itertools.accumulate((_aligned(piece.view.nbytes) for piece in pieces), initial=0))
    with path.open("wb") as file:
        for piece, start in zip(pieces, starts, strict=False):
            file.seek(start)
            file.write(piece.view.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().data)
        file.truncate(starts[-1] + 1)  # an empty file cannot be mapped
    mapped = torch.from_file(str(path), shared=False, size=starts[-1], dtype=torch.uint8)
    views = iter(
        mapped[start : start + piece.view.nbytes].view(piece.view.dtype).view(piece.view.shape)
        for piece, start in zip(pieces, starts, strict=False)
    )
    return {
        key: replace(one, pieces=tuple(replace(piece, view=next(views)) for piece in one.pieces))
        for key, one in held.items()
    }


def require_disk(needed_bytes: int) -> None:
    """Raises `UsageError` on all ranks where the folder for temporary files has no room. Collective."""
    folder = tempfile.gettempdir()
    if short := _short(needed_bytes, f"{platform.node()} {folder}", shutil.disk_usage(folder).free):
        place, needed, free = short
        raise UsageError(
            f"two layouts do not fit into memory at once, and the old one takes {format_bytes(needed)} in files, of "
            f"which {format_bytes(free)} are free ({place}); set TMPDIR to a folder on a larger disk before the "
            "session starts"
        )


def free_memory(device: torch.device | None) -> tuple[str, int]:
    """Whose memory ``device`` has, and how many bytes of it are free."""
    if device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return f"{platform.node()} {torch.cuda.get_device_properties(device).uuid}", free + idle
    return platform.node(), min(psutil.virtual_memory().available, _container_bytes())


def _short(needed: int, place: str, free: int) -> tuple[str, int, int] | None:
    """The first place that has less than its ranks need, with both numbers. Collective."""
    places: dict[str, tuple[int, int]] = {}
    for where, more, left in gather((place, needed, free)):
        total, least = places.get(where, (0, left))
        places[where] = total + more, min(least, left)
    return next(((where, total, least) for where, (total, least) in places.items() if total > least), None)


def _container_bytes() -> int:
    """What a container (cgroup 2) leaves; a page cache gives way."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except OSError:  # no such container
        return 2**63
    return 2**63 if limit == "max" else int(limit) - used + int(stat.get("inactive_file", 0))


def _aligned(size: int) -> int:
    """Elements of any dtype may begin there."""
    return math.ceil(size / 64) * 64
