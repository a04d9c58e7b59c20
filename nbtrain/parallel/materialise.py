"""Memory for a model that was built under `meta_init`: one tensor at a time, so that a rank never holds more than its
part and one whole parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from nbtrain.errors import ModelError
from nbtrain.parallel.deferred import Deferred

Part = Callable[[str, torch.Tensor], torch.Tensor]
"""This rank's part of a whole tensor, by name: what tensor parallelism leaves of it."""


def check_same_start(deferred: Deferred, group: dist.ProcessGroup) -> None:
    """Raises on every rank where ranks would make other weights. Collective.

    Raises:
        ModelError: The constructor used numbers that differ: another seed, NumPy's or Python's random numbers.
    """
    digests: list[Any] = [None] * group.size()
    dist.all_gather_object(digests, deferred.digest(), group=group)
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise ModelError(
            f"rank {odd[0]} initialises the model otherwise than rank 0; give nt.meta_init() the same seed on every "
            "rank, and seed NumPy's and Python's random numbers where the constructor uses them"
        )


def materialise_buffers(model: nn.Module, deferred: Deferred, device: torch.device) -> None:
    """Makes the buffers, whole, in place. No plan shards them."""
    _fill(model, "_buffers", lambda name, old: deferred.make(name, device))


def materialise_shards(model: nn.Module, deferred: Deferred, device: torch.device, part: Part | None = None) -> None:
    """Makes this rank's part of every parameter, in place, after the model was laid out on meta. Moves nothing.

    Args:
        model: Laid out: parameters are DTensors where FSDP shards them, or plain ones.
        deferred: Of the whole model, from before it was laid out.
        device: Where the parameters live.
        part: Applied to each whole parameter before FSDP's slice is taken; None where nothing else cuts.
    """

    def make(name: str, old: torch.Tensor) -> torch.Tensor:
        whole = deferred.make(name, device)
        mine = whole if part is None else part(name, whole)
        return _parameter(_laid_out(mine, old), old)

    _fill(model, "_parameters", make)
    _tell_fsdp(model)


def _fill(model: nn.Module, kind: str, make: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Puts what ``make`` gives in the place of each meta tensor; a tied one is made once."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for prefix, module in model.named_modules():
        slots = getattr(module, kind)
        for key, old in slots.items():
            if old is not None and old.is_meta:
                name = f"{prefix}.{key}" if prefix else key
                # with the old one, so that no other gets its id
                if id(old) not in made:
                    made[id(old)] = (old, make(name, old))
                slots[key] = made[id(old)][1]


def _laid_out(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``whole`` as ``like`` lies, in memory of its own."""
    if not isinstance(like, DTensor):
        return whole.to(like.dtype)
    # no source rank: each rank slices its own copy
    cut = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    local = cut.to_local().to(like.dtype)
    if local.untyped_storage().nbytes() > local.numel() * local.element_size():
        local = local.clone()  # a slice would keep the whole
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _parameter(data: torch.Tensor, old: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(data.detach(), requires_grad=old.requires_grad)
    vars(parameter).update(vars(old))
    return parameter


def _tell_fsdp(model: nn.Module) -> None:
    """FSDP keeps its parameters beside the modules."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:  # type: ignore[attr-defined]
                    for record in group.fsdp_params:
                        record.reset_sharded_param()
