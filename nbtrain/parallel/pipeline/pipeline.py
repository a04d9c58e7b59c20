"""`Pipeline`: a step of a model that is split into stages.

::

    batch -> microbatches                     the same on all pipeline ranks; each stage takes what its code reads
    schedule                                  forwards and backwards of this rank's stages, messages in between
    sum gradients of shared parameters        over the stages that hold them
    reduce                                    over data-parallel ranks, once a step
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from nbtrain.errors import ModelError, UsageError
from nbtrain.parallel.batch import Batch
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.loss import Loss, LossFn, compute_loss, run_model
from nbtrain.parallel.messages import Messages
from nbtrain.parallel.pipeline import reduction
from nbtrain.parallel.pipeline.flow import KEPT_SHAPES, Blanks, Flow, as_loss
from nbtrain.parallel.pipeline.partition import Partition
from nbtrain.parallel.pipeline.passage import Microbatch, Passage, passages
from nbtrain.parallel.pipeline.rehearsal import Rehearsal
from nbtrain.parallel.pipeline.runtime import Runtime
from nbtrain.parallel.pipeline.score import Score
from nbtrain.parallel.pipeline.skeleton import Skeleton
from nbtrain.parallel.pipeline.stage import Stage
from nbtrain.parallel.pipeline.ties import Ties
from nbtrain.parallel.pipeline.twins import Twins
from nbtrain.parallel.pipeline.usage import StageUsage
from nbtrain.parallel.totals import Tally
from nbtrain.parallel.uneven import StandIn, silent, uncounted, zeroed
from nbtrain.parallel.usage import leaves
from nbtrain.plan import Plan
from nbtrain.plan.pipeline import num_microbatches
from nbtrain.planner.schedule import Schedule
from nbtrain.planner.schedules import forward_only, make_schedule

Finish = Callable[[Loss, bool], torch.Tensor | None]
"""From a loss, and whether its samples are a stand-in, to what backward begins with."""


class Pipeline:
    """One model on one rank.

    Args:
        model: Holds this rank's stages.
        layout: Of the model.
        units: Of the whole model, by name.
        partition: Of them into stages.
        twins: Of the units.
        device: Where the model computes.
        input_dtype: What FSDP casts the model's inputs to; None leaves them.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        units: dict[str, nn.Module],
        partition: Partition,
        twins: Twins,
        device: torch.device,
        input_dtype: torch.dtype | None = None,
    ) -> None:
        self._model, self._layout = model, layout
        self._units, self.partition, self._twins = units, partition, twins
        self._device, self._input_dtype = device, input_dtype
        self._blanks, self._skeleton = Blanks(device), Skeleton(model, units)
        self._passages: dict[Any, list[Passage]] = {}
        self._runtimes: dict[tuple[bool, int], Runtime] = {}
        self._modes: tuple[bool, ...] = ()
        self._kind = repr((layout.plan, partition.begins))  # by which pipelines of one group are told apart
        self._begun = 0
        self._is_real = False  # whether any microbatch of the step had a sample
        self.ties = Ties([])
        self.usage: StageUsage | None = None

    # a step

    def backward(self, chunk: Batch, loss_fn: LossFn | None, divisor: float, tally: Tally, stand_in: StandIn) -> None:
        """Forward and backward of one accumulation chunk; adds to gradients, and on the last stage to ``tally``."""
        messages = Messages(self._group)
        if self._begun == 0:
            reduction.hold_back(self._model, self._layout)
        finish = functools.partial(_rooted, divisor, tally)
        microbatches = self._cut(chunk, num_microbatches(self._layout.plan), loss_fn, stand_in, finish, self._begun)
        self._begun += len(microbatches)
        self._is_real |= chunk.num_samples > 0
        self._run(microbatches, messages, backward=True)

    def reduce(self, bucket_mb: float | None) -> None:
        """Behind the last chunk: the gradients become those of the step. Collective."""
        if self.usage is not None and self._is_real:
            self.usage.note(reduction.found_gradients(self._model, self._layout, self.usage.parameters))
        self._begun, self._is_real = 0, False
        if not self._layout.shards:
            self.ties.sum_gradients(self._group)
        reduction.reduce(self._model, self._layout, bucket_mb)
        if self._layout.shards:
            self.ties.sum_gradients(self._group)

    def evaluate(self, batch: Batch, loss_fn: LossFn | None, tally: Tally, stand_in: StandIn) -> None:
        """Adds the losses of a batch to ``tally`` on the last stage. No gradients."""
        messages = Messages(self._group)
        finish = functools.partial(_added, tally)
        self._run(self._cut(batch, self._layout.plan.pp, loss_fn, stand_in, finish), messages, backward=False)

    def recover(self) -> None:
        """After an exception: nothing of a schedule that did not end is left."""
        self._begun, self._is_real = 0, False
        self._runtimes.clear()

    def regroup(self) -> None:
        """Groups were formed again."""
        vars(self).pop("_group", None)
        self.recover()

    def _run(self, microbatches: Sequence[Microbatch], messages: Messages, *, backward: bool) -> None:
        runtime = self._runtime(backward, len(microbatches))
        for stage in runtime.held:
            stage.begin(microbatches, messages, self._kind, backward=backward)
        try:
            runtime.run()
        except BaseException:
            self.recover()
            raise
        messages.end()
        for stage in runtime.held:
            stage.clear_runtime_states()

    # microbatches

    def _cut(
        self, batch: Batch, count: int, loss_fn: LossFn | None, stand_in: StandIn, finish: Finish, first: int = 0
    ) -> list[Microbatch]:
        """``count`` microbatches, of which ``first`` is the first one's number in the step."""
        self._modes = tuple(module.training for module in self._model.modules())
        parts = batch.chunks(count, uneven=True)
        return [self._microbatch(part, loss_fn, first + number, stand_in, finish) for number, part in enumerate(parts)]

    def _microbatch(
        self, part: Batch, loss_fn: LossFn | None, index: int, stand_in: StandIn, finish: Finish
    ) -> Microbatch:
        is_empty = part.num_samples == 0
        batch = stand_in.of(part) if is_empty else part
        watched = functools.partial(self._uncounted, self._model) if is_empty else contextlib.nullcontext

        found = self._passages_of(batch, loss_fn)

        def forward(flow: Flow) -> torch.Tensor | None:
            root = self._counted_once(flow, again=flow.first != found[self._first].first)
            own = batch.cloned() if found[0].score.writes_inputs else batch
            if not flow.is_last:
                run_model(root, loss_fn, own)
                return None
            return finish(compute_loss(root, None if loss_fn is None else as_loss(loss_fn), own), is_empty)

        # what is computed again in backward would be so twice, or not at all where it is selective; compiled code has
        # one backward for both
        whole = is_empty or self._layout.plan.recompute != "none" or bool(self._layout.compile)
        return Microbatch(found, index, forward, watched, whole_backward=whole)

    def _counted_once(self, flow: Flow, *, again: bool) -> Callable[..., Any]:
        """The model's forward in ``flow``; what its own code counts, it counts on the first stage of a rank only."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._skeleton.unchanged() if again and self._skeleton.counts else contextlib.nullcontext():
                return flow.run(self._model, *args, **kwargs)

        return run

    @functools.cached_property
    def _first(self) -> int:
        """The first stage of this rank."""
        return self.partition.stages_of(self._group.rank())[0]

    @staticmethod
    @contextlib.contextmanager
    def _uncounted(model: nn.Module) -> Iterator[None]:
        with uncounted(model, None), zeroed(leaves(model)):
            yield

    def _passages_of(self, batch: Batch, loss_fn: LossFn | None) -> list[Passage]:
        key = _signature(batch), self._modes
        if key not in self._passages:
            score = self._rehearsed(batch, loss_fn)
            try:
                starts = score.starts(self.partition.begins)
            except LookupError as problem:
                raise ModelError(
                    f"'{problem.args[0]}' begins a stage and is not called, or called earlier, for this batch; type "
                    "pp=1, or name other modules in split=[...]"
                ) from problem
            self._require_held(found := passages(score, starts))
            if len(self._passages) >= KEPT_SHAPES:
                self._passages.clear()
            self._passages[key] = found
        return self._passages[key]

    def _rehearsed(self, batch: Batch, loss_fn: LossFn | None) -> Score:
        def forward(given: Any) -> Any:
            return run_model(self._forward, loss_fn, Batch(given[0], given[1], batch.num_samples))

        rehearsal = Rehearsal(self._twins, self._units, self._skeleton, self._device)
        return rehearsal.run(self._model, forward, (batch.positional, dict(batch.named)))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward without hooks."""
        if self._input_dtype is not None:
            args, kwargs = tree_map(self._cast, (args, kwargs))
        return self._model.forward(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self._input_dtype) if is_float else value

    def _require_held(self, found: list[Passage]) -> None:
        for stage, passage in enumerate(found):
            missing = [name for name in self._needed(passage) if not self._holds(stage, name)]
            if missing:
                raise ModelError(
                    f"stage {stage} needs '{missing[0]}', which it does not hold: the model was split by a forward on "
                    "a probe, which called other modules; give one like the batches: nt.Trainer(..., probe=...)"
                )

    @staticmethod
    def _needed(passage: Passage) -> Iterator[str]:
        """Units that a stage calls, and parameters that code around them reads."""
        for call in passage.score.calls[passage.first : passage.end]:
            yield call.unit
            yield from call.parameters
        if passage.end == len(passage.score.calls):
            yield from passage.score.parameters

    def _holds(self, stage: int, name: str) -> bool:
        parts = self.partition.units[stage] | self.partition.parameters[stage]
        return any(name == part or name.startswith(f"{part}.") for part in parts)

    # the schedule

    @functools.cached_property
    def _group(self) -> dist.ProcessGroup:
        assert self._layout.mesh is not None, "stages are on ranks"
        return self._layout.mesh.get_group("pp")

    def schedule(self) -> Schedule:
        """Of a step."""
        return schedule_of(self._layout.plan, None)

    def _runtime(self, backward: bool, count: int) -> Runtime:
        key = backward, count
        if key not in self._runtimes:
            schedule = schedule_of(self._layout.plan, count if backward else None)
            schedule = schedule if backward else forward_only(schedule, count)
            stages = [self._stage(index) for index in self.partition.stages_of(self._group.rank())]
            self._runtimes[key] = Runtime(stages, schedule)
        return self._runtimes[key]

    def _stage(self, index: int) -> Stage:
        parameters = functools.partial(_trained, list(self._slots(index)))
        settle = functools.partial(reduction.settle_weights, self._model, self._layout)
        num_stages, draws = self.partition.num_stages, self._layout.draws
        return Stage(index, num_stages, self._device, self._group, parameters, settle, self._units, self._blanks, draws)

    def _slots(self, stage: int) -> Iterator[tuple[nn.Module, str]]:
        for name in sorted(self.partition.units[stage]):
            for module in self._units[name].modules():
                yield from ((module, key) for key in module._parameters)
        for name in sorted(self.partition.parameters[stage]):
            prefix, _, key = name.rpartition(".")
            yield self._model.get_submodule(prefix), key


