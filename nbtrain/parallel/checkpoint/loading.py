"""`load`: a trainer as it was saved, by any plan and on any number of ranks.

::

    all ranks     find the checkpoint, and compare what it has with what they hold: everything that does not fit is told
    each rank     reads its pieces into the memory that they have
    all ranks     agree; then optimizer, scheduler, loaders and random numbers follow
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from nbtrain.errors import CheckpointError, OptimizerError, SessionError
from nbtrain.parallel import gradients, mesh
from nbtrain.parallel.checkpoint import contents, folder, storage
from nbtrain.parallel.checkpoint.contents import class_name, model_item, parameter_names, state_item
from nbtrain.parallel.checkpoint.disk import Position, matched, spelled
from nbtrain.parallel.checkpoint.manifest import Manifest
from nbtrain.parallel.checkpoint.numbers import fits
from nbtrain.parallel.checkpoint.saving import settle
from nbtrain.parallel.checkpoint.together import Misfit, attempt, gather, host, listed, require_all
from nbtrain.parallel.phase import Phase, Stage
from nbtrain.parallel.pieces import (
    Held,
    Place,
    canonical_names,
    extra_states,
    held_parameters,
    held_state,
    optimizer_names,
    state_places,
)
from nbtrain.parallel.scaler import Scaling
from nbtrain.parallel.state import set_extra
from nbtrain.parallel.stepper import Settled
from nbtrain.parallel.update import ShardedUpdate

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from nbtrain.parallel.trainer import Trainer

_PARTLY = "was loaded in part"

Opened = tuple[Manifest, storage.Reader, "Metadata", dict[str, Any]]
"""Of a checkpoint: manifest, files, their table, and what is no tensor."""

Answer = tuple[Misfit, set[str], bool]
"""Of a rank: what does not fit, which names it knows, and whether what it holds is of one step."""

State = dict[torch.Tensor, dict[str, Any]]
"""An optimizer's, by parameter."""


@dataclass
class Fit:
    """What one rank takes of a checkpoint.

    Attributes:
        wanted: By any key, the item and where it goes.
        state: The optimizer's, of which the tensors are among them; None where it stays as it is.
        misfit: What does not fit.
        names: Of the model's tensors that this rank holds.
    """

    wanted: dict[str, tuple[str, Held]] = field(default_factory=dict)
    state: State | None = None
    misfit: Misfit = field(default_factory=Misfit)
    names: set[str] = field(default_factory=set)


def load(trainer: Trainer, path: str | os.PathLike[str], *, strict: bool = True) -> dict[str, Any]:
    """`Trainer.load`."""
    stepper = trainer._stepper
    if stepper.lost:
        raise SessionError(stepper.lost)  # after a rank's death not every rank has the trainer
    settle(trainer)
    stepper._drop()
    where, opened, fit, answers = _agreed(trainer, Path(os.path.abspath(path)))
    manifest, reader, table, facts = opened
    mixed = any(answer[2] for answer in answers)
    _require_fit(where, manifest, answers, strict or mixed)  # what a part leaves would not be of one step
    if not mixed:
        stepper.require_whole()  # gathers what an interruption has left owed
    _read(trainer, where, reader, table, fit)
    _take(trainer, manifest, facts, fit)
    if manifest.trainer and not any(misfit for misfit, *_ in answers):
        trainer._disk.trainer_id = manifest.trainer  # goes on with what that one began
    return dict(facts["extra"])


def _agreed(trainer: Trainer, path: Path) -> tuple[Path, Opened, Fit, list[Answer]]:
    """The same checkpoint on every rank, what this one takes of it, and what fits each. Collective.

    Rank 0 says which; the others look at the one that they find meanwhile: another only while somebody saves.
    """
    where, problem = attempt(lambda: folder.find(path))
    while True:
        opened, fit, found = (None, None, problem) if where is None else _looked_at(trainer, where)
        place = None if where is None else os.path.relpath(where, path)
        answers = gather((place, found, fit and (fit.misfit, fit.names, bool(trainer._stepper.mixed))))
        places = [answer[0] for answer in answers]
        if places[0] is None:
            raise CheckpointError(f"nothing was loaded: {answers[0][1]}")
        where = Path(os.path.normpath(path / places[0]))
        if len(set(places)) == 1:
            break
    require_all(f"{where} cannot be loaded", [answer[1] for answer in answers])
    assert opened is not None, "nothing failed"
    assert fit is not None, "nothing failed"
    return where, opened, fit, [answer[2] for answer in answers]


