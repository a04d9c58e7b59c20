"""What a rank that takes a dead one's place inherits: models, trainers and loaders, and how each is carried over.

Two ranks take part: a source, which has the same structure and the same numbers, and the newcomer.
"""

from __future__ import annotations

import copy
import functools
import io
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from nbtrain.errors import ModelError, UsageError
from nbtrain.parallel import live, mesh, optimizer_state
from nbtrain.parallel.belongings import Belongings, Model, ModelKey, tensors_of
from nbtrain.parallel.blueprint import attributes, materialise, set_attributes
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.loader import UnevenLoader
from nbtrain.parallel.local import local
from nbtrain.parallel.parallelize import lay_out_again
from nbtrain.parallel.parcel import Packer, Unpacker
from nbtrain.parallel.snapshot import set_random_state
from nbtrain.parallel.trainer import Trainer
from nbtrain.parallel.update import ShardedUpdate
from nbtrain.plan.footprint import format_bytes

SENT_BYTES = 256 * 2**20
"""More than that, beside a model's and an optimizer's tensors, is not sent: it is a dataset."""


@dataclass
class Here:
    """This rank's side.

    Attributes:
        namespace: The notebook's names.
        belongings: What it has; a newcomer, what it got so far.
        carried: What newcomers have got so far: what has an address.
        theirs: On others than newcomers: the names that these have,
        definitions: and which of them are classes and functions.
    """

    namespace: dict[str, Any]
    belongings: Belongings
    carried: Belongings = field(default_factory=Belongings)
    theirs: Collection[str] = ()
    definitions: Collection[str] = ()

    def pack(self, thing: Any, limit: float = math.inf) -> bytes:
        """``thing`` for the newcomers.

        Raises:
            UsageError: It takes more than ``limit`` bytes.
        """
        with _Limited(limit) as file:
            Packer(file, self.carried.addresses(), self.namespace, self.theirs, self.definitions).dump(thing)
            return file.getvalue()

    def unpack(self, data: bytes) -> Any:
        """On a newcomer, what `pack` wrote. Names that it has stay as they are."""
        return Unpacker(data, self.belongings.find, self.namespace).load()


class _Limited(io.BytesIO):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self._limit:
            raise UsageError(f"it takes more than {format_bytes(int(self._limit))}; make it again on all ranks")
        return super().write(data)


class Heir(Protocol):
    """A model, a trainer or a loader on its way."""

    def structure(self, here: Here) -> bytes:
        """On the source: all but large tensors."""

    def numbers(self, here: Here, mirrored: bool) -> Any:
        """On the source: tensors and plain data, as `nbtrain.parallel.transfer` sends them.

        Args:
            here: The source's side.
            mirrored: They are the dead rank's, as this one mirrored them; else this rank's own, which are the same.
        """

    def build(self, here: Here, structure: bytes) -> None:
        """On the newcomer; moves nothing."""

    def take(self, here: Here, numbers: Any) -> None:
        """On the newcomer, behind `build`."""

    def shelf(self, belongings: Belongings) -> tuple[dict[Any, Any], Any]:
        """Where it lies among a rank's belongings, and under which key."""

    def settle(self, here: Here) -> None:
        """On all ranks, where it was carried over."""
        kept, key = self.shelf(here.belongings)
        self.shelf(here.carried)[0][key] = kept[key]

    def drop(self, here: Here) -> None:
        """On the newcomer, where it came to nothing."""
        kept, key = self.shelf(here.belongings)
        kept.pop(key, None)


@dataclass(frozen=True)
class ModelHeir(Heir):
    """A laid-out model: its structure from the blueprint, its weights and buffers from a rank that has the same."""

    key: ModelKey

    def structure(self, here: Here) -> bytes:
        model = here.belongings.models[self.key]
        blueprint = model.layout.blueprint
        if blueprint is None or blueprint.module is None:
            raise ModelError(blueprint.problem if blueprint is not None else "it has no structure to build it from")
        if not mesh.is_shared(model.layout.mesh):
            raise ModelError("its mesh was made by a cell, which would have to make it again on all ranks")
        trained = {name: parameter.requires_grad for name, parameter in model.module.named_parameters()}
        layout = model.layout
        now = _own_attributes(model.module, blueprint.module), trained
        update = layout.result.standing() if isinstance(layout.result, ShardedUpdate) else None
        how = {name: getattr(layout, name) for name in ("order", "tensor", "draws", "split", "compile", "ddp")}
        return here.pack((blueprint, layout.plan, how, now, update))

    def numbers(self, here: Here, mirrored: bool) -> Any:
        own = weights(here.belongings.models[self.key].module)
        if not mirrored:
            return own
        mirror = here.belongings.steppers_of(self.key)[0].mirror
        assert mirror is not None, "that is the route"
        kind = "pieces" if isinstance(here.belongings.models[self.key].layout.result, ShardedUpdate) else "parameters"
        return {**own, kind: mirror.parameters()}

    def build(self, here: Here, structure: bytes) -> None:
        blueprint, plan, how, (values, trained), update = here.unpack(structure)
        layout = Layout(plan, mesh.standing_mesh(plan), blueprint=blueprint, **how)
        if layout.draws is not None:
            layout.draws.coordinate = mesh.data_coordinate(plan, mesh.rank())
        module = materialise(copy.deepcopy(blueprint.module), mesh.device_of(layout.mesh))
        lay_out_again(module, layout)
        if isinstance(layout.result, ShardedUpdate):
            layout.result.stand(update)
        set_attributes(module, values)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(trained[name])
        here.belongings.models[self.key] = Model(layout, module)

    def take(self, here: Here, numbers: Any) -> None:
        model = here.belongings.models[self.key]
        take_weights(model.module, numbers)
        if "pieces" in numbers and isinstance(model.layout.result, ShardedUpdate):
            model.layout.result.take_pieces(numbers["pieces"])

    def shelf(self, belongings: Belongings) -> tuple[dict[Any, Any], Any]:
        return belongings.models, self.key


