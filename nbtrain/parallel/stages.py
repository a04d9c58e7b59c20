"""Tensors of a whole model of which each pipeline rank holds some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.parallel.layout import Layout

Whole = Callable[[str, Any, Layout], Any]


def gathered(every: Mapping[str, Any], own: Mapping[str, Any], layout: Layout, whole: Whole) -> dict[str, Any]:
    """What stages hold, on every rank: copies on the CPU, tied entries one object. Collective.

    Args:
        every: The whole model's, of which only names, shapes and dtypes are read.
        own: This rank's, under names of the same tensors.
        layout: Of the model.
        whole: Makes a rank's part whole, together with its data- and tensor-parallel ranks.
    """
    split, group = layout.split, layout.stages
    assert split is not None, "only called where there are stages"
    assert group is not None, "only called where there are stages"
    held = {split.canonical.get(name, name): name for name in own}
    kinds: list[Any] = [None] * group.size()
    mine = {name: own[held[name]] if not isinstance(own[held[name]], torch.Tensor) else torch.Tensor for name in held}
    dist.all_gather_object(kinds, mine, group=group)
    made: dict[str, Any] = {}
    for name, like in every.items():
        canonical = split.canonical.get(name, name)
        if canonical in made:
            continue
        holder = next(rank for rank, kind in enumerate(kinds) if canonical in kind)
        kind = kinds[holder][canonical]
        if kind is not torch.Tensor:
            made[canonical] = kind
            continue
        value = whole(held[canonical], own[held[canonical]], layout) if group.rank() == holder else None
        made[canonical] = _broadcast(value, like, holder, group)
    return {name: made[split.canonical.get(name, name)] for name in every}


def _broadcast(value: torch.Tensor | None, like: torch.Tensor, holder: int, group: dist.ProcessGroup) -> torch.Tensor:
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    if value is None:
        value = torch.empty(like.shape, dtype=like.dtype)
    moved = value.to(device).contiguous()
    dist.broadcast(moved, group=group, group_src=holder)
    return moved.cpu()
