"""Where a model is cut into stages, and what each stage holds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from nbtrain.errors import ModelError, PlanError, nearest
from nbtrain.parallel.blocks import repeated_blocks
from nbtrain.parallel.pipeline.score import Score
from nbtrain.parallel.pipeline.units import skeleton_of


@dataclass(frozen=True)
class Partition:
    """The stages of a model.

    Attributes:
        begins: For each stage the unit that begins it, and the how many-th of its calls that is.
        units: For each stage the names of the units that it runs.
        parameters: For each stage the names of parameters outside of units that it reads.
        costs: For each stage, of all the share that it computes; sums to 1.
        rank_of: The pipeline rank that holds each stage.
    """

    begins: tuple[tuple[str, int], ...]
    units: tuple[frozenset[str], ...]
    parameters: tuple[frozenset[str], ...]
    costs: tuple[float, ...]
    rank_of: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.begins)

    @property
    def all_units(self) -> frozenset[str]:
        """Of all stages: modules that are not divided between some."""
        return frozenset().union(*self.units)

    def stages_of(self, rank: int) -> list[int]:
        """In order."""
        return [stage for stage, holder in enumerate(self.rank_of) if holder == rank]

    def held_by(self, rank: int) -> frozenset[str]:
        """Units and parameters outside of units."""
        stages = self.stages_of(rank)
        return frozenset().union(*(self.units[stage] | self.parameters[stage] for stage in stages))


def partition(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    score: Score,
    rank_of: Sequence[int],
    split: str | Sequence[str] = "auto",
) -> Partition:
    """Cuts ``score`` into as many stages as ``rank_of`` has.

    ``"auto"`` makes the most expensive stage as cheap as can be, by floating-point operations and, among equals, by
    bytes that cross. Stages begin at blocks, or behind the last one of a stack; where there are too few, at any unit.

    Args:
        model: Whole.
        units: Of the model.
        score: Of a forward on a probe.
        rank_of: The pipeline rank of each stage.
        split: ``"auto"``, or the names of the modules that begin the second stage and those behind it.

    Raises:
        PlanError: ``split`` names what is called nowhere, or not in this order, or too many or few.
        ModelError: There are fewer units than stages.
    """
    num_stages = len(rank_of)
    starts = _balanced(model, score, num_stages) if isinstance(split, str) else _stated(units, score, num_stages, split)
    ends = (*starts[1:], len(score.calls))
    names = [frozenset(call.unit for call in score.calls[start:end]) for start, end in zip(starts, ends, strict=True)]
    outside = _outside(score, starts, ends)
    _home_the_rest(model, units, names, outside)
    total = sum(score.costs) or 1.0
    costs = tuple(sum(score.costs[start:end]) / total for start, end in zip(starts, ends, strict=True))
    begins = tuple(map(score.begin, starts))
    return Partition(begins, tuple(names), tuple(outside), costs, tuple(rank_of))


def _outside(score: Score, starts: Sequence[int], ends: Sequence[int]) -> list[frozenset[str]]:
    """For each stage the parameters outside of units that its own computation reads."""
    found = [
        frozenset().union(*(call.parameters for call in score.calls[start:end]))
        for start, end in zip(starts, ends, strict=True)
    ]
    found[-1] |= score.parameters
    return found


def _home_the_rest(
    model: nn.Module, units: Mapping[str, nn.Module], names: list[frozenset[str]], outside: list[frozenset[str]]
) -> None:
    """What the probe did not call or read belongs to the stage of what is defined before it: somebody must hold it."""
    homed = {name: stage for stage, held in reversed(list(enumerate(names))) for name in held}
    stage = 0
    for name, unit in units.items():
        own = {f"{name}.{key}" for key, _ in unit.named_parameters()}
        reading = [index for index, read in enumerate(outside) if own & read]
        stage = homed.get(name, reading[0] if reading else stage)
        names[stage] |= {name}
    read = frozenset().union(*outside)
    for prefix, module in skeleton_of(model, units).items():
        own = {f"{prefix}.{key}" if prefix else key for key, held in module._parameters.items() if held is not None}
        outside[-1] |= own - read


def _balanced(model: nn.Module, score: Score, num_stages: int) -> tuple[int, ...]:
    allowed = _cuts(model, score, num_stages)
    if len(allowed) < num_stages - 1:
        raise ModelError(
            f"{len(allowed) + 1} of the modules that {type(model).__name__} calls could begin a stage, and the plan "
            f"has {num_stages} stages; take fewer (pp, num_virtual_stages), or divide its layers into more modules"
        )
    # embeddings count as nothing, yet cost something: a stage of them alone is no stage
    small = max(score.costs, default=0.0) * 1e-3 + 1e-9
    before = [0.0, *itertools.accumulate(cost + small for cost in score.costs)]
    places = [0, *allowed, len(score.calls)]
    weights = {position: _bytes_into(score, position) for position in allowed}

    @functools.cache
    def best(index: int, stages: int) -> tuple[float, float, tuple[int, ...]]:
        """The largest cost, the bytes, and the starts, of ``stages`` stages from place ``index`` on."""
        here = places[index]
        if stages == 1:
            return before[-1] - before[here], 0.0, (here,)
        found: list[tuple[float, float, tuple[int, ...]]] = []
        for following in range(index + 1, len(places) - stages + 1):
            cost = before[places[following]] - before[here]
            if found and cost > min(found)[0]:
                break  # only gets larger
            rest = best(following, stages - 1)
            found.append((max(cost, rest[0]), rest[1] + weights[places[following]], (here, *rest[2])))
        return min(found)

    return best(0, num_stages)[2]


def _cuts(model: nn.Module, score: Score, num_stages: int) -> list[int]:
    """Calls that may begin a stage."""
    blocks = set(repeated_blocks(model))
    is_block = [call.unit in blocks for call in score.calls]
    chosen = [
        position
        for position in range(1, len(score.calls))
        if is_block[position] or (is_block[position - 1] and _cost_to_next(score, is_block, position) > 0)
    ]
    return chosen if len(chosen) >= num_stages - 1 else list(range(1, len(score.calls)))


def _cost_to_next(score: Score, is_block: Sequence[bool], position: int) -> float:
    """Of what comes before the next block: a norm counts as nothing, the head behind it does not."""
    rest = zip(score.calls[position:], is_block[position:], strict=True)
    return sum(call.cost for call, _ in itertools.takewhile(lambda pair: not pair[1], rest))


def _bytes_into(score: Score, position: int) -> float:
    metas = [score.meta(value) for value in score.crossing(position)]
    return float(sum(_num_elements(meta.shape) * meta.dtype.itemsize for meta in metas))


def _num_elements(shape: tuple[int, ...]) -> int:
    return functools.reduce(lambda product, size: product * size, shape, 1)


def _stated(units: Mapping[str, nn.Module], score: Score, num_stages: int, split: Sequence[str]) -> tuple[int, ...]:
    if len(split) != num_stages - 1:
        raise PlanError(
            f"split names {len(split)} modules, and the plan has {num_stages} stages, of which the first begins by "
            f"itself; name the {num_stages - 1} that begin the others"
        )
    called = list(dict.fromkeys(call.unit for call in score.calls))
    begins = [_first_inside(name, called, units) for name in split]
    starts = [0]
    try:
        for name in begins:
            starts.append(score.next(name, starts[-1] + 1))
    except LookupError as problem:
        if called.index(problem.args[0]) == 0:
            raise PlanError(
                f"split={list(split)}: '{problem.args[0]}' begins the first stage, which needs no name; name the "
                f"{num_stages - 1} modules that begin the others"
            ) from problem
        raise PlanError(
            f"split={list(split)}: '{problem.args[0]}' is not called behind the stage before; they are called in this "
            f"order: {_listed(called)}"
        ) from problem
    return tuple(starts)


def _first_inside(name: str, called: list[str], units: Mapping[str, nn.Module]) -> str:
    for unit in called:
        if unit == name or unit.startswith(f"{name}."):
            return unit
    inside = next((unit for unit in units if name.startswith(f"{unit}.")), None)
    hint = nearest(name, called)
    if inside:
        hint = f"it is inside of '{inside}', which one stage runs whole; possible are {_listed(called)}"
    raise PlanError(f"split names {name!r}, which no stage can begin with; {hint}")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:40])
    return f"{shown} and {len(names) - 40} more" if len(names) > 40 else shown