def _looked_at(trainer: Trainer, where: Path) -> tuple[Opened | None, Fit | None, str]:
    """A checkpoint and what this rank takes of it, or why not."""
    opened, problem = attempt(lambda: _opened(where))
    if opened is None:
        return None, None, problem
    fit, problem = attempt(lambda: _fit(trainer, *opened))
    return opened, fit, problem


def _opened(where: Path) -> Opened:
    if not where.is_dir():
        raise CheckpointError(f"{host()} has no {where}, which rank 0 has; give a directory that all ranks share")
    manifest = Manifest.read(where)
    if damaged := manifest.damaged(where):
        raise CheckpointError("; ".join(damaged))
    reader = storage.Reader(where)
    table = reader.read_metadata()
    return manifest, reader, table, reader.read_plain(table)


def _fit(
    trainer: Trainer, manifest: Manifest, reader: storage.Reader, table: Metadata, facts: Mapping[str, Any]
) -> Fit:
    fit = Fit()
    _fit_model(trainer, manifest, table, fit)
    if not (gaps := _optimizer_gaps(trainer, manifest)):
        _fit_state(trainer, manifest, table, facts, fit)
    fit.misfit.gaps += [*gaps, *_scheduler_gaps(trainer, manifest), *_loader_gaps(trainer, facts["loaders"])]
    return fit


def _fit_model(trainer: Trainer, manifest: Manifest, table: Metadata, fit: Fit) -> None:
    for name, held in held_parameters(trainer.model, trainer._stepper.layout).items():
        saved = name if name in manifest.tensors else manifest.aliases.get(name, name)
        fit.names |= {name, saved}
        if saved not in manifest.tensors:
            fit.misfit.lacking.append(name)
            continue
        _want(fit, table, model_item(saved), held, f"'{name}'")
    names = canonical_names(trainer.model, trainer._stepper.layout)
    fit.names |= set(names.values()) | extra_states(trainer.model).keys()
    fit.misfit.lacking += [name for name in extra_states(trainer.model) if name not in manifest.extra_states]


def _want(fit: Fit, table: Metadata, item: str, held: Held, told: str) -> None:
    entry: Any = table.state_dict_metadata.get(item)
    if entry is None:
        fit.misfit.problems.append(f"its table lacks {told}")
    elif tuple(entry.size) != held.shape:
        fit.misfit.problems.append(f"{told} is {tuple(entry.size)} and must be {held.shape}")
    elif not fits(entry.properties.dtype, held.dtype):
        fit.misfit.problems.append(f"{told} is {entry.properties.dtype} and must be {held.dtype}")
    elif storage.missing(table, item, held):
        fit.misfit.problems.append(f"its files lack a part of {told}")
    else:
        fit.wanted[f"{item} as {held.name}"] = item, held


def _optimizer_gaps(trainer: Trainer, manifest: Manifest) -> list[str]:
    saved, optimizer = manifest.optimizer, trainer.optimizer
    own = class_name(optimizer)
    if own != saved["class"]:
        return [f"its optimizer is {saved['class']}, and the trainer's {own}"]
    groups = list(_groups(trainer))
    if len(groups) != len(saved["groups"]):
        return [f"its optimizer has {len(saved['groups'])} parameter groups, and the trainer's {len(groups)}"]
    gaps, trained = [], parameter_names(trainer)
    for number, (names, before) in enumerate(zip(groups, saved["groups"], strict=True)):
        if strangers := [name for name in names if manifest.aliases.get(name, name) not in before]:
            gaps.append(f"its parameter group {number} has no {listed(strangers)}")
        here = set(names)
        if left := [name for name in before if name in trained and name not in here]:
            gaps.append(f"the trainer's parameter group {number} has no {listed(left)}")
    return gaps


def _groups(trainer: Trainer) -> Iterator[list[str]]:
    layout = trainer._stepper.layout
    names, canonical = optimizer_names(trainer.model, layout), canonical_names(trainer.model, layout)
    for group in trainer.optimizer.param_groups:
        own = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        yield [canonical.get(name, name) for name in own]


