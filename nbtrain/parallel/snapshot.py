"""What a step changes before its optimizer does, to take back when it does not end."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


class Snapshot:
    """Random states (dropout, ``random``) and batch statistics of ``model``, as they are now."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self.random = random_state(device)
        self._statistics = [(buffer, buffer.clone()) for buffer in _statistics(model)]

    def restore(self) -> None:
        set_random_state(self.random, self._device)
        with torch.no_grad():
            for buffer, before in self._statistics:
                buffer.copy_(before)


def random_state(device: torch.device) -> torch.Tensor:
    """The random states of the CPU and of ``device``, as bytes."""
    cpu = torch.get_rng_state()
    return torch.cat([torch.cuda.get_rng_state(device), cpu]) if device.type == "cuda" else cpu


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Takes back what `random_state` gave, here or on another rank."""
    gpu, cpu = state.tensor_split([len(state) - len(torch.get_rng_state())])
    torch.set_rng_state(cpu.clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(gpu.clone(), device)


def _statistics(model: nn.Module) -> list[torch.Tensor]:
    layers = (module for module in model.modules() if isinstance(module, _NormBase))
    return [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
