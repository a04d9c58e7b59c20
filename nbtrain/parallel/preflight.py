"""What is wrong with a model, found before the first collective: each finding with its cure, in one message."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.spectral_norm import SpectralNorm

from nbtrain.errors import ModelError, UsageError
from nbtrain.parallel.deferred import changed_since, is_deferred
from nbtrain.parallel.tensor.peers import TensorGrouped
from nbtrain.parallel.transfer import gather_in_call
from nbtrain.plan import Plan

_CURE = "`with nt.meta_init(): model = ...`"
Signature = list[tuple[str, tuple[int, ...], str, bool]]


def check_model(model: nn.Module, plan: Plan, *, has_values: bool = True) -> None:
    """Raises `ModelError` with all findings, the same on every rank that has the same model.

    Args:
        model: Before it is laid out.
        plan: Resolved.
        has_values: False where parameters are on the meta device, and their numbers come from elsewhere.
    """
    findings = list(_findings(model, plan, has_values))
    if findings:
        raise ModelError("\n".join(findings))


def check_apart(model: nn.Module) -> None:
    """Raises `ModelError` where tensors share memory, which they would not in another layout."""
    if findings := [_overlap(*first, *second) for first, second in _overlaps(model)]:
        raise ModelError("\n".join(findings))


def check_same_options(group: dist.ProcessGroup, **options: Any) -> None:
    """Raises `UsageError` on every rank when ranks were given different options, or are in different calls. Collective.

    They would wait for each other in collectives of different kinds.
    """
    theirs = gather_in_call({name: repr(value) for name, value in options.items()}, group)
    for rank, other in enumerate(theirs):
        for name, value in other.items():
            if value != theirs[0][name]:
                raise UsageError(
                    f"{name} differs between ranks: {theirs[0][name]} on rank 0 and {value} on rank {rank}; give all "
                    "ranks the same"
                )


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


def _findings(model: nn.Module, plan: Plan, has_values: bool = True) -> Iterator[str]:
    if any(isinstance(module, TensorGrouped) for module in model.modules()):
        yield f"{type(model).__name__} is a copy of a model that was cut over tensor-parallel ranks; build it again"
        return
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
    done = [name for name, parameter in parameters if isinstance(parameter, DTensor)]
    if done:
        yield f"{_listed(done)} sharded already; give the model as it was before"
        return
    if has_values:
        yield from _meta_findings([*parameters, *model.named_buffers()])
    expanded = [name for name, parameter in parameters if _is_expanded(parameter)]
    if expanded:
        yield f"{_listed(expanded)} expanded, so that elements share memory and cannot be trained; type .clone() on it"
    shards = plan.shards_parameters and plan.dp_shard > 1
    for first, second in _overlaps(model):
        if shards or first[1].is_meta:
            yield _overlap(*first, *second)
    if shards:
        yield from _shard_findings(model, parameters)
        yield from _low_precision_findings(model, parameters, plan)


def _meta_findings(tensors: list[tuple[str, torch.Tensor]]) -> Iterator[str]:
    unknown = [name for name, tensor in tensors if tensor.is_meta and not is_deferred(tensor)]
    if unknown:
        yield f"{_listed(unknown)} on the meta device, and nothing is known of the values; build the model by {_CURE}"
    changed = [name for name, tensor in tensors if is_deferred(tensor) and changed_since(tensor)]
    if changed:
        yield f"{_listed(changed)} changed after nt.meta_init() had ended, which is lost; do that inside: {_CURE}"


def _shard_findings(model: nn.Module, parameters: list[tuple[str, nn.Parameter]]) -> Iterator[str]:
    scalars = [name for name, parameter in parameters if parameter.ndim == 0]
    if scalars:
        yield f"{_listed(scalars)} of shape (), which cannot be sharded; give shape (1,) or type zero=0"
    empty = [name for name, parameter in parameters if parameter.requires_grad and not parameter.numel()]
    if empty:
        yield f"{_listed(empty)} without elements, which cannot be sharded; type .requires_grad_(False) on it"
    sparse = [name for name, module in model.named_modules() if _is_sparse(module)]
    if sparse:
        yield f"{_listed(sparse)} of sparse gradients, which cannot be sharded; build with sparse=False or type zero=0"
    dtypes = {parameter.dtype for _, parameter in parameters if parameter.requires_grad}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        real = not any(dtype.is_complex for dtype in dtypes)
        cure = "model.float()" if real else "zero=0, or keep complex parameters as real ones (torch.view_as_real)"
        yield f"parameters have several dtypes ({names}), which cannot share a shard; type {cure}"


def _low_precision_findings(model: nn.Module, parameters: list[tuple[str, nn.Parameter]], plan: Plan) -> Iterator[str]:
    """Where FSDP casts the parameters before they are gathered."""
    if plan.precision == "fp32":
        return
    cure = "type zero=0 or precision=fp32"
    unable = [name for name, parameter in parameters if parameter.is_complex()]
    if unable:
        yield f"{_listed(unable)} complex, which {plan.precision} shards cannot hold; {cure}"
    exact = [name for name, module in model.named_modules() if _needs_fp32(module)]
    if exact:
        yield f"{_listed(exact)} orthogonal or of spectral norm 1, which {plan.precision} shards cannot be made; {cure}"


def _needs_fp32(module: nn.Module) -> bool:
    """Whether it computes weights from others in a way that fails, or is not finite, in low precision."""
    children = module.children() if isinstance(module, parametrize.ParametrizationList) else ()
    ways = (*children, *module._forward_pre_hooks.values())
    return any(
        isinstance(way, parametrizations._Orthogonal | parametrizations._SpectralNorm | SpectralNorm) for way in ways
    )


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _overlaps(model: nn.Module) -> Iterator[tuple[tuple[str, torch.Tensor], tuple[str, torch.Tensor]]]:
    """Pairs of a parameter and a tensor that share memory without being one object."""
    spans: dict[int, list[tuple[int, int, str, torch.Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout == torch.strided and tensor.numel():
            spans.setdefault(tensor.untyped_storage()._cdata, []).append((*_span(tensor), name, tensor))
    for together in spans.values():
        ordered = sorted(together, key=lambda span: span[:2])
        for (_, end, name, tensor), (start, _, other, twin) in itertools.pairwise(ordered):
            trained = isinstance(tensor, nn.Parameter) or isinstance(twin, nn.Parameter)
            if trained and start < end and _share_elements(tensor, twin):
                yield (name, tensor), (other, twin)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte in its storage, and the one behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset()
    return int(start) * tensor.element_size(), int(start + last + 1) * tensor.element_size()


def _share_elements(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Of two whose spans overlap; columns of one matrix share none."""
    if tensor.dtype != other.dtype:
        return True
    taken = torch.zeros(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=torch.bool)
    taken.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _overlap(name: str, tensor: torch.Tensor, other: str, twin: torch.Tensor) -> str:
    shared = f"'{name}' and '{other}' share memory without being one tensor, which they would not when laid out"
    if isinstance(tensor, nn.Parameter) and isinstance(twin, nn.Parameter):
        return f"{shared}; tie them (one nn.Parameter under both names), or type .clone() on one"
    return f"{shared}; type .clone() on one, or compute it in forward"


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
