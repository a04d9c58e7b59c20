"""Holds a plan against one device: output, losses, every gradient, every parameter and buffer, elementwise.

One device is a plain torch loop in the same process, written without nbtrain: the whole batch at once, or microbatch
by microbatch where batch normalisation makes that another function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import models
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

import nbtrain as nt
from nbtrain.parallel.mesh import data_coordinate
from nbtrain.parallel.scaler import Scaling
from nbtrain.parallel.state import full_gradients
from nbtrain.parallel.update import ShardedUpdate

SEED = 7
BATCH = 12


@dataclass(frozen=True)
class Tolerance:
    """Absolute, and relative to the largest element of the tensor: small elements of a sum have its rounding error."""

    atol: float
    rtol: float


# fp32 sums over ranks and chunks in another order: some units in the last place of the largest term. Where terms of
# size 1 cancel (the gradient of a bias before a batch normalisation is 0), that is all there is.
FP32 = Tolerance(atol=1e-5, rtol=2e-5)
# bf16 has 8 bits: one rounding is 2^-9 of a value. A dozen layers of them accumulate in a gradient, and batch
# normalisation over 12 samples magnifies them.
BF16 = Tolerance(atol=2e-2, rtol=1.5e-1)
# fp16 has 11 bits: 2^-12 a rounding, an eighth of bf16's
FP16 = Tolerance(atol=2.5e-3, rtol=2e-2)
# The same computation on both sides, but that the first step's loss is scaled before backward and not after it: other
# roundings of the same size, a few of 2^-9 in a row
SAME_BF16 = Tolerance(atol=4e-3, rtol=2e-2)


@dataclass(frozen=True)
class Run:
    """What a training run is, beside its plan."""

    steps: int = 3
    batch: int | tuple[int, ...] = BATCH  # samples of all ranks together, or of each step
    accumulate: int = 1
    grad_clip: float | None = None
    sizes: tuple[int, ...] | None = None  # of each rank's share; None: equal ones
    autocast: torch.dtype | None = None  # of the one device too
    compile: bool | str = False
    meta: bool = False  # the model is built under nt.meta_init
    loss_scale: float | None = None  # that fp16 begins with; None leaves it
    optimizer: Callable[[Any], torch.optim.Optimizer] = field(
        # not Adam: it divides gradients that are 0 but for rounding by themselves
        default=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)
    )


def check(model: str, spec: str, run: Run, tolerance: Tolerance = FP32) -> None:
    """Runs on every rank; raises where something differs.

    Args:
        model: A name in `models.CASES`.
        spec: Of a plan.
        run: The rest.
        tolerance: Of every comparison.
    """
    try:
        check_case(models.CASES[model], spec, run, tolerance)
    except Exception as error:
        error.add_note(f"{model} with {spec} and {run}")
        raise


def check_case(case: models.Case, spec: str, run: Run, tolerance: Tolerance) -> None:
    """`check` of a model that is at hand."""
    plan = nt.Plan.parse(spec)
    trainer = _trainer(case, plan, run)
    reference = _reference(case, run, trainer)
    layout = trainer._stepper.layout
    optimizer = run.optimizer(reference.parameters())
    if run.autocast is None and plan.pp == 1:  # a stage alone has no output
        _compare("output", _forward(reference, case), _forward(trainer.model, case), tolerance)
    generator = torch.Generator().manual_seed(SEED)
    batches = run.batch if isinstance(run.batch, tuple) else (run.batch,) * run.steps
    for step, num_samples in enumerate(batches):
        batch = case.batch(generator, num_samples)
        expected = _plain_step(reference, optimizer, case, _cut(batch, reference, run, trainer.plan), run)
        part = data_coordinate(trainer.plan, rank())
        positional, named = _arguments(_share(batch, run, part, layout.dp))
        loss = trainer.step(*positional, **named)
        _compare(f"loss {step}", expected, loss, tolerance)
        _compare_gradients(reference, trainer, step, tolerance)
    _compare_states(reference.state_dict(), trainer.state_dict(), tolerance)
    if plan.pp > 1:
        # half a batch: shapes that training has not seen
        batch = case.batch(generator, batches[0] // 2)
        share = _part(batch, layout.dp, data_coordinate(trainer.plan, rank()))
        _compare("evaluation", _plain_evaluation(reference, case, batch), trainer.evaluate([share]), tolerance)


def _reference(case: models.Case, run: Run, trainer: nt.Trainer) -> nn.Module:
    torch.manual_seed(SEED)
    reference = case.make()
    if run.meta:
        # what one device gets is told by the one who draws it; that ranks agree with it is test_meta_init's matter
        reference.load_state_dict(trainer.state_dict())
    return reference


def _trainer(case: models.Case, plan: nt.Plan, run: Run) -> nt.Trainer:
    # other weights on other ranks: rank 0's count
    torch.manual_seed(SEED + rank())
    options: dict[str, Any] = {
        "loss_fn": case.loss_fn,
        "grad_clip": run.grad_clip,
        "accumulate": run.accumulate,
        "compile": run.compile,
    }
    with nt.meta_init(SEED) if run.meta else contextlib.nullcontext():
        model = case.make()
    trainer = nt.Trainer(model, plan, optimizer=run.optimizer, **options)
    if run.loss_scale is not None:
        trainer._stepper.scaling = Scaling(run.loss_scale)
    return trainer


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _forward(model: nn.Module, case: models.Case) -> torch.Tensor:
    """Logits of a batch that is the same on all ranks, in eval mode."""
    batch = case.batch(torch.Generator().manual_seed(SEED + 1), 4)
    model.eval()
    with torch.no_grad():
        if isinstance(batch, dict):
            output = model(**batch)
        else:
            output = model(*batch[0]) if isinstance(batch[0], tuple) else model(batch[0])
    model.train()
    return output if isinstance(output, torch.Tensor) else output.logits


def _plain_evaluation(model: nn.Module, case: models.Case, batch: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        value, weight = _plain_loss(model, case, batch)
    return value / weight


def _plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, case: models.Case, chunks: list[Any], run: Run
) -> torch.Tensor:
    """One step of a plain loop: chunk by chunk, where a chunk is what all ranks compute at a time."""
    optimizer.zero_grad()
    compute = model if run.autocast is None else _autocast(model, run.autocast)
    losses = [_plain_loss(compute, case, chunk) for chunk in chunks]
    total = sum(value for value, _ in losses) / sum(weight for _, weight in losses)
    total.backward()
    if run.grad_clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.grad_clip)
    optimizer.step()
    return total.detach()


def _autocast(model: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype):
            output = model(*args, **kwargs)
        return output.float() if isinstance(output, torch.Tensor) else output

    return compute


def _plain_loss(model: Callable[..., Any], case: models.Case, batch: Any) -> tuple[torch.Tensor, Any]:
    """Sum and weight."""
    size = len(tree_leaves(batch)[0])
    if case.loss_fn is not None:
        inputs = batch[0] if isinstance(batch[0], tuple) else (batch[0],)
        result = case.loss_fn(model(*inputs), *batch[1:])
        return result if isinstance(result, tuple) else (result * size, size)
    output = model(**batch) if isinstance(batch, dict) else model(*batch)
    loss = output[1] if isinstance(output, tuple) else output.loss
    return loss * size, size


def _cut(batch: Any, model: nn.Module, run: Run, plan: nt.Plan) -> list[Any]:
    """The global batch as one device takes it: chunks, and in them microbatches where statistics are of each."""
    counts = [run.accumulate]
    if plan.pp > 1 and any(isinstance(module, _BatchNorm) for module in model.modules()):
        assert plan.num_microbatches is not None, "the case says them"
        counts.append(plan.num_microbatches)
    # each rank cuts its own share
    shares = [_split(_share(batch, run, part, plan.dp), counts) for part in range(plan.dp)]
    return [_join(list(parts)) for parts in zip(*shares, strict=True)]


def _share(batch: Any, run: Run, part: int, dp: int) -> Any:
    """What data-parallel rank ``part`` of ``dp`` gets."""
    sizes = run.sizes or (len(tree_leaves(batch)[0]) // dp,) * dp
    return tree_map(lambda tensor: tensor.split(sizes)[part], batch)


def _split(batch: Any, counts: list[int]) -> list[Any]:
    """Into ``counts[0]`` parts, each of these into ``counts[1]``, and so on."""
    if not counts:
        return [batch]
    parts = [_part(batch, counts[0], index) for index in range(counts[0])]
    return [piece for part in parts for piece in _split(part, counts[1:])]


def _part(batch: Any, count: int, index: int) -> Any:
    return tree_map(lambda tensor: tensor.tensor_split(count)[index], batch)


def _join(batches: list[Any]) -> Any:
    return tree_map(lambda *parts: torch.cat(parts), *batches)


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), batch) if isinstance(batch, dict) else (batch, {})


def show_gradients(trainer: nt.Trainer) -> None:
    """With ``zero=1`` a rank has its pieces of them, until it is asked for more."""
    if isinstance(trainer.model, ShardedUpdate):
        assert all(parameter.grad is None for parameter in trainer.model.parameters())
        trainer.model.gather_gradients()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _compare_gradients(reference: nn.Module, trainer: nt.Trainer, step: int, tolerance: Tolerance) -> None:
    gradients = full_gradients(trainer.model, trainer._stepper.layout)
    assert list(gradients) == [name for name, _ in reference.named_parameters()]
    for name, parameter in reference.named_parameters():
        gradient = gradients[name]
        assert (gradient is None) == (parameter.grad is None), f"gradient of {name} at step {step} is {gradient}"
        if parameter.grad is not None and gradient is not None:
            _compare(f"gradient of {name} at step {step}", parameter.grad, gradient, tolerance)


def _compare_states(expected: dict[str, Any], got: dict[str, Any], tolerance: Tolerance) -> None:
    assert list(expected) == list(got)
    for name, value in expected.items():
        _compare(f"{name} after training", value, got[name], tolerance)


def _compare(what: str, expected: torch.Tensor, got: torch.Tensor, tolerance: Tolerance) -> None:
    assert expected.shape == got.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    expected, got = expected.detach().double(), got.detach().double()
    allowed = tolerance.atol + tolerance.rtol * expected.abs().max().item()
    error = (expected - got).abs().max().item()
    assert error <= allowed, f"{what}: off by {error:.2e}, allowed {allowed:.2e}"
