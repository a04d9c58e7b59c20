"""Units: the modules that a forward calls as a whole, and of which each belongs to a stage.

What lies around them is the skeleton: the model, containers, the stacks that hold the blocks. Every rank runs the
skeleton's own code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from nbtrain.parallel.blocks import repeated_blocks
from nbtrain.parallel.mixin import Mixin, mix
from nbtrain.parallel.pipeline import flow

_NAME = "_nbtrain_unit"


class Unit(Mixin):
    """Mixed into the class of a unit: whether it runs is up to the flow of the forward that calls it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = super().__call__  # type: ignore[misc]  # of the module's class
        conductor = flow.current()
        if conductor is None:
            return run(*args, **kwargs)
        return conductor.call(vars(self)[_NAME], run, args, kwargs)


def make_units(units: dict[str, nn.Module]) -> None:
    """Lets a flow decide what becomes of calls of ``units``."""
    for name, module in units.items():
        mix(module, Unit)
        module.__dict__[_NAME] = name


def find_units(
    model: nn.Module, at_least: int, begins: Collection[str] = (), opened: Collection[str] = ()
) -> dict[str, nn.Module]:
    """The units of ``model``, by name: blocks, and outside of them the largest modules that are called.

    Modules that hold neither parameters nor statistics and draw no random numbers are none: every rank runs them.

    Args:
        model: Not laid out yet.
        at_least: Containers are opened until there are as many units, where there can be.
        begins: Names of modules that are to begin a stage: what holds them is opened, unless it is a block.
        opened: Names of modules of which code outside calls the insides.
    """
    skeleton = {id(model)}
    blocks = repeated_blocks(model)
    known = {name for name, _ in model.named_modules()}
    outside = [name for name in begins if name in known and not blocks.keys() & set(_ancestors(name))]
    skeleton |= {id(model.get_submodule(name)) for name in opened}
    for name in (*blocks, *outside):
        skeleton |= {id(model.get_submodule(above)) for above in _ancestors(name)}
    units = dict(_walk(model, "", skeleton, set()))
    while len(units) < at_least and (largest := _openable(units)) is not None:
        skeleton.add(id(largest))
        units = dict(_walk(model, "", skeleton, set()))
    return units


def uncalled(units: dict[str, nn.Module], called: Collection[str]) -> list[str]:
    """Units that no forward called, and that have some inside: code outside may call those."""
    return [name for name, unit in units.items() if name not in called and any(map(_matters, unit.children()))]


def skeleton_of(model: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules of ``model`` that are in no unit, by name."""
    inside = insides(units.values())
    return {name: module for name, module in model.named_modules() if id(module) not in inside}


def insides(units: Iterable[nn.Module]) -> set[int]:
    """The ids of all modules in ``units``, themselves among them."""
    return {id(module) for unit in units for module in unit.modules()}


def _walk(module: nn.Module, prefix: str, skeleton: set[int], seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        if id(child) in skeleton or type(child).forward is nn.Module.forward:
            yield from _walk(child, f"{prefix}{name}.", skeleton, seen)
        elif _matters(child):
            yield f"{prefix}{name}", child


def _matters(module: nn.Module) -> bool:
    return any(
        isinstance(part, _NormBase | _DropoutNd) or any(tensor is not None for tensor in part._parameters.values())
        for part in module.modules()
    )


def _openable(units: dict[str, nn.Module]) -> nn.Module | None:
    """The largest unit whose forward only calls its children, else the largest that has some."""

    def rank(unit: nn.Module) -> tuple[bool, int]:
        return isinstance(unit, nn.Sequential), sum(parameter.numel() for parameter in unit.parameters())

    several = [unit for unit in units.values() if sum(map(_matters, unit.children())) > 1 or _wraps(unit)]
    return max(several, key=rank, default=None)


def _wraps(unit: nn.Module) -> bool:
    children = list(unit.children())
    return len(children) == 1 and not any(tensor is not None for tensor in unit._parameters.values())


def _ancestors(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
