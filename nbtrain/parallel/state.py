"""Whole tensors of a laid-out model, under the names of the model before it was laid out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from nbtrain.errors import ModelError


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Copies on the CPU, on every rank. Collective. Tied entries are one object.

    One tensor is gathered at a time: beside the copy, the peak is the largest of them.
    """
    # by identity: a tied parameter has one tensor under two names
    whole: dict[int, Any] = {}
    state = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in whole:
            whole[id(value)] = _whole(value)
        state[name] = whole[id(value)]
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Copies whole tensors into this rank's shards. Moves nothing: each rank has the whole state.

    Raises:
        ModelError: Names or shapes differ; all of them are listed, and nothing was changed.
    """
    own = model.state_dict(keep_vars=True)
    problems = [*_name_problems(own, state), *_shape_problems(own, state)]
    if problems:
        raise ModelError("the state does not fit the model: " + "; ".join(problems))
    with torch.no_grad():
        for name, value in own.items():
            if isinstance(value, torch.Tensor):
                value.copy_(_like(value, state[name]))


def _whole(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach()
    if isinstance(tensor, DTensor):
        # FSDP may keep shards on the CPU, where their mesh has no group to gather by
        on_mesh: Any = tensor.to(tensor.device_mesh.device_type)
        return on_mesh.full_tensor().cpu()
    return tensor.to("cpu", copy=True)


def _like(value: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """``whole`` laid out as ``value`` is."""
    moved = whole.detach().to(value.device, value.dtype)
    if not isinstance(value, DTensor):
        return moved
    # no source rank: each rank slices its own copy
    return distribute_tensor(moved, value.device_mesh, value.placements, src_data_rank=None)


def _name_problems(own: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    missing = [name for name in own if name not in state]
    unknown = [name for name in state if name not in own]
    problems = [f"it lacks {', '.join(missing)}"] if missing else []
    return [*problems, f"the model has no {', '.join(unknown)}"] if unknown else problems


def _shape_problems(own: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    return [
        f"'{name}' is {tuple(state[name].shape)} and must be {tuple(value.shape)}"
        for name, value in own.items()
        if name in state and isinstance(value, torch.Tensor) and state[name].shape != value.shape
    ]
