"""What lies on the disk, as torch's own tools read it, against what ranks hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import nbtrain as nt
from nbtrain.parallel.pieces import Held, held_optimizer, held_parameters


def read_by_torch(path: Path) -> dict[str, Any]:
    """All of a checkpoint, by torch's converter. Collective."""
    converted = path.with_name(f"{path.name}.pt")
    if dist.get_rank() == 0:
        dcp_to_torch_save(path, converted)
    dist.barrier()
    state: dict[str, Any] = torch.load(converted)
    return state


def require_state(what: str, subject: nt.Trainer, expected: dict[str, Any]) -> None:
    """Each piece of this rank's is what torch's reader finds there, and ranks have all of them. Collective."""
    layout = subject._stepper.layout
    held = held_parameters(subject.model, layout)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, set(held))
    assert set.union(*everyone) == expected["model"].keys(), what
    for name, one in held.items():
        _require_pieces(f"{what}: {name}", one, expected["model"][name])
    optimizer = held_optimizer(subject.optimizer, subject.model, layout)
    for name, entries in optimizer.state.items():
        assert entries.keys() == expected["optimizer"]["state"][name].keys(), what
        for key, one in entries.items():
            _require_pieces(f"{what}: {key} of {name}", one, expected["optimizer"]["state"][name][key])
    groups = expected["trainer"]["optimizer"]["groups"]
    assert [dict(group.options) for group in optimizer.groups] == [group["options"] for group in groups]


def _require_pieces(what: str, held: Held, whole: torch.Tensor) -> None:
    assert (held.shape, held.dtype) == (tuple(whole.shape), whole.dtype), what
    for piece in held.pieces:
        slices = tuple(slice(start, start + size) for start, size in zip(*_box(piece), strict=True))
        assert torch.equal(piece.view, whole[slices]), what


def _box(piece: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return piece.box.starts, piece.box.sizes
