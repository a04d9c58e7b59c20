"""A model's structure, kept when it is laid out: what a laid-out model cannot be copied or sent by.

It costs no memory worth speaking of: parameters and persistent buffers are on the meta device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_NUMBERS = (bool, int, float, str, type(None))
_PLAIN = (*_NUMBERS, torch.Tensor)
_TORCHS_OWN = set(vars(nn.Module())) - {"training"}


@dataclass(frozen=True)
class Blueprint:
    """Either a structure, or why there is none.

    Attributes:
        module: A copy of the model, without weights; buffers that no state dict has are real.
        problem: Why the model could not be copied; "" where it could.
    """

    module: nn.Module | None
    problem: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Blueprint:
        return self


def blueprint_of(model: nn.Module) -> Blueprint:
    """The structure of ``model``, before it is laid out. Tied parameters are one."""
    try:
        memo: dict[int, Any] = {id(tensor): _without_data(tensor) for tensor in _data(model)}
        return Blueprint(copy.deepcopy(model, memo))
    except Exception as problem:  # a model's own code runs here; training needs no blueprint
        return Blueprint(None, f"{type(model).__name__} cannot be copied: {type(problem).__name__}: {problem}")


def materialise(module: nn.Module, device: torch.device | None) -> nn.Module:
    """Gives a blueprint's module memory, in place; what is in it is arbitrary, but for buffers that were real."""
    made: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for slots in (part._parameters, part._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    slots[name] = made.setdefault(id(tensor), with_memory(tensor, device))  # type: ignore[assignment]
    return module


def attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Numbers, words, flags (``training`` too) and tensors that the modules hold as plain attributes now, by module."""
    return {
        name: {key: value for key, value in vars(module).items() if type(value) in _PLAIN and key not in _TORCHS_OWN}
        for name, module in model.named_modules()
    }


def counters(module: nn.Module) -> dict[str, Any]:
    """Numbers, words and flags that a module holds as plain attributes, but for its mode."""
    return {key: value for key, value in vars(module).items() if type(value) in _NUMBERS and key != "training"}


class Notes:
    """What modules note about their forwards in plain attributes: numbers, words and flags, and lists, dicts and sets
    that they add to. `restore` puts it back.

    Args:
        modules: Whose, at the moment.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._counted = [(module, counters(module)) for module in modules]
        self._records = [
            (vars(module), key, record, record.copy())
            for module, _ in self._counted
            for key, record in vars(module).items()
            if type(record) in (list, dict, set) and key not in _TORCHS_OWN
        ]

    def restore(self) -> bool:
        """Whether anything had changed."""
        changed = False
        for module, before in self._counted:
            if counters(module) != before:
                changed = True
                vars(module).update(before)
        for held, key, record, before in self._records:
            if held.get(key) is not record or not _is_same(record, before):
                changed = True
                held[key] = record
                record.clear()
                (record.extend if isinstance(record, list) else record.update)(before)
        return changed


def _is_same(record: Any, before: Any) -> bool:
    """By identity: tensors have no truth value."""
    now, then = (_flat(record), _flat(before))
    return len(now) == len(then) and all(one is other for one, other in zip(now, then, strict=True))


def _flat(record: Any) -> list[Any]:
    return [part for item in record.items() for part in item] if isinstance(record, dict) else list(record)


def set_attributes(model: nn.Module, values: dict[str, dict[str, Any]]) -> None:
    """Takes over what `attributes` found on another rank."""
    modules = dict(model.named_modules())
    for name, held in values.items():
        for key, value in held.items():
            modules[name].__dict__[key] = value


def _data(model: nn.Module) -> Iterator[torch.Tensor]:
    """What comes from another rank."""
    yield from model.parameters()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    twin = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        if type(tensor) is not nn.Parameter:
            raise TypeError(f"it has a parameter of class {type(tensor).__name__}")
        twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
    vars(twin).update(vars(tensor))
    return twin


def with_memory(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """The same on ``device``; of a meta tensor, with arbitrary numbers in it."""
    if not tensor.is_meta:
        return tensor.to(device)
    data = torch.empty_like(tensor, device=device, requires_grad=False)
    if not isinstance(tensor, nn.Parameter):
        return data
    parameter = nn.Parameter(data, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter
