"""A model's structure once more, for another layout: from the blueprint, and from what was changed since."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nbtrain.errors import ModelError, UsageError
from nbtrain.parallel import mesh as meshes
from nbtrain.parallel.blueprint import attributes, set_attributes, with_memory
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.moving import Catalog, Entry, Key
from nbtrain.parallel.pieces import Box, Held, Piece, extra_states
from nbtrain.parallel.retire import inner
from nbtrain.parallel.state import set_extra
from nbtrain.parallel.tensor.apply import lay_out


def check(layout: Layout) -> None:
    """Raises where a model cannot be built once more.

    Raises:
        ModelError: It could not be copied when it was laid out.
        UsageError: Its mesh has not all ranks.
    """
    blueprint = layout.blueprint
    if blueprint is None or blueprint.module is None:
        problem = "its structure was not kept" if blueprint is None else blueprint.problem
        raise ModelError(f"the model cannot be built once more: {problem}; build it again for another plan")
    if layout.mesh is not None and layout.mesh.size() != meshes.world_size():
        raise UsageError(
            f"the model was laid out on a mesh of {layout.mesh.size()} of the {meshes.world_size()} ranks (mesh=...); "
            "build it again for another plan"
        )


def blueprint_of(layout: Layout) -> nn.Module:
    """Of a layout that `check` passed."""
    module = None if layout.blueprint is None else layout.blueprint.module
    assert module is not None, "checked"
    return module


def build(layout: Layout, model: nn.Module, catalog: Catalog, device: torch.device | None) -> nn.Module:
    """The blueprint once more: parameters on the meta device, buffers in memory, with arbitrary numbers.

    Args:
        layout: Of the model.
        model: As it is trained, without the replica around it.
        catalog: With the buffers as they are now: code may have resized or registered some.
        device: Of the buffers.
    """
    module = copy.deepcopy(blueprint_of(layout))
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trained.get(name, parameter.requires_grad))
    made: dict[int, torch.Tensor] = {}
    for name, part, key, buffer in _buffers(module):
        part._buffers[key] = made.setdefault(id(buffer), _like(buffer, catalog.get((name,)), device))
    known = {name for name, *_ in _buffers(module)}
    for name, part, key, buffer in _buffers(model):
        if name not in known:
            owner = module.get_submodule(name.rpartition(".")[0])
            owner.register_buffer(key, torch.empty_like(buffer), key not in part._non_persistent_buffers_set)
    return module


def held_buffers(module: nn.Module) -> dict[Key, Held]:
    """All that this rank has, also those that no state dict has; whole, a tied one under its first name."""
    found: dict[int, None] = {}
    held: dict[Key, Held] = {}
    for name, _, _, buffer in _buffers(module):
        if id(buffer) not in found:
            found[id(buffer)] = None
            whole = Box((0,) * buffer.ndim, tuple(buffer.shape))
            pieces = (Piece(whole, buffer.detach()),) if whole.numel else ()
            held[name,] = Held(name, whole.sizes, buffer.dtype, pieces)
    return held


def _like(buffer: torch.Tensor, now: Entry | None, device: torch.device | None) -> torch.Tensor:
    """Memory for a buffer of the blueprint; some may not be anywhere any more."""
    if now is None or (tuple(buffer.shape), buffer.dtype) == (now.shape, now.dtype):
        return with_memory(buffer, device)
    return torch.empty(now.shape, dtype=now.dtype, device=device)


@dataclass(frozen=True)
class Changes:
    """What modules keep beside parameters and buffers, and have got since the blueprint.

    Attributes:
        values: Numbers, words, flags and tensors, by module and name.
        training: Mode of the root, as `parallelize` gave it.
        extras: Of ``get_extra_state``, by name.
    """

    values: dict[str, dict[str, Any]]
    training: bool
    extras: dict[str, Any]

    def give(self, model: nn.Module) -> None:
        """To the model in its new layout, as `parallelize` gives it."""
        modules = dict(inner(model).named_modules())
        set_attributes(inner(model), {name: held for name, held in self.values.items() if name in modules})
        model.training = self.training
        for name, extra in self.extras.items():
            set_extra(model, name, extra)


def changes_of(layout: Layout, model: nn.Module) -> Changes:
    """What ``layout`` itself has set, the sizes of a rank's part for instance, is left out.

    Args:
        layout: Of the model.
        model: As `parallelize` gave it.
    """
    reference = _as_laid_out(layout)
    before, tensors = attributes(reference), {name: _own_tensors(part) for name, part in reference.named_modules()}
    values = {
        name: {
            key: value
            for key, value in held.items()
            # a pipeline stage has blanks in the places of what others hold
            if key not in tensors[name] and not key.startswith("_nbtrain") and _is_changed(before[name], key, value)
        }
        for name, held in attributes(inner(model)).items()
        if name in before
    }
    return Changes(values, model.training, extra_states(model))


def _own_tensors(module: nn.Module) -> set[str]:
    return {*module._parameters, *module._buffers}


def _as_laid_out(layout: Layout) -> nn.Module:
    """The blueprint with the sizes that this rank's layers got."""
    module = copy.deepcopy(blueprint_of(layout))
    if layout.tensor is not None and layout.peers is not None:
        lay_out(module, layout.tensor, layout.peers, rank=layout.part, loss_parallel=layout.plan.loss_parallel)
    return module


def _is_changed(before: dict[str, Any], key: str, value: Any) -> bool:
    if key not in before or isinstance(value, torch.Tensor) or type(before[key]) is not type(value):
        return True
    return bool(before[key] != value)


def _buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Each with its full name, the module that has it, and its own name there; tied ones under each of their names."""
    for prefix, part in module.named_modules():
        for key, buffer in list(part._buffers.items()):
            if buffer is not None:
                yield f"{prefix}.{key}" if prefix else key, part, key, buffer
