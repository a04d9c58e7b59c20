"""`lay_out`: a model's layers become a rank's parts of them, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from nbtrain.errors import ModelError
from nbtrain.parallel.tensor.attention import check_attention, cut_attention
from nbtrain.parallel.tensor.cuts import Cut, Layer, TensorPlan
from nbtrain.parallel.tensor.embedding import check_embedding, cut_embedding
from nbtrain.parallel.tensor.linear import Column, Row, cut_linear
from nbtrain.parallel.tensor.parts import take_part
from nbtrain.parallel.tensor.peers import Peers
from nbtrain.parallel.tensor.region import read_sizes_as_whole
from nbtrain.parallel.tensor.sequence import check_trunk, cut_along_sequence, is_in
from nbtrain.parallel.tensor.state import attribute_cuts, full_name

Holder = tuple[str, nn.Module, str]
"""Name of a module, the module, and the parameter's own name in it."""


def lay_out(
    model: nn.Module, plan: TensorPlan, group: dist.ProcessGroup | None, *, rank: int, loss_parallel: bool = False
) -> None:
    """Cuts parameters and swaps classes as ``plan`` says. Moves nothing, so that one rank can call it alone.

    Parameters stay plain ``nn.Parameter``s, real or meta, with their attributes; tied ones stay one object. Modules
    keep their names, and are instances of the classes that they were.

    Args:
        model: Whole; the same on all peers.
        plan: For its layers, regions and trunk.
        group: Of the tensor-parallel ranks.
        rank: In ``group``.
        loss_parallel: Heads whose logits would be gathered give `CutLogits`.

    Raises:
        ModelError: A parameter is cut by one of its holders only, or a layer cannot be cut so. Nothing was changed.
    """
    modules = dict(model.named_modules())
    plan = _with_tied_embeddings(modules, plan)
    _check(model, modules, plan)
    peers = Peers(group, rank, plan.degree)
    _cut_parameters(modules, attribute_cuts(model, plan), peers)
    for name, layer in plan.layers.items():
        if (swap := _SWAPS.get(layer.style)) is not None:
            swap(modules[name], layer)
            modules[name].peers = peers
        if loss_parallel and layer.style == "colwise_gather_output" and len(layer.cuts["weight"].segments) == 1:
            modules[name].output = "logits"
    _keep_off_fast_paths(modules, plan)
    for name, region in plan.regions.items():
        if region.written:
            read_sizes_as_whole(modules[name], peers, sums=not is_in(name, plan.trunk))
    if plan.trunk:
        cut_along_sequence(model, plan, peers)


def _with_tied_embeddings(modules: dict[str, nn.Module], plan: TensorPlan) -> TensorPlan:
    """An embedding whose weight another one cuts is cut too: Hugging Face's T5 has one that nothing calls."""
    cut = {
        id(module.weight): layer
        for name, layer in plan.layers.items()
        if layer.style == "vocab" and isinstance(module := modules.get(name), nn.Embedding)
    }
    tied = {
        name: cut[id(module.weight)]
        for name, module in modules.items()
        if name not in plan.layers and isinstance(module, nn.Embedding) and id(module.weight) in cut
    }
    return replace(plan, layers={**plan.layers, **tied})


def _check(model: nn.Module, modules: dict[str, nn.Module], plan: TensorPlan) -> None:
    missing = [name for name in (*plan.layers, *plan.regions, *plan.trunk) if name not in modules]
    if missing:
        raise ModelError(f"the model has no module {', '.join(map(repr, missing))}; make the plan of this model")
    held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in attribute_cuts(model, plan):
        if name not in held:
            raise ModelError(f"the model has no parameter '{name}' to cut; make the plan of this model")
    for name, layer in plan.layers.items():
        _check_layer(name, modules[name], layer, plan.degree)
    check_trunk(model, plan)