def _trained(slots: list[tuple[nn.Module, str]]) -> list[nn.Parameter]:
    """What backward leaves gradients in, as it is now: FSDP puts gathered parameters in their places."""
    found = (module._parameters[key] for module, key in slots)
    return list({id(one): one for one in found if one is not None and one.requires_grad}.values())


def schedule_of(plan: Plan, count: int | None) -> Schedule:
    """The schedule of a plan with that many microbatches; None takes the plan's number."""
    return make_schedule(plan.schedule, plan.pp, count or num_microbatches(plan), plan.num_virtual_stages)


def _rooted(divisor: float, tally: Tally, loss: Loss, is_empty: bool) -> torch.Tensor | None:
    """Adds the loss at once: kept to the end of the schedule it would keep its microbatch's inputs, too."""
    if is_empty:
        return silent(loss.value)
    if not loss.value.requires_grad and float(loss.weight) == 0:
        tally.add(loss)
        return None  # nothing of it counts
    if not loss.value.requires_grad:
        raise UsageError(
            "the loss has no gradient: it was detached, computed under no_grad, or of nothing that trains; return it "
            "as the model's output gives it"
        )
    tally.add(loss)
    return loss.over(divisor)


def _added(tally: Tally, loss: Loss, is_empty: bool) -> None:
    if not is_empty:
        tally.add(loss)


def _signature(batch: Batch) -> Any:
    """What the shapes in a forward depend on."""
    leaves, form = tree_flatten((batch.positional, dict(batch.named)))
    shapes = tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
    return str(form), shapes
