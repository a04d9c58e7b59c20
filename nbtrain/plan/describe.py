"""A plan in words: what is sharded, what is replicated, what moves."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from nbtrain.plan.footprint import bytes_moved, format_bytes, gathered_bytes, model_states
from nbtrain.plan.pipeline import bubble, num_microbatches, virtual_stages

if TYPE_CHECKING:
    from nbtrain.plan.plan import Plan


_TP_TRAFFIC = {False: "4 all-reduces", True: "4 all-gathers and 4 reduce-scatters"}


def describe(plan: Plan, num_parameters: int | None, root_parameters: int = 0) -> str:
    """A few lines of text; bytes when the plan is resolved and ``num_parameters`` is known."""
    lines = [_title(plan), *_states(plan), _traffic(plan)]
    lines += [*_precision(plan), *_recompute(plan), *_offload(plan)]
    lines += [*_model_parallel(plan), *_idle(plan)]
    if num_parameters is not None and _is_resolved(plan):
        lines += _amounts(plan, num_parameters, root_parameters)
    elif num_parameters is not None:
        lines.append("  bytes            depend on the number of ranks: plan.describe(world_size=4, num_parameters=P)")
    return "\n".join(lines)


def _is_resolved(plan: Plan) -> bool:
    return -1 not in plan.degrees.values()


def _degree(degree: int) -> str:
    return "all" if degree == -1 else str(degree)


def _title(plan: Plan) -> str:
    mesh = " x ".join(f"{axis}={_degree(degree)}" for axis, degree in plan.degrees.items() if degree != 1)
    ranks = f"{plan.world_size} rank{'s' * (plan.world_size != 1)}" if _is_resolved(plan) else "all ranks"
    return f"{plan!r} on {ranks}" + (f": {mesh}" if mesh else "")


def _states(plan: Plan) -> list[str]:
    held = {3: "parameters", 2: "gradients", 1: "optimizer state"}
    return [f"  {name:<16} {_placement(plan, stage)}" for stage, name in held.items()]


def _placement(plan: Plan, stage: int) -> str:
    """Where the states that ZeRO shards from ``stage`` on live."""
    # ZeRO-2 runs as FSDP that does not reshard after forward: between steps its parameters are sharded
    shards_from = 2 if stage == 3 else stage
    if plan.zero < shards_from or plan.dp_shard == 1:
        replicas = plan.dp_shard != 1 or plan.dp_replicate != 1
        return f"{'replicated' * replicas or 'not divided further'}: {_own_part(plan)} on each rank"
    sharded = f"sharded over {_degree(plan.dp_shard)} ranks"
    if plan.dp_replicate != 1:
        sharded += f", {_degree(plan.dp_replicate)} replicas"
    if stage < 3:
        return sharded
    moment = "for each block's forward and backward" if plan.zero == 3 else "from forward to backward"
    if plan.pp > 1:  # gathered for each microbatch it would move m times as much
        moment = "from the first microbatch's forward to the last one's backward"
    return f"{sharded}; whole {moment}"


def _own_part(plan: Plan) -> str:
    """What of the model is on a rank where data parallelism cuts nothing."""
    layers = "its stages' layers" if plan.pp > 1 else "each layer"
    if plan.tp > 1:
        return f"its part of {layers}"
    return layers if plan.pp > 1 else "a whole copy"


def _traffic(plan: Plan) -> str:
    name = "  moved each step  "
    if plan.dp_shard == 1 and plan.dp_replicate == 1:
        return f"{name}nothing between data-parallel ranks"
    if plan.zero == 0 or plan.dp_shard == 1:
        return f"{name}an all-reduce of the gradients (2P elements)"
    if plan.zero == 1:
        scatter = f"{name}a reduce-scatter of the gradients (P elements)"
        return f"{scatter}{_across(plan)}, an all-gather of the updated parameters (P)"
    twice = plan.zero == 3 and plan.pp == 1
    gathers = "two all-gathers of the parameters (2P)" if twice else "an all-gather of the parameters (P)"
    moved = f"{name}{gathers}, a reduce-scatter of the gradients (P)"
    return moved + _across(plan)


def _across(plan: Plan) -> str:
    return ", an all-reduce of its shards across replicas" if plan.dp_replicate != 1 else ""


def _precision(plan: Plan) -> list[str]:
    if plan.precision == "fp32":
        return []
    scaled = " under a loss scale" if plan.precision == "fp16" else ""
    return [f"  precision        {plan.precision} compute{scaled}; weights, reductions, optimizer state fp32"]


def _recompute(plan: Plan) -> list[str]:
    if plan.recompute == "none":
        return []
    which = "each block" if plan.recompute in ("full", "selective", 1) else f"one block in {plan.recompute}"
    kept = "its inputs, matrix products and attention" if plan.recompute == "selective" else "its inputs only"
    return [f"  recompute        {which} keeps {kept}, and computes the rest again in backward"]


def _offload(plan: Plan) -> list[str]:
    meanings = {
        "params": "parameters, gradients and optimizer state, for good",
        "optimizer": "optimizer state between steps",
        "activations": "what blocks keep from forward to backward",
    }
    parts = [meanings[part] for part in plan.offload or ()]
    return [f"  offload          to host memory: {'; '.join(parts)}"] if parts else []


_OF_ONE_AXIS = {
    "tp": ("sequence_parallel", "loss_parallel", "tp_plan"),
    "pp": ("schedule", "num_microbatches", "num_virtual_stages", "split"),
}


def _idle(plan: Plan) -> list[str]:
    """What was given for an axis that the plan does not have."""
    idle = []
    for axis, fields in _OF_ONE_AXIS.items():
        defaults = {field.name: field.default for field in dataclasses.fields(plan)}
        given = [f"{name}={getattr(plan, name)!r}" for name in fields if getattr(plan, name) != defaults[name]]
        if given and getattr(plan, axis) == 1:
            idle.append(f"  without effect   {', '.join(given)}: {axis} is 1")
    return idle


def _model_parallel(plan: Plan) -> list[str]:
    lines = []
    if plan.tp > 1:
        sequence = ", activations sharded by sequence between them" if plan.sequence_parallel else ""
        lines.append(f"  tensor parallel  layers split over {plan.tp} ranks{sequence}")
        lines.append(
            f"  activations      {_TP_TRAFFIC[plan.sequence_parallel]} a layer and microbatch, of its whole output"
        )
    if plan.pp > 1:
        lines += _pipeline(plan)
    return lines


def _pipeline(plan: Plan) -> list[str]:
    stages = virtual_stages(plan.schedule, plan.num_virtual_stages)
    count = num_microbatches(plan)
    each = f"{stages} stages each" if stages > 1 else "a stage each"
    return [
        f"  pipeline         {plan.pp} ranks with {each}, schedule {plan.schedule}, {count} microbatches a step",
        f"  bubble           {bubble(plan):.3f} of the time that a rank computes, where stages take equally long",
        "  between stages   activations forward, their gradients back, by each microbatch",
    ]


def _amounts(plan: Plan, num_parameters: int, root_parameters: int) -> list[str]:
    states = model_states(plan, num_parameters)
    gathered = gathered_bytes(plan, num_parameters)
    parts = [
        f"{format_bytes(states.parameters_bytes)} parameters",
        f"{format_bytes(states.gradients_bytes)} gradients",
        f"{format_bytes(states.optimizer_bytes)} Adam state",
    ]
    during = f" (+ {format_bytes(gathered)} gathered in a step)" if gathered else ""
    return [
        f"  a rank holds     {' + '.join(parts)} = {format_bytes(states.total_bytes)}{during}",
        f"  a rank sends     {_sent(plan, bytes_moved(plan, num_parameters, root_parameters))}",
    ]


def _sent(plan: Plan, moved: dict[str, float]) -> str:
    """``3.0 MiB a step: 2.0 MiB in all-gather, 1.0 MiB in reduce-scatter``."""
    besides = "activations" if plan.tp > 1 or plan.pp > 1 else ""
    if not moved:
        return besides or "nothing"
    parts = [f"{format_bytes(num_bytes)} in {name}" for name, num_bytes in moved.items()]
    total = f"{format_bytes(sum(moved.values()))} a step: {', '.join(parts)}"
    return f"{total}; and {besides}" if besides else total
