"""Memory for a model that was built under `meta_init`: one tensor at a time, so that a rank never holds more than its
shards and one whole parameter, of which it then slices its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from nbtrain.errors import ModelError
from nbtrain.parallel.blueprint import with_memory
from nbtrain.parallel.deferred import Deferred
from nbtrain.parallel.shard import param_groups

Part = Callable[[str, torch.Tensor], torch.Tensor]
"""This rank's part of a whole tensor, by name: what tensor parallelism leaves of it."""


class Unfilled:
    """In the place of `Deferred`, where numbers come later: memory, and nothing in it.

    Args:
        memory: Where; None: where the parameters live.
    """

    def __init__(self, memory: torch.device | None = None) -> None:
        self.memory = memory

    def make(self, name: str, device: torch.device) -> None:
        """No tensor."""

    def digest(self) -> str:
        return ""


Source = Deferred | Unfilled


def check_same_start(deferred: Source, group: dist.ProcessGroup) -> None:
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
    for name, buffer in _with_memory(model, "_buffers", device).items():
        buffer.copy_(deferred.make(name, device))


def materialise_shards(model: nn.Module, deferred: Source, device: torch.device, part: Part | None = None) -> None:
    """Makes this rank's part of every parameter, in place, after the model was laid out on meta. Moves nothing.

    Args:
        model: Laid out: parameters are DTensors where FSDP shards them, or plain ones.
        deferred: Of the whole model, from before it was laid out.
        device: Where the parameters live.
        part: Applied to each whole parameter before FSDP's slice is taken; None where nothing else cuts.
    """
    if isinstance(deferred, Unfilled):
        device = deferred.memory or device
    # all memory that stays comes first: what is freed in between would leave holes
    parameters = _with_memory(model, "_parameters", device)
    _tell_fsdp(model)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if (whole := deferred.make(name, device)) is None:
                continue
            mine = whole if part is None else part(name, whole)
            _local(parameter).copy_(_slice(mine, parameter))
            del whole, mine


def _with_memory(model: nn.Module, kind: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Puts uninitialised memory in the place of each meta tensor; what was made, by first name."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    names: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        slots = getattr(module, kind)
        for key, old in slots.items():
            if old is None or not old.is_meta:
                continue
            if old not in made:
                names[f"{prefix}.{key}" if prefix else key] = made[old] = with_memory(old, device)
            slots[key] = made[old]
    return names


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _slice(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``whole``, as ``like`` lies."""
    if not isinstance(like, DTensor):
        return whole
    # no source rank: each rank slices its own copy
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def _tell_fsdp(model: nn.Module) -> None:
    """FSDP keeps its parameters beside the modules."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                for group in param_groups(module):
                    for record in group.fsdp_params:
                        record.reset_sharded_param()
