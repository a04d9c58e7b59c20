"""What a rank's namespace holds a part of: laid-out models, their trainers and loaders; found and addressed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from nbtrain.parallel import live
from nbtrain.parallel.layout import Layout, layout_of
from nbtrain.parallel.loader import Loader
from nbtrain.parallel.parcel import Address
from nbtrain.parallel.replicate import Replica
from nbtrain.parallel.stepper import Stepper
from nbtrain.parallel.trainer import Trainer
from nbtrain.parallel.update import ShardedUpdate

ModelKey = tuple[str, int | str]
TRAINER_PARTS = ("trainer", "optimizer", "scheduler")
LOADER_PARTS = ("loader", "dataset")


@dataclass
class Model:
    """A laid-out model.

    Attributes:
        layout: How it lies.
        module: The model itself, not the replica around it.
    """

    layout: Layout
    module: nn.Module


@dataclass
class Belongings:
    """What this rank has, or has got so far.

    Attributes:
        models: By a key that is the same on every rank: the number of the first trainer, or a name.
        trainers: By their number.
        loaders: By name.
    """

    models: dict[ModelKey, Model] = field(default_factory=dict)
    trainers: dict[int, Trainer] = field(default_factory=dict)
    loaders: dict[str, Loader] = field(default_factory=dict)

    def model_of(self, trainer: Trainer) -> ModelKey:
        """The key of a trainer's model."""
        return next(key for key, model in self.models.items() if model.layout is trainer._stepper.layout)

    def steppers_of(self, key: ModelKey) -> list[Stepper]:
        """Those of the trainers of a model, by their number."""
        layout = self.models[key].layout
        return [trainer._stepper for _, trainer in sorted(self.trainers.items()) if trainer._stepper.layout is layout]

    def addresses(self) -> dict[int, Address]:
        """The address of each object in here, by id."""
        return {id(thing): address for address, thing in self._addressed()}

    def find(self, address: Address) -> Any:
        """The object at an address.

        Raises:
            KeyError: This rank has none there.
        """
        kind, key, *name = address
        if kind in TRAINER_PARTS:
            return dict(_of_trainer(self.trainers[key]))[kind]
        if kind in LOADER_PARTS:
            return dict(_of_loader(self.loaders[key]))[kind]
        model, address = self.models[key], (kind, *name)
        if model.layout.split is not None and kind in ("parameter", "buffer"):
            return attrgetter(*name)(model.module)  # of another stage: what stands for it here
        return dict(_of_model(model))[address]

    def _addressed(self) -> Iterator[tuple[Address, Any]]:
        for key, model in self.models.items():
            for (kind, *name), thing in _of_model(model):
                yield (kind, key, *name), thing
        for number, trainer in self.trainers.items():
            yield from (((part, number), thing) for part, thing in _of_trainer(trainer))
        for label, loader in self.loaders.items():
            yield from (((part, label), thing) for part, thing in _of_loader(loader))


def find_belongings(namespace: dict[str, Any]) -> Belongings:
    """What the names of a namespace hold. Trainers that have lost something are left out."""
    found = Belongings()
    steppers = {id(stepper): number for number, stepper in live.resumables().items()}
    # ranks may have bound the names in another order; IPython binds some with an underscore
    named = [(name, value) for name, value in sorted(namespace.items()) if not name.startswith("_")]
    for trainer in (value for _, value in named if isinstance(value, Trainer) and not value._stepper.lost):
        found.trainers.setdefault(steppers[id(trainer._stepper)], trainer)
    for number, trainer in sorted(found.trainers.items()):
        _add_model(found, ("trainer", number), trainer.model)
    for name, value in named:
        if isinstance(value, nn.Module):
            _add_model(found, ("name", name), value)
    found.loaders = {name: value for name, value in named if isinstance(value, Loader)}
    return found


def strangers(found: Belongings) -> dict[int, live.Resumable]:
    """What takes steps here and no name holds, by number."""
    if live.resumables().keys() <= found.trainers.keys():
        return {}
    gc.collect()  # an old trainer, of a cell that ran again, may be garbage
    return {number: stepper for number, stepper in live.resumables().items() if number not in found.trainers}


def _add_model(found: Belongings, key: ModelKey, module: nn.Module) -> None:
    layout = layout_of(module)
    if (
        layout is None
        or layout.mesh is None
        or layout.gone
        or any(model.layout is layout for model in found.models.values())
    ):
        return
    found.models[key] = Model(layout, module.module if isinstance(module, Replica) else module)


def _of_model(model: Model) -> Iterator[tuple[Address, Any]]:
    yield ("layout",), model.layout
    if model.layout.result is not None:
        yield ("result",), model.layout.result
    for name, module in model.module.named_modules():
        yield ("module", name), module
    for name, parameter in model.module.named_parameters():
        yield ("parameter", name), parameter
    for name, buffer in model.module.named_buffers():
        yield ("buffer", name), buffer
    if isinstance(model.layout.result, ShardedUpdate):
        for name, piece in model.layout.result.named_pieces():
            yield ("piece", name), piece


def _of_trainer(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    yield "trainer", trainer
    yield "optimizer", trainer.optimizer
    if trainer._stepper.scheduler is not None:
        yield "scheduler", trainer._stepper.scheduler


def _of_loader(loader: Loader) -> Iterator[tuple[str, Any]]:
    yield "loader", loader
    yield "dataset", loader.dataset


def tensors_of(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """Parameters and buffers by name; a tied one once."""
    return dict(module.named_parameters()), dict(module.named_buffers())
