"""What of a trainer goes into a checkpoint, beside where its tensors lie."""

from __future__ import annotations

import dataclasses
import io
import platform
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nbtrain._version import __version__
from nbtrain.errors import CheckpointError
from nbtrain.parallel import mesh, snapshot
from nbtrain.parallel.checkpoint.manifest import Manifest
from nbtrain.parallel.checkpoint.storage import Extent, Extents
from nbtrain.parallel.loader import Loader
from nbtrain.parallel.pieces import (
    Held,
    HeldOptimizer,
    aliases,
    canonical_names,
    extra_states,
    held_optimizer,
    held_parameters,
)

if TYPE_CHECKING:
    from nbtrain.parallel.trainer import Trainer

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_DICTS = (dict, OrderedDict, Counter)


@dataclasses.dataclass
class Contents:
    """Of one rank.

    Attributes:
        tensors: By name of the item.
        copies: Names of those that no optimizer keeps equal on ranks.
        optimizer: Whose tensors are among them.
        facts: Plain data, small; see `facts`.
    """

    tensors: dict[str, Held]
    copies: set[str]
    optimizer: HeldOptimizer
    facts: dict[str, Any]


def contents(trainer: Trainer, extra: Mapping[str, Any] | None = None) -> Contents:
    """All that this rank has. Copies no tensor of the model or the optimizer.

    Raises:
        OptimizerError: The optimizer's state cannot be described by names.
    """
    model, layout = trainer.model, trainer._stepper.layout
    held = held_parameters(model, layout)
    optimizer = held_optimizer(trainer.optimizer, model, layout)
    trained = parameter_names(trainer)
    tensors = {model_item(name): one for name, one in held.items()}
    for name, entries in optimizer.state.items():
        tensors |= {state_item(name, key): one for key, one in entries.items() if isinstance(one, Held)}
    copies = {model_item(name) for name in held if name not in trained}
    return Contents(tensors, copies, optimizer, facts(trainer, optimizer, extra or {}))


def parameter_names(trainer: Trainer) -> set[str]:
    """Canonical, of those that this rank has."""
    canonical = canonical_names(trainer.model, trainer._stepper.layout)
    return {canonical.get(name, name) for name, _ in trainer.model.named_parameters()}


def model_item(name: str) -> str:
    return f"model.{name}"


def state_item(name: str, key: str) -> str:
    return f"optimizer.state.{name}.{key}"


def facts(trainer: Trainer, optimizer: HeldOptimizer, extra: Mapping[str, Any]) -> dict[str, Any]:
    """What one rank knows that is no tensor."""
    stepper = trainer._stepper
    scheduler, draws, settled = stepper.scheduler, stepper.layout.draws, stepper._settled
    return {
        "step": stepper.phase.num_steps,
        "part": mesh.data_coordinate(trainer.plan, mesh.rank()),
        "random": random_state(trainer._device),
        "optimizer": {
            "groups": [(group.names, dict(group.options)) for group in optimizer.groups],
            "state": {
                name: {key: None if isinstance(value, Held) else (value,) for key, value in entries.items()}
                for name, entries in optimizer.state.items()
            },
        },
        "scheduler": None if scheduler is None or not hasattr(scheduler, "state_dict") else scheduler.state_dict(),
        "loaders": [position(loader) for loader in trainer._disk.living_loaders()],
        "scaling": None if stepper.scaling is None else dataclasses.asdict(stepper.scaling),
        "reference": stepper.reference,
        "grad_norm": stepper.grad_norm,
        "mean": None if settled is None else settled.mean,
        "seed": None if draws is None else draws.seed,
        "extra_states": extra_states(trainer.model),
        "extra": dict(extra),
    }


def position(loader: Loader) -> dict[str, int]:
    """Where a loader is, and what tells whether another one is like it."""
    return {**loader.state_dict(), "batch_size": loader.batch_size, "length": len(loader)}


