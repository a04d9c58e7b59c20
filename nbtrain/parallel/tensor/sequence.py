"""Sequence parallelism: between the cut layers of a trunk, activations are cut along the sequence.

Megatron-LM (arXiv 2205.05198, section 4.2.2). Activations are (B, T, ...); a rank has T/t positions of each sample,
t ranks along tp::

    cut | norm | gather  columns .. row  reduce-scatter | dropout, residual, norm | gather .. | ... | join
        T/t             T                                T/t                                         T
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nbtrain.errors import BatchError, ModelError
from nbtrain.parallel.tensor.attention import HeadsAttention
from nbtrain.parallel.tensor.collectives import cut_sequence, join_sequence
from nbtrain.parallel.tensor.cuts import TensorPlan
from nbtrain.parallel.tensor.linear import Column, Row
from nbtrain.parallel.tensor.peers import Peers
from nbtrain.parallel.tensor.random import sharded
from nbtrain.parallel.tensor.region import gather_inputs
from nbtrain.parallel.tensor.state import cuts_by_name
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
        if parameter.requires_grad and name not in cut and _is_in(name, plan.trunk)
    ]


class TrunkBlock:
    """A block between whose layers activations are cut: (B, T/t, C), but for the trunk's first input and last output.

    ::

        first: (B, T, C) is cut     last: (B, T/t, C) is joined
    """

    _nbtrain_peers: Peers
    _nbtrain_block: str
    _nbtrain_first: bool
    _nbtrain_last: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        peers, name = self._nbtrain_peers, self._nbtrain_block
        key = _hidden(args, kwargs, name)
        if self._nbtrain_first:
            args, kwargs = _cut_hidden(args, kwargs, key, peers, name)
        with sharded(peers):
            output = super().forward(*args, **kwargs)  # type: ignore[misc]  # of the model's class
        given = args[key] if isinstance(key, int) else kwargs[key]
        return _given_on(output, given, name, peers if self._nbtrain_last else None)


def cut_along_sequence(model: nn.Module, plan: TensorPlan, peers: Peers) -> None:
    """Makes the trunk of a model whose layers are cut already compute on parts of the sequence. Moves nothing."""
    modules = dict(model.named_modules())
    for name in _regions(plan):
        gather_inputs(modules[name], plan.regions[name].inputs, peers)
    for name in plan.layers:
        if _is_in(name, plan.trunk):
            _on_parts(modules[name], gathered=_is_in(name, _regions(plan)))
    for name in plan.trunk:
        ends = {"_nbtrain_first": name == plan.trunk[0], "_nbtrain_last": name == plan.trunk[-1]}
        swap_class(modules[name], TrunkBlock, _nbtrain_peers=peers, _nbtrain_block=name, **ends)


def check_trunk(model: nn.Module, plan: TensorPlan) -> None:
    """Refuses a trunk whose layers might need the whole sequence and would not get it.

    Raises:
        ModelError: A forward that computes on parts of the sequence writes sizes of cut tensors too, or a layer with
            weights is left whole: it may be attention.
    """
    for name, region in plan.regions.items():
        if _is_in(name, plan.trunk) and region.written and not region.inputs:
            raise ModelError(
                f"sequence_parallel: the forward of '{name}' holds cut layers ({', '.join(region.layers)}), the sizes "
                f"of what is between them, and what acts on parts of the sequence; move these layers and what is "
                f"between them into a module of their own, {_OFF}"
            )
    cut, gathered = cuts_by_name(model, plan), _regions(plan)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or name in cut or not _is_in(name, plan.trunk) or _is_in(name, gathered):
            continue
        reasons = [f" ({why})" for whole, why in plan.whole.items() if _is_in(name, [whole])]
        raise ModelError(
            f"sequence_parallel: '{name}' is left whole{reasons[0] if reasons else ''}, and might need the whole "
            f"sequence where each rank has a part of it; choose a tp that cuts it, {_OFF}"
        )


def _regions(plan: TensorPlan) -> list[str]:
    """Those that gather their inputs. In others layers do it: columns, rows and attention."""
    attentions = {name for name, layer in plan.layers.items() if layer.style == "attention"}
    return [
        name
        for name, region in plan.regions.items()
        if _is_in(name, plan.trunk) and region.inputs and name not in attentions
    ]


def _on_parts(module: nn.Module, gathered: bool) -> None:
    """A cut layer of the trunk; ``gathered``: its region gives it the whole sequence."""
    if isinstance(module, HeadsAttention | Column):
        module.entrance = "open" if gathered else "gather"
    if isinstance(module, HeadsAttention | Row):
        module.scatters = True


def _is_in(name: str, parents: Any) -> bool:
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
    args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str, peers: Peers, block: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    hidden: torch.Tensor = args[key] if isinstance(key, int) else kwargs[key]
    if hidden.dim() < 3:
        raise BatchError(
            f"'{block}' was given activations of shape {tuple(hidden.shape)}, and sequence_parallel needs (batch, "
            f"sequence, ...); give a batch, {_OFF}"
        )
    length, degree = hidden.shape[1], peers.degree
    if length % degree:
        raise BatchError(
            f"tp={degree} does not divide the {length} positions that enter '{block}'; pad sequences to "
            f"{-(-length // degree) * degree}, {_OFF}"
        )
    part = cut_sequence(hidden, peers)
    if isinstance(key, int):
        return (*args[:key], part, *args[key + 1 :]), kwargs
    return args, {**kwargs, key: part}


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