def _scheduler_gaps(trainer: Trainer, manifest: Manifest) -> list[str]:
    scheduler = trainer._stepper.scheduler
    own = None if scheduler is None else class_name(scheduler)
    if own == manifest.scheduler:
        return []
    return [f"its scheduler is {manifest.scheduler or 'none'}, and the trainer's {own or 'none'}"]


def _loader_gaps(trainer: Trainer, positions: list[Position]) -> list[str]:
    """Loaders without a position, beside positions without a loader: what was meant is another one."""
    loaders = trainer._disk.living_loaders()
    found, left = matched(loaders, positions), list(enumerate(positions))
    for position in found:
        if position is not None:
            left.remove(next(one for one in left if one[1] is position))
    gaps = []
    alone = [loader.traits for loader, position in zip(loaders, found, strict=True) if position is None]
    for now, (number, saved) in zip(alone, left, strict=False):
        keys = [key for key in now if saved.get(key, now[key]) != now[key]]
        before, own = ({key: traits[key] for key in keys} for traits in (saved, now))
        gaps.append(f"its loader {number} has {spelled(before)}, and the trainer's {spelled(own)}")
    return gaps


def _fit_state(trainer: Trainer, manifest: Manifest, table: Metadata, facts: Mapping[str, Any], fit: Fit) -> None:
    """The optimizer's state in memory of its own where it has none of that shape yet."""
    layout, optimizer = trainer._stepper.layout, trainer.optimizer
    names, canonical = optimizer_names(trainer.model, layout), canonical_names(trainer.model, layout)
    places = state_places(trainer.model, layout)
    fit.state = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (own := names.get(id(parameter))) is None:
                continue  # the empty one of a rank whose stages train nothing
            name = canonical.get(own, own)
            saved = name if name in manifest.optimizer["state"] else manifest.aliases.get(name, name)
            elsewhere = _lies_elsewhere(parameter, manifest.tensors.get(saved), layout.result)
            if saved not in manifest.optimizer["state"] or elsewhere:
                continue
            entries = fit.state[parameter] = {}
            for key, told in manifest.optimizer["state"][saved].items():
                if told is None:
                    entries[key] = facts["optimizer"]["state"][saved][key][0]
                    continue
                dtype = _dtype(key, told, manifest.tensors[saved], parameter)
                value = _room(optimizer, group, parameter, key, tuple(told["shape"]), dtype, places[own])
                entries[key] = value
                try:
                    held = held_state(f"{name}.{key}", value, parameter, places[own])
                except OptimizerError as problem:
                    fit.misfit.problems.append(f"state '{key}' of '{name}' {problem}")
                    continue
                _want(fit, table, state_item(saved, key), held, f"state '{key}' of '{name}'")


def _dtype(key: str, told: Mapping[str, Any], weights: Mapping[str, Any], parameter: torch.Tensor) -> torch.dtype:
    """That of the checkpoint; state that has its parameter's follows the parameter.

    But for what is no number for each element: a count of steps in bfloat16 ends at 256.
    """
    saved: torch.dtype = getattr(torch, told["dtype"])
    follows = told["dtype"] == weights["dtype"] and not _is_scalar(key, told["shape"], weights["shape"])
    return parameter.dtype if follows else saved


def _is_scalar(key: str, shape: Sequence[int], weights: Sequence[int]) -> bool:
    """Whether an entry of the state is one number for all elements of its parameter, which may have one itself."""
    return len(shape) == 0 and (len(weights) > 0 or key == "step")


def _lies_elsewhere(parameter: torch.Tensor, weights: Mapping[str, Any] | None, result: Any) -> bool:
    """Whether ``zero=1`` has dealt all of it to other ranks: an optimizer keeps no state of such pieces.

    A parameter that has no element at all is every rank's.
    """
    dealt = isinstance(result, ShardedUpdate) and result.shares and parameter.numel() == 0
    return dealt and (weights is None or all(weights["shape"]))


def _room(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: torch.Tensor,
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    place: Place,
) -> torch.Tensor:
    """A tensor for one entry of the state: the optimizer's own where it can stay."""
    scalar = _is_scalar(key, shape, place.shape(parameter))
    alike = not scalar and shape == place.shape(parameter)
    size = tuple(parameter.shape) if alike else shape
    own = optimizer.state.get(parameter, {}).get(key)
    if isinstance(own, torch.Tensor) and tuple(own.shape) == size and not (scalar and own.dtype != dtype):
        return own
    if scalar:
        on_device = group.get("capturable") or group.get("fused")
        return torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
    if alike:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False).detach()
    if isinstance(parameter, DTensor):
        local = torch.zeros(shape, dtype=dtype, device=parameter.to_local().device)
        return DTensor.from_local(local, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim)
    return torch.zeros(shape, dtype=dtype, device=parameter.device)