def merged(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks know, as one device would: stages have different parameters.

    Raises:
        CheckpointError: Ranks are not at the same step.
    """
    steps = [facts["step"] for facts in everyone]
    if len(set(steps)) > 1:
        raise CheckpointError(f"ranks have done {steps} steps (by rank); make the trainer again on all ranks")
    groups = [
        {"names": list(dict.fromkeys(name for names, _ in alike for name in names)), "options": alike[0][1]}
        for alike in zip(*(facts["optimizer"]["groups"] for facts in everyone), strict=True)
    ]
    state: dict[str, dict[str, Any]] = {}
    extra_states: dict[str, Any] = {}
    for facts in reversed(everyone):  # the first rank's count
        for name, entries in facts["optimizer"]["state"].items():
            state.setdefault(name, {}).update(entries)
        extra_states |= facts["extra_states"]
    return {
        **everyone[0],
        "optimizer": {"groups": groups, "state": state},
        "extra_states": extra_states,
        # a rank that took a lost one's place may have none
        "loaders": max((facts["loaders"] for facts in everyone), key=len),
        "random": [facts["random"] for facts in everyone],
        "part": [facts["part"] for facts in everyone],
    }


def plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A copy, as data that can be read again without running code.

    Raises:
        CheckpointError: Some of it is something else; all is told.
    """
    problems: list[str] = []
    copied = {key: _plain(value, key, problems) for key, value in facts.items()}
    if problems:
        raise CheckpointError(
            f"{'; '.join(problems)}, which is no plain data (numbers, text, tensors, lists, tuples, dicts); leave it "
            "out, or give what holds it a state_dict() of plain data"
        )
    return copied


def packed(facts: Mapping[str, Any]) -> bytes:
    """What `plain` gave, as bytes."""
    file = io.BytesIO()
    torch.save(dict(facts), file)
    return file.getvalue()


def manifest(trainer: Trainer, facts: Mapping[str, Any], everyone: list[Extents]) -> Manifest:
    """What tells people and `load` what is in the checkpoint."""
    table: dict[str, Extent] = {name: extent for held in reversed(everyone) for name, extent in held.items()}
    scheduler = trainer._stepper.scheduler
    state = {
        name: {key: None if plain else _told(table[state_item(name, key)]) for key, plain in entries.items()}
        for name, entries in facts["optimizer"]["state"].items()
    }
    names = [group["names"] for group in facts["optimizer"]["groups"]]
    return Manifest(
        versions={"nbtrain": __version__, "torch": torch.__version__, "python": platform.python_version()},
        saved_ns=time.time_ns(),
        step=facts["step"],
        plan=trainer.plan.to_dict(),
        world_size=len(everyone),
        model=_model_class(trainer),
        tensors={
            name.removeprefix("model."): _told(extent) for name, extent in table.items() if name.startswith("model.")
        },
        aliases=aliases(trainer.model, trainer._stepper.layout),
        extra_states=list(facts["extra_states"]),
        optimizer={"class": class_name(trainer.optimizer), "groups": names, "state": state},
        scheduler=None if scheduler is None else class_name(scheduler),
        loaders=[{key: held[key] for key in ("batch_size", "length")} for held in facts["loaders"]],
    )


def random_state(device: torch.device) -> dict[str, Any]:
    """The random states of torch (CPU and ``device``), Python and NumPy."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": snapshot.random_state(torch.device("cpu")),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.array(keys, dtype=np.int64)), *rest),
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Takes what `random_state` gave; what was saved on another kind of device stays."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numbers, *rest = state["numpy"]
    np.random.set_state((name, numbers.numpy().astype(np.uint32), *rest))


def class_name(thing: Any) -> str:
    """By which a checkpoint tells what it was made with."""
    return type(thing).__qualname__


def _model_class(trainer: Trainer) -> str:
    blueprint = trainer._stepper.layout.blueprint  # laying a model out changes its class
    return class_name(trainer.model if blueprint is None or blueprint.module is None else blueprint.module)


def _told(extent: Extent) -> dict[str, Any]:
    return {"shape": list(extent.shape), "dtype": str(extent.dtype).removeprefix("torch.")}


def _plain(value: Any, where: str, problems: list[str]) -> Any:
    """Tensors copied to the CPU, and NumPy's numbers as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return value.detach().to("cpu", copy=True)
    if type(value) in _DICTS:
        items = {_plain(key, where, problems): _plain(one, f"{where}.{key}", problems) for key, one in value.items()}
        return type(value)(items)
    if type(value) in (list, tuple, set):
        return type(value)(_plain(one, where, problems) for one in value)
    if type(value) not in _ATOMS:
        problems.append(f"'{where}' holds a {type(value).__name__}")
    return value
