"""The same weights on every rank: FSDP broadcasts none, so that ranks that start apart would train a patchwork."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

_CHUNK_BYTES = 250 * 2**20


def broadcast_weights(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Overwrites parameters and buffers with those of the group's first rank. Collective.

    Those on the meta device are left out: each rank makes them itself.

    The models must agree in names, shapes and dtypes (`preflight.check_same_on_ranks`).
    """
    _own_memory(model)
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        dist._broadcast_coalesced(group, alike, _CHUNK_BYTES, 0)  # type: ignore[attr-defined]


def _own_memory(model: nn.Module) -> None:
    """Expanded buffers, whose elements share memory, cannot be written to."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and 0 in buffer.stride():
                module._buffers[name] = buffer.contiguous()
