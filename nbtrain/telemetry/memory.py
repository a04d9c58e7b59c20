"""Measured bytes: what a model and its optimizer hold on this rank, and what the process holds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil
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


def process_bytes() -> dict[str, int]:
    """Bytes of this process: "rss", "pss" on Linux (shared pages counted by share), "cuda" where a GPU is in use."""
    measured = {"rss": psutil.Process().memory_info().rss}
    rollup = Path("/proc/self/smaps_rollup")
    if rollup.exists():
        measured["pss"] = _pss(rollup.read_text())
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        measured["cuda"] = torch.cuda.memory_allocated()
    return measured


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _state_tensors(optimizer: Optimizer | None) -> Iterable[torch.Tensor]:
    states = [] if optimizer is None else optimizer.state.values()
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def _pss(rollup: str) -> int:
    kilobytes = next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:"))
    return int(kilobytes) * 1024
