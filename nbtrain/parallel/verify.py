"""`verify`: a plan against one device, on a tiny batch, before a long run."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only

from nbtrain.errors import BatchError, UsageError
from nbtrain.parallel import mesh as meshes
from nbtrain.parallel.batch import Batch, target_names
from nbtrain.parallel.broadcast import broadcast_weights
from nbtrain.parallel.causes import likely_cause
from nbtrain.parallel.cell import plan_or_default, require_all_ranks, require_plan
from nbtrain.parallel.comparison import merged, rows_of
from nbtrain.parallel.deferred import Deferred
from nbtrain.parallel.loss import LossFn, compute_loss
from nbtrain.parallel.materialise import materialise_buffers, materialise_shards
from nbtrain.parallel.optimizer import MakeOptimizer
from nbtrain.parallel.precision import DTYPES
from nbtrain.parallel.report import Report, Row
from nbtrain.parallel.state import full_gradients
from nbtrain.parallel.trainer import Trainer
from nbtrain.parallel.traits import DroppingNothing, traits_of, without_dropout
from nbtrain.plan import Plan

MakeModel = Callable[[], nn.Module]

# Relative to the largest element of a tensor, and grows with each step. fp32 rounds by 2^-24 = 6e-8, and sums over
# ranks are taken in another order: a few hundred roundings. bf16 rounds by 2^-9 = 2e-3 and fp16 by 2^-11 = 5e-4: some
# dozens in a row, since a layout may also choose which layers are computed in it.
_RELATIVE = {"fp32": 3e-5, "bf16": 1e-1, "fp16": 3e-2}
_LOSS = 2e-2
"""Of the loss in 16 bits: a mean over many, in which roundings cancel."""


def verify(
    make_model: MakeModel,
    plan: Plan | None,
    batch: Any,
    steps: int = 3,
    *,
    loss_fn: LossFn | None = None,
    optimizer: MakeOptimizer | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    grad_clip: float | None = None,
    accumulate: int = 1,
) -> Report:
    """Trains a model by ``plan`` and on one device, and compares loss by loss and tensor by tensor.

    Collective. Each rank computes the whole batch as one device, in plain torch, and its share of it by the plan; what
    any rank finds is in the report of all. Dropout is off in both, since its masks differ between layouts. With
    ``accumulate`` one device takes the batch at once, but where norms keep statistics of the chunks.

    Args:
        make_model: Called twice on each rank after ``torch.manual_seed``, on rank 0 with ``seed``; the weights that
            other ranks draw must not count, so they draw others. It may use `meta_init`.
        plan: As for `Trainer`.
        batch: The global batch, the same on all ranks: ``(inputs, *targets)`` or a dict, as for `Trainer.step`.
        steps: Optimizer steps.
        loss_fn: As for `Trainer`. None: the model's own loss; if it has none, cross entropy where the targets are
            integers, mean squared error where they are not.
        optimizer: Called with the parameters of each; None is SGD with lr=0.1 and momentum=0.9. Adam is a poor judge:
            it divides gradients that are 0 but for rounding by themselves.
        seed: Of the weights.
        tolerance: Error that is allowed, relative to the largest element of a tensor; None takes what rounding in the
            plan's precision explains.
        grad_clip: As for `Trainer`.
        accumulate: As for `Trainer`.

    Raises:
        BatchError: The batch differs between ranks, or has fewer samples than the plan has data-parallel ranks.
        PlanError, ModelError, NotImplementedError: As `Trainer`: the plan does not run.
    """
    _check_arguments(make_model, optimizer, steps)
    require_all_ranks("verify")
    whole = _batch(batch)
    _check_same(whole)
    plan = plan_or_default(plan)
    require_plan(plan)
    plan = plan.resolve(meshes.world_size())
    if whole.num_samples < plan.dp * accumulate:
        raise BatchError(
            f"the batch has {whole.num_samples} samples for {plan.dp} data-parallel ranks and accumulate={accumulate}; "
            f"give at least {plan.dp * accumulate}"
        )
    make = optimizer or (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    planned, quiet = _build(make_model, seed + meshes.rank())
    loss_fn = loss_fn or _default_loss(planned, whole)
    options = {"grad_clip": grad_clip, "accumulate": accumulate, "probe": _inputs(whole, loss_fn)}
    trainer = Trainer(planned, plan, optimizer=make, loss_fn=loss_fn, **options)
    single = _OneDevice.of(make_model, seed, make, loss_fn, trainer, grad_clip)
    relative = tolerance or _RELATIVE.get(plan.precision, 1e-1)
    with DroppingNothing() as dropping:
        rows = list(_compare(single, trainer, whole, steps, accumulate, relative))
    quiet += sorted(dropping.found)
    return _report(merged(rows), trainer.plan, steps, single, quiet)


def _inputs(batch: Batch, loss_fn: LossFn | None) -> Any:
    """What the model's forward takes of ``batch``."""
    if loss_fn is None:
        return dict(batch.named) if batch.named else batch.positional
    targets = target_names(loss_fn) if batch.named else ()
    return {name: value for name, value in batch.named.items() if name not in targets} or batch.positional[0]


