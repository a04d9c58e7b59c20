"""Splitting a model: found in a forward on a probe, then each rank keeps its part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from nbtrain.errors import ModelError, first_line
from nbtrain.parallel.blocks import repeated_blocks
from nbtrain.parallel.cell import say
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.mixin import mix, unmix
from nbtrain.parallel.pipeline.describe import described
from nbtrain.parallel.pipeline.holding import held_names, holders, keep
from nbtrain.parallel.pipeline.partition import Partition, partition
from nbtrain.parallel.pipeline.pipeline import Pipeline, schedule_of
from nbtrain.parallel.pipeline.rehearsal import Rehearsal
from nbtrain.parallel.pipeline.root import Root
from nbtrain.parallel.pipeline.score import Score
from nbtrain.parallel.pipeline.skeleton import Skeleton
from nbtrain.parallel.pipeline.ties import Ties
from nbtrain.parallel.pipeline.twins import Twins
from nbtrain.parallel.pipeline.units import find_units, make_units, uncalled
from nbtrain.parallel.pipeline.usage import StageUsage
from nbtrain.parallel.precision import DTYPES
from nbtrain.parallel.state import structure
from nbtrain.parallel.tensor.probe import Probe, as_call, probe_inputs, probing
from nbtrain.parallel.tensor.sequence import divide_trunk, runs_of
from nbtrain.parallel.tensor.twin import twin_of
from nbtrain.parallel.usage import ShardUsage, sharded_records


@dataclass(frozen=True)
class Split:
    """How a model is divided over pipeline ranks, the same on all.

    Attributes:
        partition: Into stages.
        canonical: For each name of a parameter or buffer of the whole model the first one of the same tensor.
        holders: By canonical name, the pipeline ranks that hold it.
        told: In words.
        num_units: Of the whole model.
        begins: What the plan names.
        opened: Modules whose insides are called from outside.
    """

    partition: Partition
    canonical: dict[str, str]
    holders: dict[str, tuple[int, ...]]
    told: str
    num_units: int
    begins: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()

    def num_holders(self, name: str) -> int:
        """How many pipeline ranks hold a parameter or buffer."""
        return len(self.holders[self.canonical[name]])


def find_split(model: nn.Module, layout: Layout, probe: Any, device: torch.device) -> Split:
    """Finds the stages of ``model``, which stays as it is; they are printed. Moves nothing.

    Args:
        model: Whole, on its device or on meta.
        layout: With the plan and the blueprint.
        probe: Inputs of the model's forward, or None.
        device: Where the model is to live.

    Raises:
        PlanError, ModelError: The plan and the model do not fit.
    """
    plan, whole = layout.plan, structure(layout)
    schedule = schedule_of(plan, None)
    begins = () if plan.split == "auto" else tuple(plan.split)
    call = as_call(probe, device) if probe is not None else probe_inputs(twin_of(model, device), device)
    if call is None:
        raise ModelError(
            f"no inputs could be made up that {type(model).__name__}'s forward takes, and the stages of pp={plan.pp} "
            "are found in a forward on a tiny batch; give one: nt.Trainer(..., probe=inputs)"
        )
    opened: tuple[str, ...] = ()
    units = find_units(model, schedule.num_stages, begins)
    try:
        score = _score(model, whole, units, call, device)
    except Exception:
        if probe is not None:
            _require_runs(twin_of(model, device), call)
        raise
    while closed := uncalled(units, {call.unit for call in score.calls}):
        opened = (*opened, *closed)
        units = find_units(model, schedule.num_stages, begins, opened)
        score = _score(model, whole, units, call, device)
    # what no forward calls begins no stage
    while _num_called(score) < schedule.num_stages:
        more = find_units(model, len(units) + 1, begins, opened)
        if len(more) == len(units):
            break
        units, score = more, _score(model, whole, more, call, device)
    found = partition(model, units, score, schedule.rank_of, list(begins) or "auto")
    _require_statistics_of_one(units, found)
    if layout.tensor is not None:
        runs_of(layout.tensor.trunk, found.units)
    _require_compiled(model, layout, found)
    canonical = _canonical(whole)
    held = [held_names(model, units, found.held_by(rank)) for rank in range(plan.pp)]
    told = described(found, schedule, model, held)
    say(told)
    return Split(found, canonical, holders(canonical, held), told, len(units), begins, opened)


def _require_runs(model: nn.Module, call: Probe) -> None:
    """Raises `ModelError` where ``model`` does not run on a probe by itself."""
    try:
        with probing(model), torch.no_grad():
            model(*call[0], **call[1])
    except Exception as problem:
        raise ModelError(
            f"the probe does not run through {type(model).__name__} ({first_line(problem)}); give what its forward "
            "takes: nt.Trainer(..., probe=inputs), or a tuple or dict of several"
        ) from problem


def _score(model: nn.Module, whole: nn.Module, units: dict[str, nn.Module], call: Probe, device: torch.device) -> Score:
    make_units(units)
    try:
        with probing(model):
            rehearsal = Rehearsal(Twins(whole, device, counts=True), units, Skeleton(model, units), device)
            return rehearsal.run(model, lambda given: model.forward(*given[0], **given[1]), call)
    finally:
        unmix(model)


def _require_statistics_of_one(units: dict[str, nn.Module], found: Partition) -> None:
    """Raises `ModelError` where two ranks would each keep a part of a norm's running statistics."""
    for name, unit in units.items():
        ranks = {found.rank_of[stage] for stage, own in enumerate(found.units) if name in own}
        tracked = any(isinstance(part, _NormBase) and part.track_running_stats for part in unit.modules())
        if len(ranks) > 1 and tracked:
            raise ModelError(
                f"'{name}' is called by stages of several ranks, and its running statistics would be of each rank's "
                "calls only; name other modules in split=[...], or type pp=1"
            )


