"""Which layers of a model are cut, and how: found, proved, told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.errors import ModelError
from nbtrain.parallel.blocks import repeated_blocks
from nbtrain.parallel.cell import say, unheard
from nbtrain.parallel.tensor.cuts import Region, TensorPlan
from nbtrain.parallel.tensor.describe import describe
from nbtrain.parallel.tensor.joints import Analysis
from nbtrain.parallel.tensor.probe import Probe, as_call, probe_inputs
from nbtrain.parallel.tensor.recognise import findings, recognise
from nbtrain.parallel.tensor.stated import from_patterns
from nbtrain.parallel.tensor.trials import attempts, refuted, without
from nbtrain.parallel.tensor.twin import twin_of
from nbtrain.plan import Plan


def decide(
    model: nn.Module, plan: Plan, peers: dist.ProcessGroup, device: torch.device, probe: Any = None
) -> TensorPlan:
    """The tensor-parallel plan of ``model``. Collective over peers; it is printed.

    Args:
        model: Whole, with the same weights on every peer, or on the meta device.
        plan: Resolved, ``tp`` above 1.
        peers: The tensor-parallel ranks.
        device: Where the model is to live.
        probe: Inputs of the model's forward, or None.

    Raises:
        ModelError: Sizes that tp does not divide, patterns that fit nothing, layers that would compute something else,
            or a model of which nothing can be cut; all findings in one message.
    """
    if hooked := _hooked(model):
        raise ModelError(
            f"{', '.join(hooked[:5])} has a hook on gradients, which would see a rank's part of them; remove it, or "
            "type tp=1"
        )
    twin = twin_of(model, device)
    patterns = plan.tp_plan if isinstance(plan.tp_plan, Mapping) else None
    call = as_call(probe, device) if probe is not None else probe_inputs(twin, device)
    with unheard():
        chosen = _recognised(twin, plan, call) if patterns is None else from_patterns(twin, plan.tp, patterns, call)
        if plan.sequence_parallel:
            chosen = replace(chosen, trunk=tuple(_trunk(model)))
        chosen = replace(chosen, regions=_watched(chosen))
        wrong = {} if call is None else refuted(attempts(model, twin, chosen, call), peers)
    if wrong and (patterns is not None or chosen.trunk):
        raise ModelError(_told(wrong, "type sequence_parallel=False" if chosen.trunk else "leave it out of tp_plan"))
    chosen = without(chosen, wrong)
    if not chosen.layers:
        raise ModelError(_nothing(model, plan, chosen, call))
    chosen = replace(chosen, told=describe(chosen, model))
    say(chosen.told)
    return chosen


def _hooked(model: nn.Module) -> list[str]:
    """Modules and parameters whose gradients someone changes or looks at."""
    modules = [name for name, part in model.named_modules() if part._backward_hooks or part._backward_pre_hooks]
    parameters = [name for name, parameter in model.named_parameters() if parameter._backward_hooks]
    return [f"'{name}'" for name in modules + parameters]


def _watched(plan: TensorPlan) -> dict[str, Region]:
    """Regions whose code is watched on every batch: it may do something else than on the probe, in training for
    instance. Blocks between whose layers the sequence is cut know no whole sizes."""
    return {
        name: region if name in plan.trunk else replace(region, written=True) for name, region in plan.regions.items()
    }


def _told(wrong: Mapping[str, str], cure: str) -> str:
    """Modules that are wrong in one way are told once."""
    alike: dict[str, list[str]] = {}
    for name, why in wrong.items():
        alike.setdefault(why, []).append(name)
    lines = []
    for why, (first, *more) in alike.items():
        who = f"{_quoted(first)}{f' and {len(more)} like it' if more else ''}"
        lines.append(f"{who} would not compute what one device does: {why}{'' if cure in why else f'; {cure}'}")
    return "\n".join(lines)


def _quoted(name: str) -> str:
    return f"'{name}'" if name else "the model"


def _folded(problems: list[str]) -> list[str]:
    """One for each kind: a stack of blocks has each of them many times."""
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(re.sub(r"(?<=\.)\d+(?=[.'])", "*", problem), []).append(problem)
    return [f"{first} (and {len(more)} like it)" if more else first for first, *more in kinds.values()]


def _recognised(model: nn.Module, plan: Plan, call: Probe | None) -> TensorPlan:
    if call is None:
        raise ModelError(
            f"no inputs could be made up that {type(model).__name__}'s forward takes, and tp={plan.tp} is found in a "
            "forward on a tiny batch; give one: nt.Trainer(..., probe=inputs) or nt.parallelize(..., probe=inputs)"
        )
    analysis = Analysis(model, call)
    if problems := findings(model, plan.tp, call, analysis=analysis):
        raise ModelError("\n".join(_folded(problems)))
    return recognise(model, plan.tp, call, analysis=analysis)


def _trunk(model: nn.Module) -> list[str]:
    """Names of the blocks between whose layers activations are cut along the sequence."""
    blocks = list(repeated_blocks(model))
    stacks = {name.rpartition(".")[0] for name in blocks}
    if len(stacks) != 1:
        told = f"has {len(stacks)}: {', '.join(sorted(stacks))}" if stacks else "has none"
        raise ModelError(
            f"sequence_parallel=True cuts activations between the blocks of one stack, and {type(model).__name__} "
            f"{told}; type sequence_parallel=False"
        )
    return blocks


def _nothing(model: nn.Module, plan: Plan, chosen: TensorPlan, call: Probe | None) -> str:
    reasons = "".join(f"\n  '{name}': {why}" for name, why in list(chosen.whole.items())[:8])
    return (
        f"nothing in {type(model).__name__} can be cut over tp={plan.tp} ranks, which would all compute the same; "
        f"type tp=1, or say what to cut: tp_plan={{'name.of.a.layer': 'colwise', ...}}{reasons}"
    )
