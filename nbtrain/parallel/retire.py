"""What becomes of a model's old layout when it is laid out anew: its memory goes, its names are the new one's."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nbtrain.errors import ModelError
from nbtrain.parallel import live
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.replicate import Replica
from nbtrain.parallel.shard import param_groups
from nbtrain.parallel.update import ShardedUpdate

_GONE = (
    "this model was laid out anew, and what it held has moved; type trainer.model (names of the notebook were bound to "
    "it, entries of lists and attributes of objects were not)"
)


def inner(model: nn.Module) -> nn.Module:
    """The model itself, without the replica around it."""
    return model.module if isinstance(model, Replica) else model


def rebind(namespaces: Iterable[dict[str, Any]], old: nn.Module, new: nn.Module) -> list[str]:
    """Binds the names that hold the old model, a module or a parameter of it, to what took its place.

    Args:
        namespaces: A notebook's names, or a script's.
        old: As `parallelize` gave it.
        new: The same, laid out anew.

    Returns:
        The names.
    """
    # a sharded model is the module itself, and its names may mean a replica then: that is what reduces gradients
    heirs = {**_heirs(inner(old), inner(new)), id(old): new}
    bound: dict[str, None] = {}
    for namespace in {id(names): names for names in namespaces}.values():
        for name, value in list(namespace.items()):
            if (heir := heirs.get(id(value))) is not None:
                namespace[name] = heir
                bound[name] = None
    return [name for name in bound if not name.startswith("_")]


def retire(model: nn.Module, layout: Layout) -> None:
    """Frees what the model holds, also where somebody holds on to it; its forward raises from now on. Moves nothing."""
    layout.gone = _GONE
    layout.loop = layout.usage = layout.result = layout.pipeline = None
    live.untrack(layout)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _let_go_shards(module)
    if isinstance(model, Replica):
        _let_go_replica(model)
    for tensor in [*model.parameters(), *inner(model).buffers()]:
        tensor.grad = None
        _empty(tensor)
    for module in {id(module): module for module in (model, inner(model))}.values():
        module.register_forward_pre_hook(_refuse, prepend=True)
    gc.collect()  # the layers of a laid-out model hold each other


def _heirs(old: nn.Module, new: nn.Module) -> dict[int, Any]:
    modules, parameters = dict(new.named_modules()), dict(new.named_parameters(remove_duplicate=False))
    found: dict[int, Any] = {id(old): new}
    for name, module in old.named_modules():
        if name in modules:
            found[id(module)] = modules[name]
    for name, parameter in old.named_parameters(remove_duplicate=False):
        if name in parameters:
            found[id(parameter)] = parameters[name]
    return found


def _let_go_shards(module: FSDPModule) -> None:
    """FSDP keeps shards, and what they were gathered into, beside the modules."""
    for group in param_groups(module):
        for record in group.fsdp_params:
            record._sharded_param_data = record._sharded_param_data.new_empty(0)
            record.all_gather_outputs = []
            for attribute in ("_unsharded_param", "_sharded_post_forward_param", "_sharded_post_forward_param_data"):
                if hasattr(record, attribute):
                    setattr(record, attribute, None)


def _let_go_replica(replica: Replica) -> None:
    replica.unwrap()
    replica._trained = []
    if isinstance(replica, ShardedUpdate):
        for _, piece in replica._pairs():
            piece.grad = None
            _empty(piece)
        replica._buckets, replica._places = [], []


def _empty(tensor: torch.Tensor) -> None:
    """Its memory goes as soon as nobody else holds it; an alias of the user's stays what it is."""
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            tensor._local_tensor = tensor._local_tensor.new_empty(0)
        else:
            tensor.data = tensor.new_empty(0)


def _refuse(module: nn.Module, args: Any) -> NoReturn:
    raise ModelError(_GONE)
