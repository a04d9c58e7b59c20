"""A model that can be run without memory for its weights."""

from __future__ import annotations

import copy

import torch
from torch import nn

_VALUE = 0.02


def twin_of(model: nn.Module, device: torch.device) -> nn.Module:
    """What runs a tiny forward in the place of ``model``.

    A model with weights is itself. One on the meta device gets a twin whose every weight is one number, seen through a
    stride of 0: what flows where does not depend on the numbers.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model
    twin = copy.deepcopy(model)
    made: dict[int, torch.Tensor] = {}
    for module in twin.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is not None and tensor.is_meta:
                    slots[name] = made.setdefault(id(tensor), _constant(tensor, device))  # type: ignore[assignment]
    return twin


def _constant(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    value = _VALUE if tensor.is_floating_point() else 0
    constant = torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)
    return nn.Parameter(constant, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else constant
