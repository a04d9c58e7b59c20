"""How many bytes a rank holds and how many elements it moves: the formulas of ZeRO and FSDP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbtrain.plan.plan import Plan

FP32_BYTES = 4
ADAM_BYTES = 8
"""Two fp32 moments a parameter."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of model states on one rank between two steps."""

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


def model_states(plan: Plan, num_parameters: int) -> Footprint:
    """Model states with fp32 weights, gradients and Adam, in the layout that nbtrain runs.

    ZeRO (arXiv 1910.02054, section 5) with 4 + 4 + 8 bytes a parameter. Weights and reduced gradients stay
    fp32 under bf16 too. ``zero=2`` is FSDP that keeps gathered parameters from forward to backward: between
    steps its parameters are sharded, unlike the paper's.

    Args:
        plan: Resolved.
        num_parameters: Of the unsharded model.
    """
    share = num_parameters / (plan.tp * plan.pp)
    shards = plan.dp_shard
    return Footprint(
        parameters_bytes=FP32_BYTES * share / (shards if plan.zero >= 2 else 1),
        gradients_bytes=FP32_BYTES * share / (shards if plan.zero >= 2 else 1),
        optimizer_bytes=ADAM_BYTES * share / (shards if plan.zero >= 1 else 1),
    )


def gathered_bytes(plan: Plan, num_parameters: int) -> float:
    """Bytes of gathered parameters at the end of forward: all of them with ``zero=2``, and in a pipeline."""
    if plan.zero < 2 or (plan.zero == 3 and plan.pp == 1) or plan.dp_shard == 1:
        return 0.0
    element_bytes = FP32_BYTES if plan.precision == "fp32" else FP32_BYTES // 2
    return element_bytes * num_parameters / (plan.tp * plan.pp)


def elements_moved(plan: Plan, num_parameters: int, root_parameters: int = 0) -> float:
    """Elements that the data-parallel collectives of one step send from a rank, ring algorithms assumed.

    An all-gather or a reduce-scatter of P elements over N ranks moves P (N-1)/N, an all-reduce twice that
    (ZeRO, section 7: 2P for stages 0 to 2, 3P for stage 3).

    Args:
        plan: Resolved.
        num_parameters: Of the unsharded model.
        root_parameters: Those of FSDP's root unit, which ``zero=3`` gathers once and not twice: 0 gives an upper bound.
    """
    return sum(_moved(plan, num_parameters, root_parameters).values())


def bytes_moved(plan: Plan, num_parameters: int, root_parameters: int = 0) -> dict[str, float]:
    """The bytes of `elements_moved` by collective: ``all-gather``, ``reduce-scatter``, ``all-reduce``; without zeros.

    Weights and gradients travel as fp32, but FSDP gathers bf16 weights under ``precision="bf16"``. It reduces with
    every chunk of ``accumulate=k``, so that its step moves k times as much; the others, and pipelines, reduce once.
    """
    gathers_half = plan.zero >= 2 and plan.precision != "fp32"
    widths = {"all-gather": FP32_BYTES // 2 if gathers_half else FP32_BYTES}
    moved = _moved(plan, num_parameters, root_parameters)
    return {name: elements * widths.get(name, FP32_BYTES) for name, elements in moved.items() if elements}


def _moved(plan: Plan, num_parameters: int, root_parameters: int) -> dict[str, float]:
    share, root = num_parameters / (plan.tp * plan.pp), root_parameters / (plan.tp * plan.pp)
    if plan.zero == 0 or plan.dp_shard == 1:
        return {"all-reduce": 2 * share * _ring(plan.dp)}
    gathered = 2 * share - root if plan.zero == 3 and plan.pp == 1 else share
    return {
        "all-gather": gathered * _ring(plan.dp_shard),
        "reduce-scatter": share * _ring(plan.dp_shard),
        "all-reduce": 2 * share / plan.dp_shard * _ring(plan.dp_replicate),
    }


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def format_bytes(num_bytes: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