@dataclass
class _OneDevice:
    """The same training in plain torch.

    Attributes:
        draws: Whether its forward has drawn random numbers.
        updated: Buffers that its forward has changed, but for those of norms.
    """

    model: nn.Module
    optimizer: Optimizer
    loss_fn: LossFn | None
    dtype: torch.dtype | None
    grad_clip: float | None
    device: torch.device
    draws: bool = False
    updated: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        make_model: MakeModel,
        seed: int,
        make: MakeOptimizer,
        loss_fn: LossFn | None,
        like: Trainer,
        grad_clip: float | None,
    ) -> _OneDevice:
        device = next(like.model.parameters()).device
        model, _ = _build(make_model, seed)
        _materialise(model, device)
        model.to(device).train()
        if meshes.world_size() > 1:
            broadcast_weights(model, dist.group.WORLD)  # type: ignore[arg-type]
        optimizer = make([parameter for parameter in model.parameters() if parameter.requires_grad])
        return cls(model, optimizer, loss_fn, DTYPES.get(like.plan.precision), grad_clip, device)

    def step(self, chunks: list[Batch]) -> float:
        """The mean loss of all chunks."""
        self.model.zero_grad()  # the optimizer may hold some of the parameters only
        samples = float(sum(chunk.num_samples for chunk in chunks))
        before, buffers = torch.get_rng_state(), dict(_own_buffers(self.model))
        losses = []
        for chunk in chunks:
            losses.append(compute_loss(self._forward, self.loss_fn, chunk.to(self.device)))
            losses[-1].over(samples).backward()  # type: ignore[no-untyped-call]
        self.draws |= not torch.equal(before, torch.get_rng_state())
        self.updated |= {name for name, now in _own_buffers(self.model) if not _equal(buffers.get(name), now)}
        weight = float(sum(loss.weight for loss in losses))
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= samples / weight
        if self.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        self.optimizer.step()
        return float(sum(loss.sum for loss in losses)) / weight

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.dtype is None:
            return self.model(*args, **kwargs)
        with torch.autocast(self.device.type, self.dtype):
            output = self.model(*args, **kwargs)
        return tree_map_only(
            torch.Tensor, lambda tensor: tensor.float() if tensor.dtype == self.dtype else tensor, output
        )


def _compare(
    single: _OneDevice, trainer: Trainer, batch: Batch, steps: int, accumulate: int, relative: float
) -> Iterator[Row]:
    share = batch.chunks(trainer.plan.dp)[meshes.data_coordinate(trainer.plan, meshes.rank())]
    chunks = _chunks_of_one_device(single.model, batch, trainer.plan.dp, accumulate)
    parameters = dict(single.model.named_parameters())
    # weights are fp32 before the first step, whatever the plan computes in
    yield from rows_of("weights", 0, single.model.state_dict(), trainer.state_dict(), min(relative, _RELATIVE["fp32"]))
    for step in range(1, steps + 1):
        allowed = relative * step
        expected = single.step(chunks)
        loss = float(trainer.step(*share.positional, **share.named))
        of_loss = min(allowed, _LOSS * step) if relative > _LOSS else allowed
        yield from rows_of("loss", step, {"": torch.tensor(expected)}, {"": torch.tensor(loss)}, of_loss)
        gradients = {name: parameter.grad for name, parameter in parameters.items()}
        yield from rows_of("gradient", step, gradients, full_gradients(trainer.model, trainer._stepper.layout), allowed)
        before, after = single.model.state_dict(), trainer.state_dict()
        yield from rows_of("parameter", step, _only(before, list(parameters)), after, allowed)
        buffers = [name for name, _ in single.model.named_buffers() if name in before]
        yield from rows_of("buffer", step, _only(before, buffers), after, allowed)


