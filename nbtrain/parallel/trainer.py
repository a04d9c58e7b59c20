"""`Trainer`: the same training step for every plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nbtrain.errors import UsageError, nearest
from nbtrain.parallel import live, shard
from nbtrain.parallel.batch import Batch
from nbtrain.parallel.cell import on_all_ranks, require_all_ranks
from nbtrain.parallel.checkpoint.disk import Disk
from nbtrain.parallel.evaluation import evaluate
from nbtrain.parallel.holdings import bucket_text, holdings, holdings_text, measured
from nbtrain.parallel.layout import Layout, layout_of
from nbtrain.parallel.loader import Loader, loader, own
from nbtrain.parallel.loss import LossFn
from nbtrain.parallel.optimizer import MakeOptimizer, make_optimizer, trained
from nbtrain.parallel.parallelize import parallelize
from nbtrain.parallel.peers import require_same_batch
from nbtrain.parallel.phase import Phase, Stage
from nbtrain.parallel.preflight import check_same_options
from nbtrain.parallel.replan import Change, replan
from nbtrain.parallel.retire import inner
from nbtrain.parallel.state import full_state_dict, load_full_state_dict
from nbtrain.parallel.stepper import Stepper
from nbtrain.parallel.timeline import collect_timeline
from nbtrain.plan import Plan
from nbtrain.planner.timeline import Timeline
from nbtrain.telemetry.timeline import recorder

if TYPE_CHECKING:
    from nbtrain.parallel.checkpoint.saving import Saving

EXAMPLE = (
    "type nt.Trainer(model, nt.Plan(zero=3), optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3), "
    "loss_fn=torch.nn.functional.cross_entropy)"
)
# What other trainers call it.
_OTHERWISE = {"gradient_accumulation_steps": "accumulate", "max_grad_norm": "grad_clip", "criterion": "loss_fn"}


class Trainer:
    """Trains a model that is laid out by a plan. All ranks call each method; the numbers are one device's.

    Args:
        model: The same on every rank in names and shapes; laid out here, unless `parallelize` did it before.
        plan: How it lies on the ranks; None takes that of ``%%distributed --plan``, else ``Plan()``.
        optimizer: Called with the trained parameters after sharding. One that was built before is re-pointed. With
            ``zero=1`` ranks step different parameters: a class of one's own that steps each parameter by itself says so
            by a class attribute, ``per_parameter = True``, or ``elementwise = True`` where it does each element by
            itself, which may then be cut. torch's are known.
        loss_fn: ``loss_fn(output, *targets)`` returns a mean over samples, or ``(sum, count)``: then the global
            loss is the sum over all ranks and chunks divided by their count, however unevenly that falls. None:
            the model's forward gives the loss, as a scalar, ``.loss`` or the one scalar in a tuple.
        scheduler: Called with the optimizer, or a scheduler of it; it steps after every optimizer step.
        grad_clip: Largest global norm of the gradients, as of ``torch.nn.utils.clip_grad_norm_`` on one device.
        accumulate: Chunks into which `step` cuts its batch; one optimizer step takes the gradients of all. DDP
            reduces gradients with the last chunk; FSDP with every chunk, so that they stay sharded.
        redundancy: A rank that dies costs no step, whatever the plan. Replicas (``zero=0``, ``dp_replicate``) have
            what it held anyway; shards without replicas (with ``zero=1``, of the update) are kept a second time on the
            next rank, in host memory: one more shard of weights and optimizer state, one more optimizer step on the
            CPU, and the traffic of one gradient shard a step. It needs an element-wise optimizer of torch.optim.
        probe: With ``tp``: a tiny batch of the model's inputs, where `parallelize` cannot make one up.
        compile: As of `parallelize`: True compiles each repeated block.
        ddp: As of `parallelize`.

    Attributes:
        model: The laid-out model.
        plan: Resolved.
        optimizer: Holds the laid-out model's parameters.

    Raises:
        PlanError, ModelError, NotImplementedError: As `parallelize`.
        OptimizerError: The optimizer holds other tensors than the model's parameters.
        UsageError: Another argument cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None = None,
        *,
        optimizer: MakeOptimizer | Optimizer | None = None,
        loss_fn: LossFn | None = None,
        scheduler: Callable[[Optimizer], Any] | Any | None = None,
        grad_clip: float | None = None,
        accumulate: int = 1,
        redundancy: bool = False,
        probe: Any = None,
        compile: bool | str = False,
        ddp: Mapping[str, bool] | None = None,
        **unknown: Any,
    ) -> None:
        _refuse_unknown(unknown)
        if optimizer is None:
            raise UsageError(f"Trainer needs an optimizer; {EXAMPLE}")
        _check_arguments(loss_fn, grad_clip, accumulate)
        require_all_ranks("Trainer")
        self.model = parallelize(model, plan, probe=probe, compile=compile, ddp=ddp)
        layout = _layout(self.model)
        self.plan = layout.plan
        if layout.everyone is not None:
            check_same_options(layout.everyone, accumulate=accumulate, grad_clip=grad_clip, redundancy=redundancy)
        if layout.shards:
            shard.reshard(self.model)
        self.optimizer = make_optimizer(optimizer, self.model, layout)
        self._accumulate = accumulate
        self._stepper = Stepper(
            self.model,
            layout,
            trained(self.model, self.optimizer),
            self.optimizer,
            loss_fn,
            _make_scheduler(scheduler, self.optimizer),
            grad_clip,
            redundancy=redundancy,
        )
        self._disk = Disk()
        if redundancy:
            self._stepper.mirror_again()
        self._told = ""  # of the last change of layout
        self._change: Change | None = None

    def step(self, *batch: Any, **named: Any) -> torch.Tensor:
        """One optimizer step on this rank's share of the global batch, as the loader gives it.

        With ``loss_fn``, ``step(inputs, *targets)``: a tuple or dict of inputs is unpacked into the model's
        forward; of ``step(**batch)`` the loss function gets the keywords that its parameters name, the model the
        others. Without, everything goes to the model. With ``accumulate=k`` the batch is cut into k chunks along
        dim 0; the gradients are those of the whole batch. They stay until the next step, to be looked at.
        With ``zero=1`` a rank keeps its pieces of them, and ``trainer.model.gather_gradients()`` makes them whole.

        With ``precision=fp16`` the loss is scaled before backward. A step whose gradients are not finite on some rank
        counts as done but is skipped by all: neither optimizer nor scheduler steps, and the scale halves.

        A rank whose batch has 0 samples (`nbtrain.loader` with ``uneven=True``) joins: it adds nothing and takes part.

        A step that raises leaves weights and optimizer as they were, and the trainer usable. Where the optimizer itself
        raises, some weights may be stepped: the trainer says so until a checkpoint is loaded.

        Returns:
            The global mean loss before the optimizer's step: 0-d, float32, the same on all ranks. A mean loss is
            weighted by the samples of each rank, that is the size of dim 0 of the first tensor.

        Raises:
            BatchError: The batch cannot be cut into chunks, or nothing in it counts on any rank.
            GradientError: With ``grad_clip``: the norm is not finite. With fp16: no scale makes it finite.
        """
        require_all_ranks("Trainer.step")
        self._stepper.require_usable()
        self._stepper.layout.begin_round()
        share = _require_batch(Batch.of(batch, named))
        with live.together(alone=self._stepper.layout.everyone is None), recorder().only_of(self):
            self._stepper.require_whole()  # else a rank that lost it would begin a collective alone
            layout, problem = self._stepper.layout, self._stepper.changes()
            require_same_batch(share, self._doing("step"), layout, self._device, problem)
            return self._scalar(self._stepper.step(share.to(self._device), self._accumulate))

    def evaluate(self, batches: Iterable[Any]) -> torch.Tensor:
        """The global mean loss over ``batches``: no gradients, in eval mode, which is put back afterwards.

        Args:
            batches: A loader, or any iterable with as many items on every rank: tuples, dicts or single tensors.

        Returns:
            0-d, float32, the same on all ranks.

        Raises:
            BatchError: Ranks have different numbers of batches, or nothing in them counts.
        """
        require_all_ranks("Trainer.evaluate")
        self._stepper.require_usable()
        self._stepper.layout.begin_round()
        _require_batches(batches)
        stepper = self._stepper
        with live.together(alone=stepper.layout.everyone is None):
            stepper.require_whole()
            doing = self._doing("evaluate")
            return self._scalar(
                evaluate(self.model, stepper.watched_loss, batches, doing, stepper.number, stepper.layout, self._device)
            )

    @property
    def scheduler(self) -> Any:
        """Steps the learning rate behind every optimizer step; None without one."""
        return self._stepper.scheduler

    def state_dict(self) -> dict[str, Any]:
        """The whole model under its own names: copies on the CPU, on every rank, tied entries one object.

        Collective.
        """
        require_all_ranks("Trainer.state_dict")
        layout = self._stepper.layout
        parted = layout.shards or layout.shards_update or layout.peers is not None or layout.stages is not None
        if parted or self._stepper.mixed:
            self._stepper.require_whole()
        return full_state_dict(self.model, layout)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a whole model's state, as `state_dict` gives it; each rank keeps its part.

        Raises:
            ModelError: Names or shapes differ; nothing was changed.
            UsageError: It is no state dict.
        """
        if not isinstance(state, Mapping):
            raise UsageError(
                f"{state!r} is no state dict; give torch.load(...) of a file of torch's, or type trainer.load(...) for "
                "a checkpoint, trainer.import_weights(...) for a safetensors file"
            )
        if self._stepper.layout.shards:
            shard.reshard(self.model)
        load_full_state_dict(self.model, state, self._stepper.layout)

    def loader(self, dataset: Dataset[Any], *, batch_size: int, **options: Any) -> Loader:
        """`nbtrain.loader` with this trainer's plan. Its position is saved with the trainer."""
        return own(self._disk.know(loader(dataset, self.plan, batch_size=batch_size, **options)), self._stepper)

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = None,
        blocking: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> Saving:
        """Writes a checkpoint ``directory/step-00000120``, which any plan on any number of ranks can load. Collective.

        It holds the model and the optimizer's state, under the names of the model before it was laid out; scheduler,
        positions of `loader`'s loaders, random states of every rank, and what the next step needs beside. It is whole
        on the disk before it gets its name, and ``directory/latest`` names it then: a crash or a full disk at any
        moment leaves the earlier ones as they were. This trainer's own of the same step is replaced, and its own alone
        are removed by ``keep``, also those of the trainer whose checkpoint it has loaded; others' stay.

        Args:
            directory: That all ranks share. Made where it is missing.
            keep: How many of them stay there, the newest; None: all.
            blocking: False returns as soon as this rank's share was copied to host memory, and writes it while
                training goes on. The next `save`, or ``wait()`` of what is returned, tells whether that failed.
            extra: Plain data of your own (numbers, text, tensors, lists, tuples, dicts), which `load` returns. Rank
                0's counts.

        Returns:
            A handle: ``path``, ``done``, ``wait()``.

        Raises:
            CheckpointError: On every rank, where one could not write; nothing half-made stays. Or another model's
                checkpoint of the same step is there.
            OptimizerError: The optimizer's state cannot be described by names.
        """
        from nbtrain.parallel.checkpoint.saving import save  # DCP takes half a second to import

        _require_path(directory, "a directory for checkpoints: trainer.save('checkpoints')")
        with on_all_ranks("Trainer.save", self._stepper.number):
            return save(self, directory, keep=keep, blocking=blocking, extra=extra)

    def load(self, path: str | os.PathLike[str], *, strict: bool = True) -> dict[str, Any]:
        """Takes over what `save` wrote, by any plan and on any number of ranks. Collective.

        With the plan that it was saved by losses go on bit for bit: random states, loaders and the fp16 scale too.
        With another one they are within rounding, and each rank takes the random states of the first rank that took
        the same share of batches. Positions go to loaders of the same sizes, seed and order of samples, to the first
        one first; a loader that is made later goes on there too.

        Args:
            path: A checkpoint, or a directory of some, whose latest is taken.
            strict: False takes what fits by name, says what it leaves as it is, and leaves the optimizer's state
                alone where it is another kind of optimizer. Shapes must fit.

        Returns:
            ``extra``, as it was given to `save`.

        Raises:
            CheckpointError: It does not fit, and all that doesn't is told; nothing was changed. Or files are damaged.
        """
        from nbtrain.parallel.checkpoint.loading import load

        _require_path(path, "what trainer.save was given: trainer.load('checkpoints')")
        with on_all_ranks("Trainer.load", self._stepper.number):
            return load(self, path, strict=strict)

    def export_weights(self, path: str | os.PathLike[str]) -> None:
        """Writes the whole model to one safetensors file, under its own names. Collective.

        Tied tensors are there once; the file's metadata has their other names. Rank 0 writes, one tensor at a time, and
        makes folders that are missing.

        Raises:
            CheckpointError: On every rank, where rank 0 could not write; an older file stays.
        """
        from nbtrain.parallel.checkpoint.weights import export_weights

        _require_path(path, "a file: trainer.export_weights('model.safetensors')")
        with on_all_ranks("Trainer.export_weights", self._stepper.number):
            export_weights(self, path)

    def import_weights(self, path: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Takes the model's weights from one safetensors file; each rank reads its part. Collective.

        Optimizer, scheduler and steps stay as they are. Numbers are rounded to the model's dtypes.

        Args:
            path: The file.
            strict: False takes what fits by name, and says what it leaves.

        Raises:
            CheckpointError: Names or shapes differ, and all are told; nothing was changed.
        """
        from nbtrain.parallel.checkpoint.weights import import_weights

        _require_path(path, "a file: trainer.import_weights('model.safetensors')")
        with on_all_ranks("Trainer.import_weights", self._stepper.number):
            import_weights(self, path, strict=strict)

    def replan(self, plan: Plan | str, *, via: str = "auto", probe: Any = None) -> None:
        """Lays the model out by another plan, between two steps. Collective; the number of ranks stays.

        Weights, buffers, optimizer state, scheduler, loss scale, counts and positions of loaders come along: training
        goes on as if nothing had happened. `model` and `plan` are new objects; the trainer, its optimizer and its
        scheduler stay the ones that they are. Names of the notebook that hold the model, a module or a parameter of it
        are bound to what took its place; elsewhere the old model raises when it is called, and holds no memory.
        Gradients are dropped. Hooks that were set on the laid-out model stay behind, and so does what its modules keep
        in lists and dicts; numbers, words, flags and tensors come along.

        The new layout is made beside the old one, which goes when all ranks hold all of the new one. Before that
        nothing of the trainer has changed: whatever raises, an interrupt too, it goes on in the old layout. A rank
        needs memory for its parts of both, and for one whole tensor, or 64 MiB of them. Where that isn't there, its
        old parts wait in temporary files: an interrupt is then put off to the end, and a rank that dies meanwhile takes
        the trainer with it.

        Args:
            plan: Or its text, e.g. ``"tp=2,zero=1"``.
            via: "memory": both layouts at once. "disk": through files of the folder ``TMPDIR``. "auto" takes memory
                where the free bytes on every device or host are enough.
            probe: As of `parallelize`, where ``tp`` has to be decided anew.

        Raises:
            PlanError, ModelError, OptimizerError, BatchError, UsageError: Plan, model, optimizer, a loader or what is
                around the trainer cannot take it; nothing was changed.
        """
        with on_all_ranks("Trainer.replan", self._stepper.number):
            replan(self, plan, via, probe, (sys._getframe(1).f_globals,))

    def memory(self) -> dict[str, int]:
        """Measured bytes on this rank: ``{"parameters", "gradients", "optimizer", "buffers"}``."""
        self._let_go()
        return measured(self.model, self.optimizer)

    def timeline(self, *, record: bool = True) -> Timeline:
        """What all ranks did in the steps since recording began, as measured, and as one device a rank would have done.

        The first call begins to record: take some steps and call it again. The latest 65,536 events of each rank are
        kept. Collective. As text it is a table, by rank::

            busy ms       the rank's own work in forwards and backwards, in which it had a core
            wall ms       how long they took: more than busy where ranks share cores, and where collectives are inside
                          of them, which wait for other ranks (FSDP's gathers, tensor parallelism's sums)
            waiting ms    for messages of other stages
            measured      (the step's time - wall) / wall: the bubble as the clock showed it
            replayed      the bubble if each rank had a device, by the least busy time of each action
            equal stages  the bubble if stages took equally long: the formula's

        Args:
            record: Whether recording goes on. It costs about 3 us an event, and nothing when it is off.
        """
        require_all_ranks("Trainer.timeline")
        return collect_timeline(self._stepper.layout, self._device, record, self)

    def describe(self) -> str:
        """The plan in words, and a table of what this rank holds, as measured."""
        self._let_go()
        held = holdings(self)
        lines = [
            self.plan.describe(
                num_parameters=held["num_parameters"], root_parameters=shard.num_root_parameters(self.model)
            ),
            holdings_text(held),
            *([] if (tensor := self._stepper.layout.tensor) is None else [tensor.told]),
            *([] if (split := self._stepper.layout.split) is None else [split.told]),
            *bucket_text(self.model),
            *([self._told] if self._told else []),
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Trainer of {self._model_name}: {self.plan}, {self.num_steps} steps done>"

    def _doing(self, what: str) -> str:
        return f"Trainer.{what} of {self._model_name} (trainer {self._stepper.number})"

    @property
    def _model_name(self) -> str:
        kinds = type(inner(self.model)).__mro__  # FSDP makes a class of its own
        return next(kind for kind in kinds if not issubclass(kind, FSDPModule)).__name__

    def _let_go(self) -> None:
        """What a forward outside a step has gathered is not what a rank holds."""
        if self._stepper.layout.shards and self.phase.stage is Stage.STEPPED:
            shard.reshard(self.model)

    @property
    def phase(self) -> Phase:
        """How far this rank is in a step."""
        return self._stepper.phase

    @property
    def num_steps(self) -> int:
        """Steps done, with those that fp16 skipped."""
        return self.phase.num_steps

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the last step's gradients before clipping; None without ``grad_clip``."""
        return self._stepper.grad_norm

    @property
    def loss_scale(self) -> float | None:
        """What the next loss is multiplied by before backward; None but with ``precision=fp16``."""
        return None if self._stepper.scaling is None else self._stepper.scaling.scale

    @property
    def num_skipped(self) -> int:
        """Steps that changed nothing, as fp16 gradients were not finite."""
        return 0 if self._stepper.scaling is None else self._stepper.scaling.num_skipped

    @property
    def _device(self) -> torch.device:
        return self._stepper.device

    def _scalar(self, value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float32, device=self._device)


def _layout(model: nn.Module) -> Layout:
    layout = layout_of(model)
    assert layout is not None, "parallelize remembers every layout"
    return layout


def _refuse_unknown(arguments: Mapping[str, Any]) -> None:
    known = ("optimizer", "loss_fn", "scheduler", "grad_clip", "accumulate", "redundancy", "probe", "compile", "ddp")
    for name in arguments:
        other = _OTHERWISE.get(name)
        hint = f"type {other}=" if other else nearest(name, known)
        raise UsageError(f"Trainer has no argument {name!r}; {hint}")


def _require_path(path: object, cure: str) -> None:
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"{path!r} is no path; give {cure}")


def _require_batch(batch: Batch) -> Batch:
    for item in (*batch.positional, *batch.named.values()):
        if isinstance(item, Dataset | DataLoader | Loader):
            raise UsageError(
                f"step takes one batch, not a {type(item).__name__}; type for batch in trainer.loader(dataset, "
                "batch_size=...): trainer.step(*batch)"
            )
    return batch


def _require_batches(batches: Any) -> None:
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        raise UsageError(
            f"evaluate takes batches, and a {type(batches).__name__} gives samples; type "
            "trainer.evaluate(trainer.loader(dataset, batch_size=..., shuffle=False))"
        )
    if isinstance(batches, torch.Tensor | Mapping) or (
        isinstance(batches, tuple) and len(batches) > 1 and all(isinstance(item, torch.Tensor) for item in batches)
    ):
        raise UsageError("evaluate takes several batches; give a single one in a list: trainer.evaluate([(x, y)])")


def _check_arguments(loss_fn: LossFn | None, grad_clip: float | None, accumulate: int) -> None:
    if loss_fn is not None and not callable(loss_fn):
        raise UsageError(f"loss_fn={loss_fn!r} is no function; give e.g. torch.nn.functional.cross_entropy")
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise UsageError(f"loss_fn={loss_fn.__name__} is a class; give one of it: loss_fn={loss_fn.__name__}()")
    is_number = isinstance(grad_clip, (int, float)) and not isinstance(grad_clip, bool)
    if grad_clip is not None and not (is_number and grad_clip > 0):
        raise UsageError(f"grad_clip={grad_clip!r} must be a positive norm or None, e.g. grad_clip=1.0")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise UsageError(f"accumulate={accumulate!r} must be an integer of at least 1, e.g. accumulate=4")


def _make_scheduler(scheduler: Callable[[Optimizer], Any] | Any | None, optimizer: Optimizer) -> Any:
    try:
        made = scheduler(optimizer) if callable(scheduler) else scheduler
    except TypeError as problem:
        if isinstance(scheduler, type):
            problem.add_note(
                f"type scheduler=lambda optimizer: {scheduler.__name__}(optimizer, ...) with what it needs"
            )
        raise
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau steps by a metric, not after every optimizer step; make it yourself with "
            "trainer.optimizer and call its step(trainer.evaluate(...))"
        )
    if made is None:
        return None
    if not hasattr(made, "step"):
        raise UsageError(
            f"scheduler={scheduler!r} is no scheduler; type scheduler=lambda optimizer: "
            "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ...)"
        )
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise UsageError(
            "the scheduler belongs to another optimizer; type scheduler=lambda optimizer: "
            "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ...)"
        )
    return made
