"""An optimizer that goes on with the parameters of another layout: a twin takes them first, the live one at the end.

The live optimizer stays the object that it is, with its groups and options: schedulers and names hold on to it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nbtrain.errors import OptimizerError
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.local import local
from nbtrain.parallel.moving import Catalog, Key
from nbtrain.parallel.optimizer import make_optimizer
from nbtrain.parallel.pieces import Held, HeldOptimizer, canonical_names, held_optimizer, optimizer_names
from nbtrain.parallel.shardable import stateless
from nbtrain.parallel.transfer import gather
from nbtrain.parallel.update import ShardedUpdate

_COUNT = "step"
"""Of torch's optimizers: the one 0-d state that is no number for each element, also where the parameter is 0-d."""


@dataclass(frozen=True)
class Estate:
    """What all ranks know of an optimizer, beside its tensors' numbers.

    Attributes:
        groups: For each group the canonical names of its parameters.
        plain: What is no tensor, by parameter and key.
        devices: Of 0-d tensors, the kind of device ("cpu"), by parameter and key.
    """

    groups: list[list[str]]
    plain: dict[Key, Any]
    devices: dict[Key, str]


def tensors_of(held: HeldOptimizer) -> dict[Key, Held]:
    """This rank's part of the optimizer's tensors, by parameter and key."""
    return {
        (name, key): value
        for name, entries in held.state.items()
        for key, value in entries.items()
        if isinstance(value, Held)
    }


def estate_of(held: HeldOptimizer) -> Estate:
    """Collective over all ranks, which may have different parameters in as many groups."""
    plain, devices = {}, {}
    for name, entries in held.state.items():
        for key, value in entries.items():
            if not isinstance(value, Held):
                plain[name, key] = value
            elif value.shape == () and value.pieces:
                devices[name, key] = value.pieces[0].view.device.type
    reports = gather(([group.names for group in held.groups], plain, devices))
    by_group = zip(*(names for names, *_ in reports), strict=True)
    groups = [list(dict.fromkeys(itertools.chain(*parts))) for parts in by_group]
    estate = Estate(groups, {}, {})
    for _, values, kinds in reversed(reports):
        estate.plain.update(values)
        estate.devices.update(kinds)
    return estate


def twin_of(optimizer: Optimizer, estate: Estate, model: nn.Module, layout: Layout) -> Optimizer:
    """An optimizer of the same kind and options, without state, of the parameters of ``model``. Collective.

    Raises:
        OptimizerError: The layout gives it what it cannot step, as `make_optimizer`.
    """
    names = canonical_names(model, layout)
    parameters = {names.get(name, name): parameter for name, parameter in model.named_parameters()}
    twin = stateless(optimizer)
    for group, held in zip(twin.param_groups, estate.groups, strict=True):
        group["params"] = [parameters[name] for name in held if name in parameters]
    return make_optimizer(twin, model, layout)


def make_room(twin: Optimizer, estate: Estate, catalog: Catalog, model: nn.Module, layout: Layout) -> dict[Key, Held]:
    """Gives ``twin`` the state's tensors, with arbitrary numbers in them; what of each lies on this rank.

    Args:
        twin: Of `twin_of`.
        estate: Of the old optimizer.
        catalog: Of the weights, by parameter, and of the old optimizer's tensors, by parameter and key.
        model: That it steps.
        layout: Of the model.

    Raises:
        OptimizerError: Some of the state lies in no way that the layout has for it; all of it is told.
    """
    names, canonical = optimizer_names(model, layout), canonical_names(model, layout)
    keys: dict[str, list[str]] = {}
    for name, *rest in [*catalog, *estate.plain]:
        keys.setdefault(name, []).extend(rest)
    problems = []
    for parameter in (parameter for group in twin.param_groups for parameter in group["params"]):
        own = names[id(parameter)]
        name = canonical.get(own, own)
        if isinstance(model, ShardedUpdate) and not parameter.numel():
            continue  # it lies on other ranks
        for key in keys.get(name, ()):
            try:
                twin.state[parameter][key] = _room(parameter, name, key, estate, catalog)
            except OptimizerError as problem:
                problems.append(str(problem))
    if problems:
        raise OptimizerError(f"{type(twin).__name__} cannot be laid out so: {'; '.join(problems[:5])}")
    return tensors_of(held_optimizer(twin, model, layout))


def _room(parameter: nn.Parameter, name: str, key: str, estate: Estate, catalog: Catalog) -> Any:
    """One entry of the state of ``parameter``."""
    if (entry := catalog.get((name, key))) is None:
        return estate.plain[name, key]
    is_alike = entry.shape == catalog[name,].shape and key != _COUNT
    if is_alike:
        return torch.zeros_like(parameter.detach(), dtype=entry.dtype)
    if entry.shape == ():
        on_host = estate.devices.get((name, key)) == "cpu"
        return torch.zeros((), dtype=entry.dtype, device="cpu" if on_host else local(parameter).device)
    if isinstance(parameter, DTensor) or catalog[name,].shape != parameter.shape:
        raise OptimizerError(
            f"its '{key}' of '{name}' is {entry.shape} and belongs to the whole parameter, which is cut or sharded"
        )
    return torch.zeros(entry.shape, dtype=entry.dtype, device=parameter.device)


def hand_over(optimizer: Optimizer, twin: Optimizer) -> None:
    """``optimizer`` has from now on the parameters and the state of ``twin``. Moves nothing."""
    for group, fresh in zip(optimizer.param_groups, twin.param_groups, strict=True):
        group["params"] = fresh["params"]
    optimizer.state.clear()
    optimizer.state.update(twin.state)
