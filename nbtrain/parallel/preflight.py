"""What is wrong with a model, found before the first collective: each finding with its cure, in one message."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from nbtrain.errors import ModelError
from nbtrain.parallel.deferred import changed_since, is_deferred
from nbtrain.plan import Plan

_CURE = "`with nt.meta_init(): model = ...`"
Signature = list[tuple[str, tuple[int, ...], str, bool]]


def check_model(model: nn.Module, plan: Plan) -> None:
    """Raises `ModelError` with all findings, the same on every rank that has the same model.

    Args:
        model: Before it is laid out.
        plan: Resolved.
    """
    findings = list(_findings(model, plan))
    if findings:
        raise ModelError("\n".join(findings))


def check_same_on_ranks(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Raises `ModelError` on every rank when the models differ in names, shapes, dtypes or what is trained.

    gloo aborts the process when shapes differ in a collective, so this comes first. Collective.
    """
    mine = _signature(model)
    theirs: list[Signature | None] = [None] * group.size()
    dist.all_gather_object(theirs, mine, group=group)
    for rank, other in enumerate(theirs):
        if other != theirs[0]:
            raise ModelError(_difference(rank, theirs[0] or [], other or []))


def _findings(model: nn.Module, plan: Plan) -> Iterator[str]:
    parameters = list(model.named_parameters())
    if not parameters:
        yield f"{type(model).__name__} has no parameters; give a model that has some"
        return
    lazy = [name for name, parameter in parameters if is_lazy(parameter)]
    if lazy:
        yield f"{_listed(lazy)} not initialised yet; run the model once on a batch before parallelizing it"
        return
    if not any(parameter.requires_grad for _, parameter in parameters):
        yield f"no parameter of {type(model).__name__} requires a gradient; type model.requires_grad_(True)"
    yield from _meta_findings([*parameters, *model.named_buffers()])
    if plan.shards_parameters and plan.dp_shard > 1:
        yield from _shard_findings(parameters)


def _meta_findings(tensors: list[tuple[str, torch.Tensor]]) -> Iterator[str]:
    unknown = [name for name, tensor in tensors if tensor.is_meta and not is_deferred(tensor)]
    if unknown:
        yield f"{_listed(unknown)} on the meta device, and nothing is known of the values; build the model by {_CURE}"
    changed = [name for name, tensor in tensors if is_deferred(tensor) and changed_since(tensor)]
    if changed:
        yield f"{_listed(changed)} changed after nt.meta_init() had ended, which is lost; do that inside: {_CURE}"


def _shard_findings(parameters: list[tuple[str, nn.Parameter]]) -> Iterator[str]:
    scalars = [name for name, parameter in parameters if parameter.ndim == 0]
    if scalars:
        yield f"{_listed(scalars)} of shape (), which cannot be sharded; give shape (1,) or type zero=0"
    dtypes = {parameter.dtype for _, parameter in parameters if parameter.requires_grad}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        yield f"parameters have several dtypes ({names}), which cannot share a shard; type model.float()"


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"


def _signature(model: nn.Module) -> Signature:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        (name, tuple(tensor.shape), str(tensor.dtype), isinstance(tensor, torch.Tensor) and tensor.requires_grad)
        for name, tensor in tensors
    ]


def _difference(rank: int, first: Signature, other: Signature) -> str:
    for ours, theirs in zip(first, other, strict=False):
        if ours != theirs:
            return (
                f"the model differs between ranks: rank 0 has {_spelled(ours)}, rank {rank} has {_spelled(theirs)}; "
                "build the same model on every rank"
            )
    return (
        f"the model differs between ranks: rank 0 has {len(first)} parameters and buffers, rank {rank} has "
        f"{len(other)}; build the same model on every rank"
    )


def _spelled(entry: tuple[str, tuple[int, ...], str, bool]) -> str:
    name, shape, dtype, trained = entry
    return f"'{name}' {shape} {dtype.removeprefix('torch.')}{'' if trained else ' not trained'}"
