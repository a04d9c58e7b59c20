"""Reading a loss: as a sum and a weight, so that parts of a batch add up to the whole.

The mean over a global batch is sum / weight over all ranks and chunks. A loss that is a mean counts with the number
of its samples; a loss function that returns ``(sum, count)`` says itself what to divide by, e.g. valid tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from nbtrain.errors import BatchError, ModelError, UsageError
from nbtrain.parallel.batch import Batch, call, target_names
from nbtrain.parallel.denominators import Denominators, watched

LossFn = Callable[..., Any]

IGNORED = -100
"""The class that torch's and Hugging Face's losses leave out."""

_TARGET_NAMES = ("labels", "label", "targets", "target")


@dataclass(frozen=True)
class Loss:
    """The loss of one chunk.

    Attributes:
        value: 0-d, differentiable: a mean, or a sum where ``is_sum``.
        weight: What the chunk counts in the global mean: samples, or the count of the loss function.
        ignored: Of a mean: by how much a sample's targets are more than what the mean divides by, since some are
            ignored, weighted or left out. Where chunks differ in it, no weight by samples is right.
        cure: What to return in the place of such a mean.
    """

    value: torch.Tensor
    weight: float | torch.Tensor
    is_sum: bool
    ignored: float | torch.Tensor = 0.0
    cure: str = ""

    @property
    def sum(self) -> torch.Tensor:
        """0-d, detached."""
        value = self.value.detach()
        return value if self.is_sum else value * self.weight

    def over(self, denominator: float) -> torch.Tensor:
        """The sum divided by ``denominator``, to run backward from; a mean of that weight comes back untouched."""
        factor = (1.0 if self.is_sum else self.weight) / denominator
        return self.value if not self.is_sum and self.weight == denominator else self.value * factor


def compute_loss(model: Callable[..., Any], loss_fn: LossFn | None, batch: Batch) -> Loss:
    """Runs the model's forward, and the loss function if there is one.

    Raises:
        ModelError: There is no loss function and the model's output holds no single scalar.
        UsageError: The loss function returns something else than a mean or ``(sum, count)``.
    """
    if loss_fn is None:
        with watched() as seen:
            output = run_model(model, None, batch)
        return _mean(_own_loss(output), batch.num_samples, _own_targets(batch), seen)
    _, targets, named_targets = _parts(loss_fn, batch)
    output = run_model(model, loss_fn, batch)
    with watched() as seen:
        try:
            result = loss_fn(output, *targets, **named_targets)
        except TypeError as problem:
            if not targets and not named_targets:
                problem.add_note("loss_fn got the model's output alone; type trainer.step(inputs, targets)")
            raise
    return _read(result, batch.num_samples, [*targets, *named_targets.values()], seen)


def run_model(model: Callable[..., Any], loss_fn: LossFn | None, batch: Batch) -> Any:
    """The model's output for what of ``batch`` is the model's."""
    if loss_fn is None:
        return _run_whole(model, batch)
    inputs, _, _ = _parts(loss_fn, batch)
    try:
        return call(model, inputs)
    except TypeError as problem:
        problem.add_note(
            "step(inputs, *targets) gives the model its inputs, a tuple of them unpacked; type trainer.step(*batch), "
            "or name what the model takes: trainer.step(x=..., target=...)"
        )
        raise


def _run_whole(model: Callable[..., Any], batch: Batch) -> Any:
    """The model on the whole batch, as there is no loss function that takes targets."""
    try:
        return _run(model, batch)
    except TypeError as problem:
        problem.add_note("no loss_fn was given, so the model got the whole batch; give Trainer(..., loss_fn=...)")
        raise


def _run(model: Callable[..., Any], batch: Batch) -> Any:
    if batch.named:
        return model(*batch.positional, **batch.named)
    return call(model, batch.positional[0] if len(batch.positional) == 1 else batch.positional)


def _parts(loss_fn: LossFn, batch: Batch) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model's inputs, and the loss function's positional and named arguments."""
    if not batch.named:
        return batch.positional[0], batch.positional[1:], {}
    names = target_names(loss_fn)
    targets = {name: value for name, value in batch.named.items() if name in names}
    inputs = {name: value for name, value in batch.named.items() if name not in names}
    if batch.positional:
        return batch.positional[0], batch.positional[1:], dict(batch.named)
    if not targets:
        raise UsageError(
            f"loss_fn takes none of the batch's {', '.join(map(repr, inputs))}; name its parameters after what it "
            f"needs, e.g. loss_fn=lambda output, {list(inputs)[-1]}: ..., and the model's after the others"
        )
    return inputs, (), targets


