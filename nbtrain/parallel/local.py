"""This rank's part of a tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's shard on this rank, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """This rank's part of each gradient that there is."""
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
