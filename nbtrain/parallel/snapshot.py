"""What a step changes before its optimizer does, to take back when it does not end."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class Snapshot:
    """Random states (dropout) and batch statistics of ``model``, as they are now."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._statistics = [(buffer, buffer.clone()) for buffer in _statistics(model)]

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._gpu, self._device)
        with torch.no_grad():
            for buffer, before in self._statistics:
                buffer.copy_(before)


def _statistics(model: nn.Module) -> list[torch.Tensor]:
    layers = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
