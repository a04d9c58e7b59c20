"""What each rank holds: plain numbers, for tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from nbtrain.parallel.layout import Layout, layout_of
from nbtrain.parallel.local import local
from nbtrain.parallel.mesh import rank
from nbtrain.parallel.replicate import Replica
from nbtrain.parallel.state import whole_shape
from nbtrain.parallel.update import ShardedUpdate
from nbtrain.plan.footprint import format_bytes
from nbtrain.telemetry.memory import model_bytes

if TYPE_CHECKING:
    from nbtrain.parallel.trainer import Trainer


def holdings(model: nn.Module | Trainer, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """What this rank holds of a model: JSON-friendly, no collective.

    Args:
        model: Laid out or not, or a trainer, whose optimizer then counts.
        optimizer: Whose state counts.

    Returns:
        ``rank``; ``plan`` (text, or None before `parallelize`); ``layout`` ("one device", "replicated",
        "sharded", "cut", "sharded and cut" ...); ``num_parameters`` of the whole model; ``local_parameters`` on this
        rank; ``num_units`` that are gathered as a whole; and ``parameters_bytes``, ``gradients_bytes``,
        ``optimizer_bytes``, ``buffers_bytes``.
    """
    if not isinstance(model, nn.Module):
        return holdings(model.model, model.optimizer)
    layout = layout_of(model)
    parameters = dict(model.named_parameters())
    held = measured(model, optimizer)
    return {
        "rank": rank(),
        "plan": None if layout is None else str(layout.plan),
        "layout": "one device" if layout is None else layout.kind,
        "num_parameters": _num_whole(parameters, layout),
        "local_parameters": sum(local(parameter).numel() for parameter in parameters.values()),
        "num_units": 0 if layout is None or not layout.shards else len(layout.units) + 1,
        **{f"{name}_bytes": num_bytes for name, num_bytes in held.items()},
    }


def _num_whole(parameters: dict[str, nn.Parameter], layout: Layout | None) -> int:
    if layout is None:
        return sum(parameter.numel() for parameter in parameters.values())
    if layout.split is not None and layout.blueprint is not None and layout.blueprint.module is not None:
        return sum(parameter.numel() for parameter in layout.blueprint.module.parameters())
    return sum(math.prod(whole_shape(name, parameter, layout)) for name, parameter in parameters.items())


def measured(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, int]:
    """`model_bytes`, and the buffers in which ``zero=1`` keeps gradients."""
    held = model_bytes(model, optimizer)
    if isinstance(model, ShardedUpdate):
        held["gradients"] = model.gradient_bytes
    return held


def bucket_text(model: nn.Module) -> list[str]:
    """A line on the buckets of gradients, where there are some: DDP has them from the first step on."""
    sizes = model.bucket_bytes() if isinstance(model, Replica) else []
    if not sizes:
        return []
    return [f"gradients travel in {len(sizes)} bucket{'s' * (len(sizes) > 1)} of up to {format_bytes(max(sizes))}"]


def holdings_text(held: dict[str, Any]) -> str:
    """One line a kind of tensor."""
    kinds = ("parameters", "gradients", "optimizer", "buffers")
    rows = [f"  {kind:<12} {format_bytes(held[f'{kind}_bytes']):>10}" for kind in kinds]
    share = f"{held['local_parameters']:,} of {held['num_parameters']:,} parameters"
    return "\n".join([f"rank {held['rank']} holds {share}, {held['layout']}:", *rows])
