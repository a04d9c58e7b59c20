"""An optimizer's state on this rank, as data that another rank can take over for its own parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nbtrain.errors import OptimizerError

SHARD = "shard"
WHOLE = "whole"
Portable = list[dict[str, tuple[str, Any, str]]]
"""For each parameter of the optimizer, in order: ``{key: (SHARD | WHOLE, value, device type)}``."""


def held(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters, in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def portable_state(optimizer: Optimizer) -> Portable:
    """The state, this rank's shards of what is sharded. Copies nothing.

    Raises:
        OptimizerError: It is not by parameter, laid out in another way than these, or of other things than tensors.
    """
    parameters = held(optimizer)
    if len(optimizer.state) > sum(parameter in optimizer.state for parameter in parameters):
        raise OptimizerError(f"{type(optimizer).__name__} keeps state that belongs to no parameter")
    return [
        {key: _portable(key, value, parameter) for key, value in optimizer.state.get(parameter, {}).items()}
        for parameter in parameters
    ]


def take_state(optimizer: Optimizer, state: Portable, device: str | None = None) -> None:
    """Gives the optimizer the state of another rank's, which has as many parameters in the same order.

    Args:
        optimizer: Its own state is replaced.
        state: Of the other.
        device: Where all of it goes; None takes the kind of device that it was on.
    """
    for parameter, entries in zip(held(optimizer), state, strict=True):
        if entries:
            optimizer.state[parameter] = {key: _own(entry, parameter, device) for key, entry in entries.items()}


def _portable(key: str, value: Any, parameter: torch.Tensor) -> tuple[str, Any, str]:
    if isinstance(value, (bool, int, float, complex, str, type(None))):
        return WHOLE, value, ""
    if not isinstance(value, torch.Tensor):
        raise OptimizerError(f"state '{key}' is a {type(value).__name__}, neither a tensor nor a number")
    if not isinstance(value, DTensor):
        return WHOLE, value, value.device.type
    if not isinstance(parameter, DTensor) or (value.shape, value.placements) != (parameter.shape, parameter.placements):
        raise OptimizerError(f"state '{key}' is not laid out as its parameter is")
    return SHARD, value.to_local(), value.device.type


def _own(entry: tuple[str, Any, str], parameter: torch.Tensor, device: str | None) -> Any:
    kind, value, was_on = entry
    if not isinstance(value, torch.Tensor):
        return value
    value = value.to(device or was_on)
    if kind == WHOLE or not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