def _check_layer(name: str, module: nn.Module, layer: Layer, degree: int) -> None:
    needed = {"vocab": nn.Embedding, "attention": nn.MultiheadAttention}.get(layer.style, nn.Module)
    if not isinstance(module, needed):
        raise ModelError(f"'{name}' is a {type(module).__name__}; the style {layer.style!r} needs nn.{needed.__name__}")
    if layer.style in _SWAPS and layer.style != "attention" and "weight" not in layer.cuts:
        raise ModelError(f"the plan's layer '{name}' is {layer.style} and has no cut of its weight; give one")
    if isinstance(module, nn.Embedding) and layer.style == "vocab":
        check_embedding(name, module)
    if isinstance(module, nn.MultiheadAttention) and layer.style == "attention":
        check_attention(name, module, degree)


def _column(module: nn.Module, layer: Layer) -> None:
    cut_linear(module, Column, transposed=layer.cuts["weight"].dim == 1)
    module.cut = layer.cuts["weight"]  # type: ignore[assignment]


def _gathering_column(module: nn.Module, layer: Layer) -> None:
    _column(module, layer)
    module.output = "gathered"  # type: ignore[assignment]


def _row(module: nn.Module, layer: Layer) -> None:
    cut_linear(module, Row, transposed=layer.cuts["weight"].dim == 0)


def _vocab(module: nn.Module, layer: Layer) -> None:
    cut_embedding(module)  # type: ignore[arg-type]


def _attention(module: nn.Module, layer: Layer) -> None:
    cut_attention(module)  # type: ignore[arg-type]


_SWAPS: dict[str, Callable[[nn.Module, Layer], None]] = {
    "colwise": _column,
    "colwise_gather_output": _gathering_column,
    "rowwise": _row,
    "vocab": _vocab,
    "attention": _attention,
}


def _keep_off_fast_paths(modules: dict[str, nn.Module], plan: TensorPlan) -> None:
    """torch's transformer layers read the weights of the layers inside them in eval, as if they were whole."""
    for name, module in modules.items():
        prefix = f"{name}." if name else ""
        if isinstance(module, nn.TransformerEncoder) and any(layer.startswith(prefix) for layer in plan.layers):
            module.use_nested_tensor = False
        if isinstance(module, nn.TransformerEncoderLayer) and any(layer.startswith(prefix) for layer in plan.layers):
            module.activation_relu_or_gelu = 0


def _cut_parameters(modules: dict[str, nn.Module], cuts: dict[str, Cut], peers: Peers) -> None:
    """First everything is cut aside, so that an error leaves the model as it was."""
    fresh: list[tuple[list[Holder], nn.Parameter]] = []
    for holders in _holders(modules):
        if (cut := _common_cut(holders, cuts)) is not None:
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


def _common_cut(holders: list[Holder], cuts: dict[str, Cut]) -> Cut | None:
    """The cut of a parameter, on which the layers that hold it agree.

    A module around layers may hold a layer's parameter too (Hugging Face's heads do): it gets the part.
    """
    layers = [holder for holder in holders if not _is_around(holder, holders)]
    names = [full_name(name, own) for name, _, own in layers]
    for (module, _, _), name in zip(layers, names, strict=True):
        if cuts.get(name) != cuts.get(names[0]):
            whole = f"tp_plan={{..., '{layers[0][0]}': 'replicate', '{module}': 'replicate'}}"
            raise ModelError(
                f"'{names[0]}' and '{name}' are one parameter, and {_told(names[0], cuts)}, but {_told(name, cuts)}; "
                f"cut both alike or neither, e.g. {whole}"
            )
    return cuts.get(names[0])


def _is_around(holder: Holder, holders: list[Holder]) -> bool:
    return any(name.startswith(f"{holder[0]}." if holder[0] else "") and name != holder[0] for name, _, _ in holders)


def _told(name: str, cuts: dict[str, Cut]) -> str:
    cut = cuts.get(name)
    return f"'{name}' is left whole" if cut is None else f"'{name}' is cut along dim {cut.dim} {cut.segments}"


def _part(holder: Holder, cut: Cut, peers: Peers) -> nn.Parameter:
    name, module, own = holder
    whole = module._parameters[own]
    assert whole is not None, "only those that exist have holders"
    try:
        part = take_part(whole.detach(), cut, peers.rank, peers.degree)
    except ModelError as problem:
        raise ModelError(f"'{full_name(name, own)}': {problem}") from None
    parameter = nn.Parameter(part, requires_grad=whole.requires_grad)
    vars(parameter).update(vars(whole))
    return parameter
