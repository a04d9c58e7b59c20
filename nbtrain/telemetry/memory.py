"""Measured bytes: what a model and its optimizer hold on this rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the elements on this rank: a DTensor counts with its shard, a tensor that is listed twice once."""
    unique = {id(tensor): tensor for tensor in tensors}
    return sum(_local(tensor).numel() * tensor.element_size() for tensor in unique.values())


def model_bytes(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, int]:
    """``{"parameters", "gradients", "optimizer", "buffers"}`` in bytes on this rank."""
    parameters = list(model.parameters())
    return {
        "parameters": tensor_bytes(parameters),
        "gradients": tensor_bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer": tensor_bytes(_state_tensors(optimizer)),
        "buffers": tensor_bytes(model.buffers()),
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _state_tensors(optimizer: Optimizer | None) -> Iterable[torch.Tensor]:
    states = [] if optimizer is None else optimizer.state.values()
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
