"""A model that can be looked at without memory for its weights."""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def twin_of(model: nn.Module, device: torch.device) -> tuple[nn.Module, contextlib.AbstractContextManager[object]]:
    """What runs a forward in the place of ``model``, and inside which context.

    A model with weights is itself. One on the meta device gets a twin of fake tensors: they have shapes and a device
    as real ones, so that code which makes tensors on ``device`` runs, and no memory.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model, contextlib.nullcontext()
    twin, mode = copy.deepcopy(model), FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, torch.Tensor] = {}
    for module in twin.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    slots[name] = made.setdefault(id(tensor), _fake(tensor, device, mode))  # type: ignore[assignment]
    return twin, mode


def _fake(tensor: torch.Tensor, device: torch.device, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        fake = torch.empty_like(tensor, device=device, requires_grad=False)
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
