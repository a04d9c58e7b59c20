"""Sequence parallelism: between the cut layers of a trunk, activations are cut along the sequence.

Megatron-LM (arXiv 2205.05198, section 4.2.2). Activations are (B, T, ...); a rank has T/t positions of each sample,
t ranks along tp::

    cut | norm | gather  columns .. row  reduce-scatter | dropout, residual, norm | gather .. | ... | join
        T/t             T                                T/t                                         T

With pipeline parallelism the trunk is in runs, one a stage: whole activations cross between stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from nbtrain.errors import BatchError, ModelError
from nbtrain.parallel.tensor.attention import HeadsAttention
from nbtrain.parallel.tensor.collectives import cut_sequence, join_sequence
from nbtrain.parallel.tensor.cuts import Layer, Region, TensorPlan
from nbtrain.parallel.tensor.linear import Column, Row
from nbtrain.parallel.tensor.peers import Peers
from nbtrain.parallel.tensor.random import sharded
from nbtrain.parallel.tensor.region import gather_inputs
from nbtrain.parallel.tensor.state import cuts_by_name, full_name
from nbtrain.parallel.tensor.swap import swap_class

_OFF = "or type sequence_parallel=False"


def sequence_partial(model: nn.Module, plan: TensorPlan) -> list[str]:
    """Names of the trained parameters of which each rank has a part of the gradient, to be summed over tp.

    All whole ones of the trunk: they act on a rank's part of the sequence, or before columns that are cut.
    """
    cut = cuts_by_name(model, plan)
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in cut and is_in(name, plan.trunk)
    ]


@dataclass(eq=False)
class Trunk:
    """What the blocks of a model share.

    Attributes:
        runs: Names of its blocks, of those one behind the other that pass parts on.
        length: Positions of a part, in the forward that runs.
    """

    peers: Peers
    runs: tuple[tuple[str, ...], ...]
    length: int = 0

    def begins(self, block: str) -> bool:
        return any(run[0] == block for run in self.runs)

    def ends(self, block: str) -> bool:
        return any(run[-1] == block for run in self.runs)


class TrunkBlock:
    """A block between whose layers activations are cut: (B, T/t, C), but for a run's first input and last output.

    ::

        first: (B, T, C) is cut     last: (B, T/t, C) is joined
    """

    _nbtrain_trunk: Trunk
    _nbtrain_block: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        trunk, name = self._nbtrain_trunk, self._nbtrain_block
        key = _hidden(args, kwargs, name)
        if trunk.begins(name):
            args, kwargs = _cut_hidden(args, kwargs, key, trunk, name)
        given = args[key] if isinstance(key, int) else kwargs[key]
        _check_length(given, trunk, name)
        with sharded(trunk.peers):
            output = super().forward(*args, **kwargs)  # type: ignore[misc]  # of the model's class
        return _given_on(output, given, name, trunk.peers if trunk.ends(name) else None)


def cut_along_sequence(model: nn.Module, plan: TensorPlan, peers: Peers) -> None:
    """Makes the trunk of a model whose layers are cut already compute on parts of the sequence. Moves nothing."""
    modules, gathering = dict(model.named_modules()), _gathering(plan)
    for name, inputs in gathering.items():
        gather_inputs(modules[name], inputs, peers)
    for name in plan.layers:
        if is_in(name, plan.trunk):
            _on_parts(modules[name], gathered=is_in(name, gathering))
    trunk = Trunk(peers, (plan.trunk,))
    for name in plan.trunk:
        swap_class(modules[name], TrunkBlock, _nbtrain_trunk=trunk, _nbtrain_block=name)


def runs_of(trunk: Sequence[str], stages: Sequence[Collection[str]]) -> tuple[tuple[str, ...], ...]:
    """The blocks of a trunk that are on one pipeline stage, stage by stage.

    Args:
        trunk: Their names, in order.
        stages: Names of the units of each, which call each other in one order.

    Raises:
        ModelError: A block is in several stages, or a part of it is in one.
    """
    places = [[stage for stage, units in enumerate(stages) if name in units] for name in trunk]
    for name, found in zip(trunk, places, strict=True):
        if len(found) != 1:
            raise ModelError(
                f"sequence_parallel=True cuts activations between blocks, and pipeline stages begin inside of '{name}' "
                "or share it; use fewer stages, begin them at blocks with split=[...], or type sequence_parallel=False"
            )
    runs = itertools.groupby(zip(trunk, places, strict=True), key=lambda entry: entry[1])
    return tuple(tuple(name for name, _ in run) for _, run in runs)


def divide_trunk(model: nn.Module, trunk: Sequence[str], stages: Sequence[Collection[str]]) -> None:
    """Makes the blocks of a trunk that is cut along the sequence `runs_of` stages. Moves nothing."""
    if trunk:
        first = cast(TrunkBlock, model.get_submodule(trunk[0]))
        first._nbtrain_trunk.runs = runs_of(trunk, stages)


def check_trunk(model: nn.Module, plan: TensorPlan) -> None:
    """Refuses a trunk whose layers might need the whole sequence and would not get it.

    Raises:
        ModelError: A forward that computes on parts of the sequence writes sizes of cut tensors too, or a layer with
            weights is left whole: it may be attention.
    """
    gathered = _gathering(plan)
    for name, region in plan.regions.items():
        inside = [full_name(name, layer) for layer in region.layers if not is_in(full_name(name, layer), gathered)]
        if is_in(name, plan.trunk) and region.written and any(_is_column(plan, layer) for layer in inside):
            raise ModelError(
                f"sequence_parallel: the forward of '{name}' holds cut layers ({', '.join(region.layers)}), the sizes "
                f"of what is between them, and what acts on parts of the sequence; move these layers and what is "
                f"between them into a module of their own, {_OFF}"
            )
    cut = cuts_by_name(model, plan)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or name in cut or not is_in(name, plan.trunk) or is_in(name, gathered):
            continue
        reasons = [f" ({why})" for whole, why in plan.whole.items() if is_in(name, [whole])]
        raise ModelError(
            f"sequence_parallel: '{name}' is left whole{reasons[0] if reasons else ''}, and might need the whole "
            f"sequence where each rank has a part of it; choose a tp that cuts it, {_OFF}"
        )


def _gathering(plan: TensorPlan) -> dict[str, tuple[int | str, ...]]:
    """Modules of the trunk that gather inputs, and which. Elsewhere layers do it: columns, rows and attention."""
    found: dict[str, tuple[int | str, ...]] = {}
    for name, region in plan.regions.items():
        if not is_in(name, plan.trunk) or plan.layers.get(name, Layer("replicate")).style == "attention":
            continue
        if region.inputs:
            found[name] = region.inputs
        elif region.written and (inner := _around_columns(plan, name, region)) != name:
            found[inner] = (0,)
    return found


def _around_columns(plan: TensorPlan, name: str, region: Region) -> str:
    """The smallest module around a region's columns: its row may be outside (Hugging Face's BERT)."""
    columns = [layer.split(".")[:-1] for layer in region.layers if _is_column(plan, full_name(name, layer))]
    common = [
        parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*columns, strict=False))
    ]
    return full_name(name, ".".join(common)) if common else name


def _is_column(plan: TensorPlan, name: str) -> bool:
    return name in plan.layers and plan.layers[name].style.startswith("colwise")


def _on_parts(module: nn.Module, gathered: bool) -> None:
    """A cut layer of the trunk; ``gathered``: its region gives it the whole sequence."""
    if isinstance(module, HeadsAttention | Column):
        module.entrance = "open" if gathered else "gather"
    if isinstance(module, HeadsAttention | Row):
        module.scatters = True


def is_in(name: str, parents: Iterable[str]) -> bool:
    """Whether a module or parameter is one of ``parents``, or inside one."""
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[int | str, torch.Tensor]]:
    keys: list[int | str] = [*range(len(args)), *kwargs]
    for key, value in zip(keys, (*args, *kwargs.values()), strict=True):
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                yield key, each


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any], block: str) -> int | str:
    """Which argument the activations are: the first floating one. Other activations would not be cut."""
    found = list(_tensors(args, kwargs))
    if not found:
        raise ModelError(f"'{block}' was given no activations to cut; give them as its first argument, {_OFF}")
    (key, hidden), *others = found
    for other, tensor in others:
        if tensor.requires_grad or (tensor.dim() == hidden.dim() and tensor.shape[-1] == hidden.shape[-1]):
            raise ModelError(
                f"sequence_parallel cuts one tensor of activations, and '{block}' takes another as argument {other!r}, "
                f"{tuple(tensor.shape)}; type sequence_parallel=False"
            )
    return key


def _cut_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str, trunk: Trunk, block: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    hidden: torch.Tensor = args[key] if isinstance(key, int) else kwargs[key]
    if hidden.dim() < 3:
        raise BatchError(
            f"'{block}' was given activations of shape {tuple(hidden.shape)}, and sequence_parallel needs (batch, "
            f"sequence, ...); give a batch, {_OFF}"
        )
    length, degree = hidden.shape[1], trunk.peers.degree
    if length % degree:
        raise BatchError(
            f"tp={degree} does not divide the {length} positions that enter '{block}'; pad sequences to "
            f"{-(-length // degree) * degree}, {_OFF}"
        )
    part = cut_sequence(hidden, trunk.peers)
    if not _in_backward():
        trunk.length = length // degree
    if isinstance(key, int):
        return (*args[:key], part, *args[key + 1 :]), kwargs
    return args, {**kwargs, key: part}


def _check_length(part: torch.Tensor, trunk: Trunk, block: str) -> None:
    """A residual around a block adds whole activations to parts, which would even broadcast where a part is one."""
    if not _in_backward() and trunk.length and part.shape[1] != trunk.length:
        raise ModelError(
            f"sequence_parallel: '{block}' was given {part.shape[1]} positions, and a part of the sequence has "
            f"{trunk.length}; what is added between blocks must be added inside them, {_OFF}"
        )


def _in_backward() -> bool:
    """Recompute runs blocks again, of any forward before."""
    return torch._C._current_graph_task_id() != -1


def _given_on(output: Any, part: torch.Tensor, block: str, join: Peers | None) -> Any:
    """A block's output, whose first tensor is its activations: checked, and joined where the trunk ends."""
    found = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(found, torch.Tensor) or found.shape[:2] != part.shape[:2]:
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
        raise ModelError(
            f"sequence_parallel: '{block}' was given a part {tuple(part.shape)} of its activations and must give one "
            f"back, and gave {shape}; type sequence_parallel=False"
        )
    if join is None:
        return output
    whole = join_sequence(found, join)
    return (whole, *output[1:]) if isinstance(output, tuple) else whole
