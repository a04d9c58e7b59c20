"""The stages of a model in words."""

from __future__ import annotations

from torch import nn

from nbtrain.parallel.pipeline.partition import Partition
from nbtrain.planner.schedule import Schedule


def described(partition: Partition, schedule: Schedule, model: nn.Module, held: list[set[str]]) -> str:
    """A line a stage, and what ranks share.

    Args:
        partition: Of ``model``, which is whole.
        schedule: That runs it.
        model: Its parameters' sizes.
        held: For each pipeline rank the names that it holds.
    """
    lines = [
        f"pipeline: {partition.num_stages} stages on {schedule.num_ranks} ranks, schedule {schedule.name}, "
        f"{schedule.num_microbatches} microbatches a step"
    ]
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters(remove_duplicate=False)}
    order = list(sizes)
    for stage in range(partition.num_stages):
        parts = partition.units[stage] | partition.parameters[stage]
        own = [name for name in order if any(name == part or name.startswith(f"{part}.") for part in parts)]
        shown = _folded([part for part in _in_order(parts, order)])
        lines.append(
            f"  stage {stage}, pp rank {partition.rank_of[stage]}: {shown} "
            f"({sum(sizes[name] for name in own):,} parameters, {partition.costs[stage]:.0%} of the operations)"
        )
    if shared := _shared(model, held):
        lines.append(f"  held by several ranks, whose gradients are summed: {', '.join(map(repr, shared))}")
    return "\n".join(lines)


def _shared(model: nn.Module, held: list[set[str]]) -> list[str]:
    """Names of what several ranks hold; of tied ones, which may go by other names there, the first."""
    tied: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    return [names[0] for names in tied.values() if sum(not own.isdisjoint(names) for own in held) > 1]


def _in_order(parts: frozenset[str], order: list[str]) -> list[str]:
    def place(part: str) -> int:
        return next((index for index, name in enumerate(order) if name == part or name.startswith(f"{part}.")), -1)

    return sorted(parts, key=lambda part: (place(part), part))


def _folded(parts: list[str]) -> str:
    """``blocks.0, blocks.1, blocks.2`` as ``blocks.0-2``."""
    runs: list[list[str]] = []
    for part in parts:
        prefix, _, number = part.rpartition(".")
        if runs and number.isdigit():
            before, _, last = runs[-1][-1].rpartition(".")
            if before == prefix and last.isdigit() and int(number) == int(last) + 1:
                runs[-1].append(part)
                continue
        runs.append([part])
    texts = [run[0] if len(run) == 1 else f"{run[0]}-{run[-1].rpartition('.')[2]}" for run in runs]
    return ", ".join(texts) if len(texts) <= 8 else f"{', '.join(texts[:7])} and {len(texts) - 7} more"
