"""The mechanics of a training step: all ranks take it, or none does.

::

    forward, backward of each chunk     gradients of sum / reference, reduced by DDP or FSDP
    reduce totals                       loss sum, weight, norm, used parameters: the one place where ranks wait
    scale, clip                         by reference / weight
    optimizer, scheduler                not interruptible
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nbtrain.errors import GradientError
from nbtrain.parallel import gradients, shard
from nbtrain.parallel.batch import Batch
from nbtrain.parallel.interrupt import uninterrupted
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.loss import LossFn, compute_loss
from nbtrain.parallel.phase import Phase, Stage
from nbtrain.parallel.replicate import Replica
from nbtrain.parallel.totals import Tally, Totals


@dataclass
class Stepper:
    """What a step needs, and what it leaves.

    Attributes:
        model: Laid out by ``layout``.
        parameters: Those that train.
        scheduler: Has ``step()``, or None.
        phase: How far this rank is.
        grad_norm: Global norm of the last step before clipping; None without ``grad_clip``.
        reference: Global weight of the last step: what the next one most likely has. 1.0 before the first.
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
    reference: float = 1.0

    def step(self, whole: Batch, accumulate: int) -> float:
        """The global mean loss. Whatever raises, the weights stay and the next step starts afresh."""
        chunks = whole.chunks(accumulate)
        step = self.phase.num_steps + 1
        self.phase = Phase(Stage.COMPUTING, step)
        try:
            gradients.drop(self.parameters)
            if self.layout.group is None:
                self.reference = float(whole.num_samples or 1)
            tally = self._backward(chunks)
            self.phase = Phase(Stage.READY, step)
            totals, factor = self._reduce(tally)
            with uninterrupted():
                gradients.scale(self.parameters, factor)
                self.optimizer.step()
                self.phase = Phase(Stage.STEPPED, step)
                if self.scheduler is not None:
                    self.scheduler.step()
        except BaseException:
            self._recover()
            raise
        return totals.mean

    def _backward(self, chunks: Sequence[Batch]) -> Tally:
        """Leaves the gradients of the global sum over the reference; the true weight is known only afterwards."""
        tally = Tally(self.parameters[0].device)
        for index, chunk in enumerate(chunks):
            with self._reduction(last=index == len(chunks) - 1):
                loss = compute_loss(self.model, self.loss_fn, chunk)
                if self.layout.usage is not None:
                    self.layout.usage.watch()
                # DDP and FSDP take the mean over ranks
                loss.over(self.reference / self.layout.dp).backward()  # type: ignore[no-untyped-call]
            tally.add(loss)
        return tally

    def _reduction(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        # FSDP reduces with every chunk: gradients that wait for the last one would be whole ones
        if last or not isinstance(self.model, Replica):
            return contextlib.nullcontext()
        return self.model.no_sync()

    def _reduce(self, tally: Tally) -> tuple[Totals, float]:
        """The totals of all ranks, and what gradients must still be multiplied by."""
        squares = gradients.square_sum(self.parameters) if self.grad_clip is not None else 0.0
        usage = self.layout.usage
        marks = usage.take() if usage is not None else ()
        totals = tally.reduce(self.layout.group, self.reference, squares, marks)
        # one that only some ranks took over would scale gradients wrongly: ranks compare it in each reduction
        used, self.reference = self.reference, totals.weight if totals.agreed and totals.weight else 1.0
        totals.require_meaning()
        if usage is not None:
            usage.clear_unused(totals.marks)
        return totals, self._clip(totals, used / totals.weight)

    def _clip(self, totals: Totals, factor: float) -> float:
        if self.grad_clip is None:
            return factor
        self.grad_norm = math.sqrt(totals.square_sum / self._copies) * factor
        self._require_finite(self.grad_norm)
        return factor * gradients.clip_factor(self.grad_norm, self.grad_clip)

    @property
    def _copies(self) -> int:
        """How many ranks hold the same part of a gradient."""
        return self.layout.plan.dp_replicate if self.layout.shards else self.layout.dp

    def _require_finite(self, norm: float) -> None:
        if math.isfinite(norm):
            return
        names: list[str] = gradients.not_finite(self.model)
        if self.layout.group is not None:
            names = _union(names, self.layout.group)
        raise GradientError(
            f"the gradient norm is {norm} at step {self.phase.step}, from {_some(names)}; the weights are those of "
            "the step before: look at the batch, or lower the learning rate"
        )

    def _recover(self) -> None:
        gradients.drop(self.parameters)
        if isinstance(self.model, Replica):
            self.model.rewrap()
        elif self.layout.shards:
            shard.recover(self.model)
        if self.layout.usage is not None:
            self.layout.usage.take()
        self.phase = Phase(Stage.STEPPED, self.phase.num_steps)


def _union(names: list[str], group: dist.ProcessGroup) -> list[str]:
    lists: list[list[str]] = [[]] * group.size()
    dist.all_gather_object(lists, names, group=group)
    return list(dict.fromkeys(name for part in lists for name in part))


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3]) or "their sum"
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
