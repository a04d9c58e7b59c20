"""Whole tensors from parts, for state dicts and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.parallel.tensor.attention import attention_cuts
from nbtrain.parallel.tensor.cuts import Cut, TensorPlan
from nbtrain.parallel.tensor.parts import join_parts


def cuts_by_name(model: nn.Module, plan: TensorPlan) -> dict[str, Cut]:
    """The cut of each parameter that is cut, by full name; tied parameters under each of their names.

    Works before and after `lay_out`. Persistent buffers are whole.
    """
    cuts = attribute_cuts(model, plan)
    named = list(model.named_parameters(remove_duplicate=False))
    cut = {id(parameter): cuts[name] for name, parameter in named if name in cuts}
    return {name: cut[id(parameter)] for name, parameter in named if id(parameter) in cut}


def attribute_cuts(model: nn.Module, plan: TensorPlan) -> dict[str, Cut]:
    """The cut of every name that a layer of the plan cuts. Attention that names none is cut by its heads."""
    cuts: dict[str, Cut] = {}
    for name, layer in plan.layers.items():
        module, own = model.get_submodule(name), layer.cuts
        if not own and isinstance(module, nn.MultiheadAttention) and layer.style == "attention":
            own = attention_cuts(module)
        cuts |= {full_name(name, attribute): cut for attribute, cut in own.items()}
    return cuts


def full_name(module: str, own: str) -> str:
    """Of a parameter, by its own name in a module."""
    return f"{module}.{own}" if module else own


def gather_whole(
    parts: Mapping[str, torch.Tensor], cuts: Mapping[str, Cut], group: dist.ProcessGroup
) -> dict[str, torch.Tensor]:
    """Whole tensors by name, in the unsharded element order. Collective; one tensor is gathered at a time.

    Args:
        parts: This rank's, with the same names in the same order on every peer.
        cuts: By name; what isn't named is whole and comes back itself.
        group: Of the tensor-parallel ranks.
    """
    return dict(iterate_whole(parts, cuts, group))


def iterate_whole(
    parts: Mapping[str, torch.Tensor], cuts: Mapping[str, Cut], group: dist.ProcessGroup
) -> Iterator[tuple[str, torch.Tensor]]:
    """`gather_whole`, where each tensor can be moved elsewhere before the next is gathered."""
    for name, part in parts.items():
        yield name, whole_of(part, cuts[name], group) if name in cuts else part


def whole_of(part: torch.Tensor, cut: Cut, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole tensor of which each rank of ``group`` gives its part. Collective; detached."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.detach().contiguous(), group=group)
    return join_parts(parts, cut)
