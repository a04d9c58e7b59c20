"""The mechanics of a training step: all ranks take it, or none does.

::

    forward, backward of each chunk     gradients of sum / divisor, reduced by DDP or FSDP
    sum partial gradients               with tensor parallelism: of whole parameters that act on cut activations
    mirror gradients                    with redundancy: to the rank that would stand in for this one
    reduce totals                       loss sum, weight, norm, used parameters: the one place where ranks wait
    scale, clip                         by divisor / weight
    optimizer, scheduler                not interruptible; skipped on all ranks where fp16 overflowed on one
    gather weights                      with zero=1: see `nbtrain.parallel.update`; not interruptible
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nbtrain.errors import GradientError, NbtrainError, SessionError, UsageError, first_line
from nbtrain.events import EventKind
from nbtrain.interrupts import uninterrupted
from nbtrain.parallel import gradients, live, mesh, offload, shard
from nbtrain.parallel.batch import Batch
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.loss import LossFn, compute_loss
from nbtrain.parallel.mirror import Mirror
from nbtrain.parallel.optimizer import is_elementwise
from nbtrain.parallel.phase import Phase, Stage
from nbtrain.parallel.replicate import Replica
from nbtrain.parallel.scaler import Scaling
from nbtrain.parallel.snapshot import Snapshot
from nbtrain.parallel.spread import Spread
from nbtrain.parallel.tensor.reading import reading_wholes
from nbtrain.parallel.totals import Tally
from nbtrain.parallel.uneven import StandIn, joined_backward
from nbtrain.parallel.update import JOIN_CURE, ShardedUpdate
from nbtrain.telemetry.timeline import recorder


@dataclass
class Stepper:
    """What a step needs, and what it leaves.

    Attributes:
        model: Laid out by ``layout``.
        parameters: Those that train.
        scheduler: Has ``step()``, or None.
        phase: How far this rank is.
        grad_norm: Global norm of the last step before clipping; None without ``grad_clip``.
        scaling: Of the loss, with fp16.
        reference: Global weight of the last step: what the next one most likely has. 1.0 before the first.
        lost: Why no step can be taken any more; "" where it can.
        mixed: Why weights, optimizer and scheduler are not those of one step, until a checkpoint is loaded; "" where
            they are.
        number: Of the trainer, the same on all ranks.
        redundancy: Whether a lost rank must cost no step, though no replica has its shards.
        mirror: What is held for that.
    """

    model: nn.Module
    layout: Layout
    parameters: list[nn.Parameter]
    optimizer: Optimizer
    loss_fn: LossFn | None = None
    scheduler: Any = None
    grad_clip: float | None = None
    phase: Phase = field(default_factory=lambda: Phase(Stage.STEPPED, 0))
    grad_norm: float | None = None
    scaling: Scaling | None = None
    reference: float = 1.0
    lost: str = ""
    mixed: str = ""
    number: int = 0
    redundancy: bool = False
    mirror: Mirror | None = None
    _settled: Settled | None = None
    _snapshot: Snapshot | None = None
    _stand_in: StandIn = field(default_factory=StandIn)

    def __post_init__(self) -> None:
        self.number = live.track_steps(self)
        self.go_on(self.model, self.layout, self.parameters)

    def go_on(self, model: nn.Module, layout: Layout, parameters: list[nn.Parameter]) -> None:
        """Takes its next step with the model as it lies there; what it counts stays. Moves nothing."""
        self.model, self.layout, self.parameters, self.mirror = model, layout, parameters, None
        self._spread = Spread(model, layout, parameters)
        self._laid_out = self._signature()
        if layout.loop is not None:
            layout.loop.taken_over = True
        self.scaling = (self.scaling or Scaling()) if layout.plan.precision == "fp16" else None

    def step(self, whole: Batch, accumulate: int) -> float:
        """The global mean loss. Whatever raises, the weights stay and the next step starts afresh."""
        self.require_whole()
        if isinstance(self.model, ShardedUpdate):
            self.model.claim(self.optimizer)
        if torch.is_inference_mode_enabled():
            raise UsageError("a step needs gradients; call trainer.step outside torch.inference_mode()")
        if self.layout.loop is not None:
            self.layout.loop.taken_over = True
        if isinstance(self.model, Replica) and self.model.joins:
            raise UsageError(JOIN_CURE)
        chunks = whole.chunks(accumulate, uneven=self.layout.group is not None)
        self._stand_in.remember(whole)
        if self.phase.stage is not Stage.STEPPED:
            self._drop()
        step = self.phase.num_steps + 1
        self._snapshot = Snapshot(self.model, self.device)
        self.phase = Phase(Stage.COMPUTING, step)
        recorder().step = step
        if self.layout.draws is not None:
            self.layout.draws.begin(step)
        try:
            gradients.drop(self.parameters)
            if self.layout.everyone is None and (self.scaling is None or self._settled is None):
                self.reference = float(whole.num_samples or 1)
            settled = self._attempt(chunks, step)
            if settled.skipped and settled.reference >= 2 * self.reference:
                # no overflow of the mean loss: gradients were larger than its own, by a weight that nobody knew
                self.reference = settled.reference
                self._begin_again(step)
                settled = self._attempt(chunks, step)
            with uninterrupted():
                self._finish(settled)
                self._gather()
        except BaseException as problem:
            self._recover(problem)
            raise
        return settled.mean

    def _attempt(self, chunks: Sequence[Batch], step: int) -> Settled:
        """Everything up to the place where ranks have agreed on how the step ends."""
        assert self._snapshot is not None, "taken when the step began"
        tally = self._backward(chunks)
        self._spread.sum_partial()
        if self.mirror is not None:
            self.mirror.exchange(step, self._snapshot.random)
        self.phase = Phase(Stage.READY, step)
        return self._settle(tally)

    def _begin_again(self, step: int) -> None:
        """To where `step` was before its first forward, on all ranks."""
        assert self._snapshot is not None, "taken when the step began"
        gradients.drop(self.parameters)
        self._snapshot.restore()
        if self.layout.draws is not None:
            self.layout.draws.begin(step)
        self.phase = Phase(Stage.COMPUTING, step)

    def mirror_again(self) -> None:
        """Begin to hold what the rank before needs, and let the next one hold the same of this rank. Collective."""
        sharded = self.layout.shards or self.layout.shards_update
        if self.redundancy and sharded and self.layout.plan.dp_replicate == 1:
            self.mirror = Mirror(self.model, self.optimizer, self.layout)

    def __getstate__(self) -> dict[str, Any]:
        # on its way to another rank, which mirrors another one and has begun no step
        return {**vars(self), "mirror": None, "_snapshot": None, "_stand_in": StandIn()}

    def require_usable(self) -> None:
        """Raises where a part of the model or its optimizer died with a rank, or a step ended in its middle.

        Raises:
            SessionError: What was lost, and what to do.
        """
        if self.lost or self.mixed:
            raise SessionError(self.lost or self.mixed)

    def require_whole(self) -> None:
        """As `require_usable`, and gathers what an interruption has left owed, on all ranks alike. Collective."""
        self.require_usable()
        self._gather()

    def rest(self) -> None:
        """Drops a step that came to no end, and gathers what an interruption has left owed. Collective."""
        self.require_whole()
        self._drop()

    def standing(self) -> Standing:
        """How far this rank is, what the last finished step was settled by, and whether its weights are owed."""
        return self.phase, self._settled, isinstance(self.model, ShardedUpdate) and self.model.owed

    def agree(self, standings: list[Standing]) -> None:
        """Ends the step that another rank has ended; drops the one that none has. See `nbtrain.parallel.live`.

        A rank that lacks a step of which it has no gradients loses the trainer.
        """
        if self.mixed:
            return
        most, settled, _ = max(standings, key=lambda standing: standing[0].num_steps)
        if isinstance(self.model, ShardedUpdate):
            self.model.owed = any(owed or phase.num_steps != most.num_steps for phase, _, owed in standings)
        if self.phase.num_steps == most.num_steps:
            self._drop()
        elif self.phase == Phase(Stage.READY, most.num_steps) and settled is not None:
            with uninterrupted():
                self._finish(settled)
        else:
            self.lost = (
                f"this rank has done {self.phase.num_steps} steps and another {most.num_steps}; make the trainer again "
                "on all ranks"
            )

    def _finish(self, settled: Settled) -> None:
        """The end of a step, the same on every rank: all hold their final gradients."""
        if self.layout.usage is not None:
            self.layout.usage.clear_unused(settled.marks)
        gradients.scale(self.parameters, settled.factor)
        if not settled.skipped:
            with self._whole_or_mixed():
                with recorder().span(EventKind.OPTIMIZER):
                    self._step_optimizer()
                if self.mirror is not None:
                    self.mirror.step(settled.factor)
            if isinstance(self.model, ShardedUpdate):
                self.model.owed = True
        self.reference, self.grad_norm, self.scaling = settled.reference, settled.grad_norm, settled.scaling
        self._settled, self._snapshot = settled, None
        self.phase = Phase(Stage.STEPPED, self.phase.step)
        if self.scheduler is not None and not settled.skipped:
            self.scheduler.step()

    def _step_optimizer(self) -> None:
        if "optimizer" in (self.layout.plan.offload or ()):
            offload.step(self.optimizer, is_elementwise(self.optimizer))
        else:
            self.optimizer.step()

    @contextlib.contextmanager
    def _whole_or_mixed(self) -> Iterator[None]:
        """Around the optimizer: where it raises, nobody knows which parameters it has stepped."""
        try:
            yield
        except BaseException as problem:
            self.mixed = (
                f"the optimizer raised in step {self.phase.step} ({first_line(problem)}): some weights may be a step "
                "ahead of others; load a checkpoint (trainer.load), or make the model and the trainer again"
            )
            self._snapshot, self.phase = None, Phase(Stage.STEPPED, self.phase.num_steps)
            raise

    def _gather(self) -> None:
        if isinstance(self.model, ShardedUpdate):
            with recorder().span(EventKind.COLLECTIVE, name="all-gather"):
                self.model.gather()

    def _backward(self, chunks: Sequence[Batch]) -> Tally:
        """Leaves the gradients of the global sum over the divisor; the true weight is known only afterwards."""
        tally, loss_fn = Tally(self.device), self.watched_loss
        if (pipeline := self.layout.pipeline) is not None:
            for chunk in chunks:
                pipeline.backward(chunk, loss_fn, self._divisor / self.layout.dp, tally, self._stand_in)
            pipeline.reduce(self.layout.plan.bucket_mb)
            return tally
        for index, chunk in enumerate(chunks):
            with self._reduction(last=index == len(chunks) - 1):
                if chunk.num_samples == 0 and self.layout.group is not None:
                    joined_backward(self.model, loss_fn, self._stand_in.of(chunk), self.layout.usage)
                    continue
                with recorder().span(EventKind.FORWARD, 0, index):
                    loss = compute_loss(self.model, loss_fn, chunk)
                if self.layout.usage is not None:
                    self.layout.usage.watch()
                if not loss.value.requires_grad:
                    raise UsageError(
                        "the loss has no gradient: it was detached, computed under no_grad, or of nothing that trains; "
                        "return it as the model's output gives it"
                    )
                # DDP and FSDP take the mean over ranks
                explained = shard.explained() if self.layout.shards else contextlib.nullcontext()
                with explained, recorder().span(EventKind.BACKWARD, 0, index):
                    loss.over(self._divisor / self.layout.dp).backward()  # type: ignore[no-untyped-call]
            tally.add(loss)
        return tally

    @property
    def watched_loss(self) -> LossFn | None:
        """The loss function; with tp it raises where it reads what this rank has a part of."""
        if self.layout.tensor is None:
            return self.loss_fn
        return reading_wholes(self.loss_fn, self.model, {*self.layout.cuts, *self._spread.partial_names})

    def _reduction(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        # FSDP reduces with every chunk: gradients that wait for the last one would be whole ones
        if last or not isinstance(self.model, Replica):
            return contextlib.nullcontext()
        return self.model.no_sync()

    def _settle(self, tally: Tally) -> Settled:
        """What all ranks end this step by: the one place where they wait for each other."""
        measured = self.grad_clip is not None or self.scaling is not None
        squares = self._spread.square_sum() if measured else 0.0
        marks = self.layout.usage.take() if self.layout.usage is not None else ()
        used = self._divisor
        with recorder().span(EventKind.COLLECTIVE, name="all-reduce of the loss"):
            everyone, copies = self.layout.everyone, self.layout.plan.tp
            totals = tally.reduce(
                everyone, used, self.phase.step, squares, marks, copies=copies, trainer=self.number, rate=self._rate
            )
        if not totals.agreed:  # one that only some ranks took over would scale gradients wrongly
            self.reference = 1.0
            self.scaling = None if self.scaling is None else Scaling()
        totals.require_meaning()
        norm, scaling = None, self.scaling
        factor = used / totals.weight
        skipped = scaling is not None and not math.isfinite(totals.square_sum)
        if self.grad_clip is not None:
            norm = math.sqrt(totals.square_sum) * factor
            if not skipped:
                self._require_finite(norm)
                factor *= gradients.clip_factor(norm, self.grad_clip)
        if scaling is not None:
            scaling = scaling.after(skipped)
        return Settled(totals.mean, factor, totals.weight, norm, totals.marks, skipped, scaling)

    @property
    def _rate(self) -> float:
        """What learning rates have in common on all ranks; the stages of a pipeline may have groups of their own."""
        if self.layout.stages is not None:
            return 0.0
        rates = (group.get("lr") for group in self.optimizer.param_groups)
        return sum(float(rate) for rate in rates if isinstance(rate, int | float | torch.Tensor))

    @property
    def _divisor(self) -> float:
        """What the global loss sum is divided by before backward."""
        if self.scaling is None:
            return self.reference
        # times the ranks, over which DDP and FSDP take the mean: backward then has one device's numbers, and overflows
        # where it does
        return self.reference * self.layout.dp / self.scaling.scale

    def _require_finite(self, norm: float) -> None:
        if math.isfinite(norm):
            return
        model = self.model
        named = model.named_pieces() if isinstance(model, ShardedUpdate) else model.named_parameters()
        names: list[str] = gradients.not_finite(named)
        if self.layout.everyone is not None:
            known = _union(names, self.layout.everyone)
            names = [name for name in self.layout.all_names(model) if name in known]
        raise GradientError(
            f"the gradient norm is {norm} at step {self.phase.step}, from {_some(names)}; the weights are those of "
            "the step before: look at the batch, or lower the learning rate"
        )

    def _recover(self, problem: BaseException) -> None:
        """After an exception: as if the step had not begun, unless another rank may have ended it."""
        if self.mixed:
            live.doubt()
            return
        cut_off = isinstance(problem, (KeyboardInterrupt, RuntimeError)) and not isinstance(problem, NbtrainError)
        if self.phase.stage is Stage.READY and cut_off and self.layout.everyone is not None:
            live.doubt()
            return  # the gradients are final: `agree` or the next step tells what becomes of them
        if self.layout.pipeline is not None:
            self.layout.pipeline.recover()
        if isinstance(self.model, Replica):
            self.model.unwrap()
        elif self.layout.shards:
            shard.recover(self.model)
        self._drop()

    def _drop(self) -> None:
        """Take back what the step that is under way has changed; without one, nothing."""
        if self.phase.stage is Stage.STEPPED:
            return
        gradients.drop(self.parameters)
        if self.layout.usage is not None:
            self.layout.usage.take()
        if self._snapshot is not None:
            self._snapshot.restore()
        self.phase = Phase(Stage.STEPPED, self.phase.num_steps)

    def changes(self) -> str:
        """Why the trainer does not fit its model any more; "" where it does."""
        if self.layout.shards:
            shard.reshard(self.model)  # behind a forward outside of a step FSDP has other parameters in their place
        now = self._signature()
        if len(now) == len(self._laid_out) and all(
            parameter is before and trains == trained
            for (parameter, trains), (before, trained) in zip(now, self._laid_out, strict=True)
        ):
            return ""
        return (
            "parameters were added, removed, replaced, frozen or unfrozen after the trainer was made, and it does not "
            "train them; make the model again and a new Trainer of it"
        )

    def _signature(self) -> list[tuple[nn.Parameter, bool]]:
        """The parameters, and whether each trains."""
        return [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]

    @property
    def device(self) -> torch.device:
        """That the model computes on; its parameters may be kept elsewhere."""
        return mesh.device_of(self.layout.mesh) or self.parameters[0].device


@dataclass(frozen=True)
class Settled:
    """What a step ends by, the same on every rank.

    Attributes:
        mean: The global mean loss.
        factor: What gradients are multiplied by: the weight, the clipping, and the loss scale taken back.
        reference: The global weight, which the next step most likely has too.
        grad_norm: Before clipping; None without.
        marks: For each parameter, how many ranks reached it.
        skipped: Whether the optimizer does not step, since fp16 gradients are not finite on some rank.
        scaling: Of the next loss.
    """

    mean: float
    factor: float
    reference: float
    grad_norm: float | None
    marks: list[float]
    skipped: bool = False
    scaling: Scaling | None = None


Standing = tuple[Phase, Settled | None, bool]


def _union(names: list[str], group: dist.ProcessGroup) -> set[str]:
    lists: list[list[str]] = [[]] * group.size()
    dist.all_gather_object(lists, names, group=group)
    return {name for part in lists for name in part}


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3]) or "their sum"
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