def _own_targets(batch: Batch) -> list[Any]:
    """What a model that computes its own loss most likely compares with."""
    return [*batch.positional[1:], *(value for name, value in batch.named.items() if name in _TARGET_NAMES)]


def _ignored(targets: list[Any], num_samples: int, seen: Denominators) -> float | torch.Tensor:
    """Targets a sample that the mean does not divide by: as seen, else -100s."""
    classes = [target for target in targets if isinstance(target, torch.Tensor) and target.dtype == torch.long]
    if not seen.num_means:
        return sum((target == IGNORED).sum().double() for target in classes) / num_samples
    # F.cross_entropy(output[mask], target[mask]) gets some of the only targets there are
    left_out = classes[0].numel() - seen.num_targets if len(classes) == seen.num_means == 1 else 0
    return (seen.shortfall + left_out if left_out else seen.shortfall) / num_samples


def _read(result: Any, num_samples: int, targets: list[Any], seen: Denominators) -> Loss:
    if isinstance(result, tuple) and len(result) == 2:
        value, count = result
        if _is_scalar(value):
            return Loss(value, _count(count), is_sum=True)
    if _is_scalar(result):
        return _mean(result, num_samples, targets, seen)
    raise UsageError(
        f"loss_fn returned {_described(result)}; return a 0-d mean or (sum, count), "
        "e.g. F.cross_entropy(output, target)"
    )


def _count(given: Any) -> float | torch.Tensor:
    if not isinstance(given, torch.Tensor):
        return float(given)
    if given.numel() != 1 or given.dtype == torch.bool:
        raise UsageError(
            f"loss_fn returned (sum, count) with a count of shape {tuple(given.shape)} and dtype "
            f"{str(given.dtype).removeprefix('torch.')}; return one number, e.g. mask.sum()"
        )
    return given.detach().reshape(())  # one on a GPU stays there: reading it would wait for the forward


def _mean(value: torch.Tensor, num_samples: int, targets: list[Any], seen: Denominators) -> Loss:
    if any(value is total for total in seen.sums):
        raise UsageError(
            "the loss is a sum (reduction='sum') and would grow with the batch; return (sum, count) with what to "
            "divide by, e.g. (loss, target.numel()), or use reduction='mean'"
        )
    if num_samples == 0:
        raise BatchError(
            "a rank's batch is empty and has no mean loss; give every rank a sample or let loss_fn return (sum, count)"
        )
    ignored = _ignored(targets, num_samples, seen)
    return Loss(value, float(num_samples), is_sum=False, ignored=ignored, cure=seen.cure)


def _own_loss(output: Any) -> torch.Tensor:
    """A scalar, ``.loss``, ``["loss"]`` or the one scalar in a tuple."""
    if _is_scalar(output):
        return output
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if _is_scalar(named):
        return named
    scalars = [item for item in output if _is_scalar(item)] if isinstance(output, tuple | list) else []
    if len(scalars) == 1:
        return scalars[0]
    raise ModelError(
        f"the model's forward gave no loss but {_described(output)}; give Trainer a loss_fn, or give the model "
        "what it needs for its own loss (labels, targets)"
    )


def _is_scalar(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