def _require_compiled(model: nn.Module, layout: Layout, found: Partition) -> None:
    """Raises `ModelError` where compiled code would have modules of several stages inside, or there would be none."""
    if layout.compile and not found.all_units & repeated_blocks(model).keys():
        raise ModelError(
            f"compile={layout.compile!r} compiles each repeated block that one stage runs, and {type(model).__name__} "
            f"has none over {found.num_stages} stages; leave compile away"
        )


def _num_called(score: Score) -> int:
    return len({call.unit for call in score.calls})


def hold(model: nn.Module, layout: Layout, split: Split, device: torch.device) -> dict[str, nn.Module]:
    """Takes from ``model`` what other ranks hold, and makes its forward that of stages. Moves nothing.

    Returns:
        The units, by name.
    """
    assert layout.mesh is not None, "stages are on ranks"
    units = find_units(model, split.num_units, split.begins, split.opened)
    if layout.tensor is not None:
        divide_trunk(model, layout.tensor.trunk, split.partition.units)
    keep(model, units, split.partition.held_by(layout.mesh.get_local_rank("pp")), device)
    make_units(units)
    mix(model, Root)
    return units


def make_pipeline(
    model: nn.Module, layout: Layout, split: Split, units: dict[str, nn.Module], device: torch.device
) -> Pipeline:
    """What takes steps, behind everything else that lays ``model`` out."""
    dtype = DTYPES.get(layout.plan.precision) if layout.shards else None
    twins = Twins(structure(layout), device, dtype)
    pipeline = Pipeline(model, layout, units, split.partition, twins, device, dtype)
    named = dict(model.named_parameters())
    shared = [
        (split.holders[split.canonical[name]], split.canonical[name], parameter)
        for name, parameter in named.items()
        if parameter.requires_grad and split.num_holders(name) > 1
    ]
    order = {name: number for number, name in enumerate(split.canonical)}
    shared.sort(key=lambda entry: order[entry[1]])
    pipeline.ties = Ties([(parameter, holding) for holding, _, parameter in shared])
    pipeline.usage = _usage(model, layout, split)
    return pipeline


def _usage(model: nn.Module, layout: Layout, split: Split) -> StageUsage:
    trained = [name for name, parameter in structure(layout).named_parameters() if parameter.requires_grad]
    places = {name: place for place, name in enumerate(trained)}
    names = {id(parameter): split.canonical[name] for name, parameter in model.named_parameters()}
    inner = layout.usage
    if layout.shards:
        parameters = [record.sharded_param for record in sharded_records(model)]
        inner = ShardUsage(model)
    else:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return StageUsage(parameters, [places[names[id(one)]] for one in parameters], len(trained), inner)


def _canonical(whole: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    named = [*whole.named_parameters(remove_duplicate=False), *whole.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}
