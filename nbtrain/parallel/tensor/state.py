"""Whole tensors from parts, for state dicts and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.parallel.tensor.cuts import Cut, TensorPlan
from nbtrain.parallel.tensor.parts import join_parts


def cuts_by_name(model: nn.Module, plan: TensorPlan) -> dict[str, Cut]:
    """The cut of each parameter that is cut, by full name; tied parameters under each of their names.

    Works before and after `lay_out`. Persistent buffers are whole.
    """
    cuts = {
        f"{name}.{own}" if name else own: cut for name, layer in plan.layers.items() for own, cut in layer.cuts.items()
    }
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: cut for name, cut in cuts.items() if name in names}


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