def _chunks_of_one_device(model: nn.Module, batch: Batch, dp: int, accumulate: int) -> list[Batch]:
    """The whole batch at once; where statistics are of chunks, the same chunks that the ranks take together."""
    if accumulate == 1 or not any(isinstance(module, _NormBase) for module in model.modules()):
        return [batch]
    by_rank = [share.chunks(accumulate) for share in batch.chunks(dp)]
    return [batch.joined(chunks) for chunks in zip(*by_rank, strict=True)]


def _own_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of those that are no statistics of norms."""
    for prefix, module in model.named_modules():
        if not isinstance(module, _NormBase):
            for name, buffer in module.named_buffers(prefix, recurse=False):
                yield name, buffer.clone()


def _equal(before: torch.Tensor | None, now: torch.Tensor) -> bool:
    return before is not None and before.shape == now.shape and bool(((before == now) | (now != now)).all())


def _only(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: state[name] for name in names}


def _report(rows: tuple[Row, ...], plan: Plan, steps: int, single: _OneDevice, quiet: list[str]) -> Report:
    traits = traits_of(single.model)
    notes = [f"dropout was off in {_told(quiet)}: masks differ between layouts"] if quiet else []
    if single.draws:
        notes.append("the model draws random numbers in its forward, which differ between layouts")
    size = meshes.world_size()
    cause = likely_cause(rows, plan, size, traits, draws=single.draws, updated=single.updated)
    return Report(plan, size, steps, rows, tuple(notes), traits, cause)


def _told(quiet: list[str]) -> str:
    functions = [name for name in quiet if name.startswith("F.")]
    count = len(quiet) - len(functions)
    return " and ".join([f"{count} module{'s' * (count > 1)}"] * bool(count) + functions)


def _build(make_model: MakeModel, seed: int) -> tuple[nn.Module, list[str]]:
    """A model from ``seed``, and the names of its modules in which dropout was turned off."""
    with _fork_random():
        torch.manual_seed(seed)
        model = make_model()
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"make_model returned {type(model).__name__}, not an nn.Module; type nt.verify(lambda: GPT(), ...)"
        )
    return model, without_dropout(model)


def _fork_random() -> contextlib.AbstractContextManager[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    return torch.random.fork_rng(devices=devices)


def _materialise(model: nn.Module, device: torch.device) -> None:
    deferred = Deferred(model)
    materialise_buffers(model, deferred, device)
    materialise_shards(model, deferred, device)


def _default_loss(model: nn.Module, batch: Batch) -> LossFn | None:
    """None where the model takes the targets itself."""
    if len(batch.positional) < 2 or _takes(model, len(batch.positional)):
        return None
    target = batch.positional[1]
    return F.mse_loss if isinstance(target, torch.Tensor) and target.is_floating_point() else _cross_entropy


def _takes(model: nn.Module, count: int) -> bool:
    try:
        inspect.signature(model.forward).bind(*range(count))
    except TypeError:
        return False
    return True


def _cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Over the last dim where the others are those of the targets (tokens), else over dim 1, as torch has it."""
    if output.shape[:-1] == target.shape:
        return F.cross_entropy(output.flatten(0, -2), target.flatten())
    return F.cross_entropy(output, target)


def _batch(batch: Any) -> Batch:
    if isinstance(batch, Mapping):
        return Batch.of((), dict(batch))
    if isinstance(batch, tuple | list):
        return Batch.of(tuple(batch), {})
    return Batch.of((batch,), {})


def _check_same(batch: Batch) -> None:
    """Raises where ranks were given different batches. Collective."""
    if meshes.world_size() == 1:
        return
    digests: list[str] = [""] * meshes.world_size()
    dist.all_gather_object(digests, _digest(batch))
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise BatchError(
            f"the batch of rank {odd[0]} is not that of rank 0; verify takes the global batch, the same on every rank: "
            "type torch.manual_seed(0) before it is made"
        )


def _digest(batch: Batch) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for leaf in tree_flatten((batch.positional, dict(batch.named)))[0]:
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{leaf.shape} {leaf.dtype}".encode())
            digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def _check_arguments(make_model: Any, optimizer: Any, steps: Any) -> None:
    if isinstance(make_model, nn.Module) or not callable(make_model):
        given = type(make_model).__name__
        raise UsageError(
            f"make_model is a {given}; give a function that builds the model: nt.verify(lambda: {given}(...), ...)"
        )
    if optimizer is not None and (isinstance(optimizer, Optimizer) or not callable(optimizer)):
        raise UsageError(
            "optimizer must be a function of the parameters, as two models are trained: lambda params: ..."
        )
    if not isinstance(steps, int) or steps < 1:
        raise UsageError(f"steps={steps!r} must be an integer of at least 1, e.g. steps=3")