def _require_fit(where: Path, manifest: Manifest, answers: list[Answer], strict: bool) -> None:
    """Raises on all ranks alike."""
    misfit = Misfit.of_all(found for found, *_ in answers)
    known = set().union(*(names for _, names, _ in answers))
    unknown = [name for name in (*manifest.tensors, *manifest.extra_states) if name not in known]
    if unknown:
        misfit.gaps.append(f"the model has no {listed(unknown)}")
    misfit.require_none(f"{where} does not fit the trainer", strict, f"loading {where.name}")


def _read(trainer: Trainer, where: Path, reader: storage.Reader, table: Metadata, fit: Fit) -> None:
    """From here on the trainer changes: what fails leaves a mixture, which no step may use."""
    stepper = trainer._stepper
    stepper.mixed = f"{where} {_PARTLY}; load it again, or another one"
    with torch.no_grad():
        _, problem = attempt(lambda: storage.read(reader, table, fit.wanted))
    require_all(f"{where} {_PARTLY}, and no step can be taken until a load succeeds", gather(problem))
    stepper.mixed = ""


def _take(trainer: Trainer, manifest: Manifest, facts: Mapping[str, Any], fit: Fit) -> None:
    """What is no tensor of the model, once all ranks have read. Moves nothing but a mirror's copies."""
    stepper = trainer._stepper
    gradients.drop(stepper.parameters)
    if isinstance(trainer.model, ShardedUpdate):
        trainer.model.owed = False
    _take_extra_states(trainer, facts)
    if fit.state is not None:
        _take_optimizer(trainer.optimizer, fit.state, facts["optimizer"]["groups"])
    if facts["scheduler"] is not None and not _scheduler_gaps(trainer, manifest):
        stepper.scheduler.load_state_dict(facts["scheduler"])
    trainer._disk.take_positions(facts["loaders"])
    _take_progress(trainer, facts)
    _take_random(trainer, manifest, facts)
    if stepper.mirror is not None:
        stepper.mirror_again()


def _take_extra_states(trainer: Trainer, facts: Mapping[str, Any]) -> None:
    for name in extra_states(trainer.model):
        if name in facts["extra_states"]:
            set_extra(trainer.model, name, facts["extra_states"][name])


def _take_optimizer(optimizer: Optimizer, state: State, groups: list[dict[str, Any]]) -> None:
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved["options"].items():
            own = group.get(key)
            if isinstance(own, torch.Tensor) and isinstance(value, (torch.Tensor, float, int)):
                own.copy_(torch.as_tensor(value))  # a compiled or captured step reads this one
            else:
                group[key] = value


def _take_progress(trainer: Trainer, facts: Mapping[str, Any]) -> None:
    stepper = trainer._stepper
    stepper.phase = Phase(Stage.STEPPED, facts["step"])
    stepper.reference, stepper.grad_norm = facts["reference"], facts["grad_norm"]
    if stepper.scaling is not None:
        stepper.scaling = Scaling(**facts["scaling"]) if facts["scaling"] is not None else Scaling()
    stepper._snapshot = stepper._settled = None
    if facts["mean"] is not None:
        stepper._settled = Settled(
            facts["mean"], 1.0, stepper.reference, stepper.grad_norm, [], scaling=stepper.scaling
        )
    draws = stepper.layout.draws
    if draws is not None and facts["seed"] is not None:
        draws.seed = facts["seed"]


def _take_random(trainer: Trainer, manifest: Manifest, facts: Mapping[str, Any]) -> None:
    """Those of this rank, or else of the first one that took the same share of batches."""
    rank, states = mesh.rank(), facts["random"]
    part = mesh.data_coordinate(trainer.plan, rank)
    parts = facts["part"]
    if len(states) != mesh.world_size() or parts[rank] != part:
        rank = parts.index(part % (max(parts) + 1))
    contents.set_random_state(states[rank], trainer._device)
