"""A rank keeps the parameters and buffers of its stages; in the places of the others are blanks without memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from nbtrain.parallel.blocks import mark_elsewhere
from nbtrain.parallel.pipeline.units import insides

_ELSEWHERE = "_nbtrain_held_elsewhere"


def keep(model: nn.Module, units: Mapping[str, nn.Module], held: Iterable[str], device: torch.device) -> None:
    """Takes from ``model`` what other ranks hold, in place. A shared parameter stays where any module that is kept has
    it.

    Args:
        model: Whole; its skeleton's buffers stay on every rank.
        units: Of the model, by name.
        held: Names of units, and of parameters outside of units, that this rank's stages need.
        device: Where the model lives.
    """
    held = set(held)
    names = held_names(model, units, held)
    for prefix, module in model.named_modules():
        for slots in (module._parameters, module._buffers):
            for key, tensor in list(slots.items()):
                if tensor is not None and (f"{prefix}.{key}" if prefix else key) not in names:
                    _blank_out(module, slots, key, tensor, device)
    for name, unit in units.items():
        if name not in held:
            mark_elsewhere(unit)


def _blank_out(
    module: nn.Module, slots: dict[str, object], key: str, tensor: torch.Tensor, device: torch.device
) -> None:
    del slots[key]
    # one number, seen through strides of 0: code outside of units may look at its shape
    value = float("nan") if tensor.is_floating_point() else 0
    stand_in = torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)
    module.__dict__[key] = stand_in
    if isinstance(tensor, nn.Parameter):
        module.__dict__.setdefault(_ELSEWHERE, {})[key] = stand_in, tensor.requires_grad


def elsewhere(module: nn.Module) -> dict[str, tuple[torch.Tensor, bool]]:
    """The parameters of a module that other ranks hold: what stands in their places, and whether they train."""
    found: dict[str, tuple[torch.Tensor, bool]] = vars(module).get(_ELSEWHERE, {})
    return found


def holders(names: Mapping[str, str], held: list[set[str]]) -> dict[str, tuple[int, ...]]:
    """The pipeline ranks that hold each parameter or buffer, by canonical name.

    Args:
        names: The canonical name of each name of the whole model.
        held: For each pipeline rank the names that it has.
    """
    found: dict[str, tuple[int, ...]] = {}
    for rank, own in enumerate(held):
        for name in dict.fromkeys(names[name] for name in names if name in own):
            found[name] = (*found.get(name, ()), rank)
    return found


def held_names(model: nn.Module, units: Mapping[str, nn.Module], held: Iterable[str]) -> set[str]:
    """Names of the parameters and buffers that `keep` would leave; ``model`` is whole."""
    held = set(held)
    staying, inside = insides(unit for name, unit in units.items() if name in held), insides(units.values())
    found = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        names = {f"{dot}{key}" for key, value in module._parameters.items() if value is not None}
        found |= names if id(module) in staying else names & held
        if id(module) in staying or id(module) not in inside:
            found |= {f"{dot}{key}" for key, value in module._buffers.items() if value is not None}
    return found
