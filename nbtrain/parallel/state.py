"""Whole tensors of a laid-out model, under the names of the model before it was laid out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from nbtrain.errors import ModelError
from nbtrain.parallel import stages
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.replicate import Replica
from nbtrain.parallel.tensor.parts import take_part
from nbtrain.parallel.tensor.state import whole_of
from nbtrain.parallel.update import ShardedUpdate


def full_state_dict(model: nn.Module, layout: Layout) -> dict[str, Any]:
    """Copies on the CPU, on every rank. Collective. Tied entries are one object.

    One tensor is gathered at a time: beside the copy, the peak is the largest of them.
    """
    own = model.state_dict(keep_vars=True)
    if layout.split is not None:
        return stages.gathered(structure(layout).state_dict(keep_vars=True), own, layout, whole)
    # by identity: a tied parameter has one tensor under two names
    made: dict[int, Any] = {}
    state = {}
    for name, value in own.items():
        if id(value) not in made:
            made[id(value)] = whole(name, value, layout)
        state[name] = made[id(value)]
    return state


def full_gradients(model: nn.Module, layout: Layout) -> dict[str, torch.Tensor | None]:
    """Whole gradients on the CPU, under the names of `full_state_dict`; None where a parameter has none. Collective."""
    if isinstance(layout.result, ShardedUpdate):
        layout.result.gather_gradients()
    own = {name: parameter.grad for name, parameter in model.named_parameters()}
    if layout.split is not None:
        return stages.gathered(dict(structure(layout).named_parameters()), own, layout, whole)
    return {name: None if gradient is None else whole(name, gradient, layout) for name, gradient in own.items()}


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], layout: Layout) -> None:
    """Copies whole tensors into this rank's shards. Moves nothing: each rank has the whole state.

    Raises:
        ModelError: Names or shapes differ; all of them are listed, and nothing was changed.
    """
    own = model.state_dict(keep_vars=True)
    every = own if layout.split is None else structure(layout).state_dict(keep_vars=True)
    problems = [*_name_problems(every, state), *_shape_problems(every, state, layout)]
    if problems:
        raise ModelError("the state does not fit the model: " + "; ".join(problems))
    with torch.no_grad():
        for name, value in own.items():
            if _is_extra(name):
                set_extra(model, name, state[name])
            elif isinstance(value, torch.Tensor):
                value.copy_(_like(value, part_of(name, state[name], layout)))


def whole(name: str, value: Any, layout: Layout) -> Any:
    """What one device would have in the place of ``value``: a copy on the CPU. Collective.

    Args:
        name: Of the parameter that it is, or is the gradient of.
        value: A tensor, or something else, which is itself.
        layout: Of the model.
    """
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach()
    if isinstance(tensor, DTensor):
        # FSDP may keep shards on the CPU, where their mesh has no group to gather by
        on_mesh: Any = tensor.to(tensor.device_mesh.device_type)
        tensor = on_mesh.full_tensor()
    if (cut := layout.cuts.get(name)) is not None and layout.peers is not None:
        return whole_of(tensor, cut, layout.peers).cpu()
    return tensor.cpu() if isinstance(value, DTensor) else tensor.to("cpu", copy=True)


def part_of(name: str, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The part of a whole tensor that this rank's layers hold, before data-parallel ranks shard it. Moves nothing."""
    cut = layout.cuts.get(name)
    return tensor if cut is None else take_part(tensor, cut, layout.part, layout.plan.tp)


def structure(layout: Layout) -> nn.Module:
    """The whole model on meta, where stages hold parts of it."""
    blueprint = layout.blueprint
    if blueprint is None or blueprint.module is None:
        problem = "" if blueprint is None else blueprint.problem
        raise ModelError(f"pp={layout.plan.pp} needs a copy of the model's structure: {problem}; type pp=1")
    return blueprint.module


def whole_shape(name: str, tensor: torch.Tensor, layout: Layout) -> tuple[int, ...]:
    """On one device."""
    shape = list(tensor.shape)
    if (cut := layout.cuts.get(name)) is not None:
        shape[cut.dim] = cut.size
    return tuple(shape)


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def set_extra(model: nn.Module, name: str, value: Any) -> None:
    """What a module keeps beside tensors, by ``get_extra_state`` and ``set_extra_state``."""
    inner = model.module if isinstance(model, Replica) else model
    inner.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


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


def _shape_problems(own: Mapping[str, Any], state: Mapping[str, Any], layout: Layout) -> list[str]:
    tensors = {n: value for n, value in own.items() if isinstance(value, torch.Tensor) and not _is_extra(n)}
    shapes = {name: whole_shape(name, value, layout) for name, value in tensors.items()}
    return [
        f"'{name}' is {tuple(state[name].shape)} and must be {shape}"
        for name, shape in shapes.items()
        if name in state and tuple(state[name].shape) != shape
    ]