@dataclass(frozen=True)
class TrainerHeir(Heir):
    """A trainer of a model that is there: its optimizer, scheduler and loss function, and how far it is."""

    number: int

    def structure(self, here: Here) -> bytes:
        return here.pack(_Itself.of(here.belongings.trainers[self.number]), SENT_BYTES)

    def numbers(self, here: Here, mirrored: bool) -> Any:
        stepper = here.belongings.trainers[self.number]._stepper
        if not mirrored:
            return {"state": optimizer_state.portable_state(stepper.optimizer), "random": None}
        assert stepper.mirror is not None, "that is the route"
        random = stepper.mirror.random_state(stepper.phase.num_steps)
        return {"state": stepper.mirror.optimizer_state(), "random": random}

    def build(self, here: Here, structure: bytes) -> None:
        trainer = here.unpack(structure).made()
        stepper = trainer._stepper
        stepper.number = live.track_steps(stepper, self.number)
        if isinstance(stepper.scheduler, lr_scheduler.LRScheduler):
            _watch_steps(trainer.optimizer)
        here.belongings.trainers[self.number] = trainer

    def take(self, here: Here, numbers: Any) -> None:
        trainer = here.belongings.trainers[self.number]
        optimizer_state.take_state(trainer.optimizer, numbers["state"])
        if numbers["random"] is not None:
            set_random_state(numbers["random"], trainer._device)

    def shelf(self, belongings: Belongings) -> tuple[dict[Any, Any], Any]:
        return belongings.trainers, self.number


@dataclass(frozen=True)
class LoaderHeir(Heir):
    """A loader with its dataset and its position, where the dataset isn't large."""

    name: str

    def structure(self, here: Here) -> bytes:
        loader = here.belongings.loaders[self.name]
        if isinstance(loader, UnevenLoader):
            raise UsageError("each rank has a dataset of its own; make the loader again on all ranks")
        return here.pack(loader, SENT_BYTES)

    def numbers(self, here: Here, mirrored: bool) -> Any:
        return None

    def build(self, here: Here, structure: bytes) -> None:
        here.belongings.loaders[self.name] = here.unpack(structure)

    def take(self, here: Here, numbers: Any) -> None:
        pass

    def shelf(self, belongings: Belongings) -> tuple[dict[Any, Any], Any]:
        return belongings.loaders, self.name


@dataclass(frozen=True)
class _Itself:
    """The trainer taken apart: it may have links to itself, and no `__init__` is to run again."""

    cls: type[Trainer]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, trainer: Trainer) -> _Itself:
        return cls(type(trainer), vars(trainer))

    def made(self) -> Trainer:
        trainer = self.cls.__new__(self.cls)
        vars(trainer).update(self.attributes)
        return trainer


def weights(module: nn.Module) -> dict[str, list[torch.Tensor]]:
    """This rank's parts, in the order of the model."""
    parameters, buffers = tensors_of(module)
    return {"parameters": [local(tensor) for tensor in parameters.values()], "buffers": list(buffers.values())}


def take_weights(module: nn.Module, numbers: dict[str, list[torch.Tensor]]) -> None:
    """Copies the parts of another rank into this one's."""
    parameters, buffers = tensors_of(module)
    with torch.no_grad():
        for kind, own in (("parameters", parameters), ("buffers", buffers)):
            for (name, tensor), value in zip(own.items(), numbers[kind], strict=True):
                if local(tensor).shape != value.shape:
                    raise ModelError(
                        f"'{name}' is {tuple(local(tensor).shape)} here and {tuple(value.shape)} elsewhere"
                    )
                local(tensor).copy_(value)


def _own_attributes(module: nn.Module, whole: nn.Module) -> dict[str, dict[str, Any]]:
    """Without the blanks that stand for what other stages hold."""
    data = {name: {*part._parameters, *part._buffers} for name, part in whole.named_modules()}
    return {
        name: {key: value for key, value in held.items() if key not in data.get(name, ())}
        for name, held in attributes(module).items()
    }


def _watch_steps(optimizer: Optimizer) -> None:
    """As a scheduler does when it is made: on its first step it looks whether its optimizer has stepped before."""
    step = optimizer.step

    @functools.wraps(step)
    def watched(*args: Any, **options: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **options)

    watched._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = watched  # type: ignore[method-assign]
