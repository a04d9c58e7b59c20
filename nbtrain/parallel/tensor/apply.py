"""`lay_out`: a model's layers become a rank's parts of them, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch import nn

from nbtrain.errors import ModelError
from nbtrain.parallel.tensor.cuts import Cut, Layer, TensorPlan
from nbtrain.parallel.tensor.embedding import check_embedding, cut_embedding
from nbtrain.parallel.tensor.linear import Column, Row, cut_linear
from nbtrain.parallel.tensor.parts import take_part
from nbtrain.parallel.tensor.peers import Peers, TensorGrouped

Holder = tuple[str, nn.Module, str]
"""Name of a module, the module, and the parameter's own name in it."""


def lay_out(model: nn.Module, plan: TensorPlan, group: dist.ProcessGroup | None, *, rank: int) -> None:
    """Cuts parameters and swaps classes as ``plan`` says. Moves nothing, so that one rank can call it alone.

    Parameters stay plain ``nn.Parameter``s, real or meta, with their attributes; tied ones stay one object. Modules
    keep their names, and are instances of the classes that they were.

    Args:
        model: Whole; the same on all peers.
        plan: For its layers and regions.
        group: Of the tensor-parallel ranks.
        rank: In ``group``.

    Raises:
        ModelError: A parameter is cut by one of its holders only, or a layer cannot be cut so. Nothing was changed.
    """
    modules = dict(model.named_modules())
    missing = [name for name in plan.layers if name not in modules]
    if missing:
        raise ModelError(f"the model has no module {', '.join(map(repr, missing))}; make the plan of this model")
    peers = Peers(group, rank, plan.degree)
    for name, layer in plan.layers.items():
        if layer.style == "vocab":
            check_embedding(name, modules[name])
    _cut_parameters(modules, plan, peers)
    for name, layer in plan.layers.items():
        if (swap := _SWAPS.get(layer.style)) is not None:
            swap(modules[name], layer)
        if isinstance(modules[name], TensorGrouped):
            modules[name].peers = peers


def _column(module: nn.Module, layer: Layer) -> None:
    cut_linear(module, Column)


def _gathering_column(module: nn.Module, layer: Layer) -> None:
    cut_linear(module, Column)
    module.gathers = layer.cuts["weight"]  # type: ignore[assignment]


def _row(module: nn.Module, layer: Layer) -> None:
    cut_linear(module, Row)


def _vocab(module: nn.Module, layer: Layer) -> None:
    cut_embedding(module)  # type: ignore[arg-type]


_SWAPS: dict[str, Callable[[nn.Module, Layer], None]] = {
    "colwise": _column,
    "colwise_gather_output": _gathering_column,
    "rowwise": _row,
    "vocab": _vocab,
}


def _cut_parameters(modules: dict[str, nn.Module], plan: TensorPlan, peers: Peers) -> None:
    """First everything is cut aside, so that an error leaves the model as it was."""
    fresh: list[tuple[list[Holder], nn.Parameter]] = []
    for holders in _holders(modules):
        if (cut := _common_cut(holders, plan)) is not None:
            fresh.append((holders, _part(holders[0], cut, peers)))
    for holders, parameter in fresh:
        for _, module, own in holders:
            module._parameters[own] = parameter


def _holders(modules: dict[str, nn.Module]) -> Iterator[list[Holder]]:
    """For each parameter all that hold it."""
    found: dict[int, list[Holder]] = {}
    for name, module in modules.items():
        for own, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((name, module, own))
    yield from found.values()


def _common_cut(holders: list[Holder], plan: TensorPlan) -> Cut | None:
    cuts = [_cut_of(name, own, plan) for name, _, own in holders]
    for (name, _, own), cut in zip(holders, cuts, strict=True):
        if cut != cuts[0]:
            first, other = f"{holders[0][0]}.{holders[0][2]}", f"{name}.{own}"
            raise ModelError(
                f"'{first}' and '{other}' are one parameter, and {_told(first, cuts[0])}, but {_told(other, cut)}; cut "
                f"both alike or neither, e.g. tp_plan={{..., '{holders[0][0]}': 'replicate', '{name}': 'replicate'}}"
            )
    return cuts[0]


def _told(name: str, cut: Cut | None) -> str:
    return f"'{name}' is left whole" if cut is None else f"'{name}' is cut along dim {cut.dim} {cut.segments}"


def _cut_of(module: str, own: str, plan: TensorPlan) -> Cut | None:
    layer = plan.layers.get(module)
    return None if layer is None else layer.cuts.get(own)


def _part(holder: Holder, cut: Cut, peers: Peers) -> nn.Parameter:
    name, module, own = holder
    whole = module._parameters[own]
    assert whole is not None, "only those that exist have holders"
    try:
        part = take_part(whole.detach(), cut, peers.rank, peers.degree)
    except ModelError as problem:
        raise ModelError(f"'{name}.{own}': {problem}") from None
    parameter = nn.Parameter(part, requires_grad=whole.requires_grad)
    vars(parameter).update(vars(whole))
    return parameter
