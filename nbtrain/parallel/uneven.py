"""A rank whose batch has no samples joins the others' step: it adds nothing and takes part in every collective.

torch's ``Join`` shadows what DDP moves, and knows nothing of FSDP, of batch statistics or of the step's own reduction.
Here the rank runs the model itself, on one sample that stands in, and nothing of it counts:

::

    forward      the stand-in's rows are left out of batch statistics
    loss         weight 0
    backward     from zeros; whatever a division by 0 makes of them, zeros again where gradients leave the model
    marks        the parameters that it reached are not used
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_structure

from nbtrain.parallel.batch import Batch
from nbtrain.parallel.batchnorm import SharedStatistics, Silent
from nbtrain.parallel.loss import Loss, LossFn, compute_loss
from nbtrain.parallel.usage import Usage, leaves


@dataclass
class StandIn:
    """One sample of the last batch that had some. Models may not run on none: ``x.view(len(x), -1)`` does not."""

    _sample: Batch | None = None

    def remember(self, batch: Batch) -> None:
        if batch.num_samples:
            self._sample = batch.first()

    def of(self, empty: Batch) -> Batch:
        """A batch of 1 sample, of the kind of ``empty``: zeros, where this rank has seen none of that kind."""
        sample = self._sample
        if sample is not None and _kind(sample) == _kind(empty):
            return sample
        return empty.zeros()


def joined_forward(model: nn.Module, loss_fn: LossFn | None, batch: Batch) -> None:
    """Runs the model on a stand-in, without gradients."""
    with uncounted(model, None):
        compute_loss(model, loss_fn, batch)


def joined_backward(model: nn.Module, loss_fn: LossFn | None, batch: Batch, usage: Usage | None) -> None:
    """Forward and backward on a stand-in: every collective of a real batch, gradients of zeros."""
    with uncounted(model, usage):
        loss: Loss = compute_loss(model, loss_fn, batch)
        if usage is not None:
            usage.watch()
        with zeroed(leaves(model)):
            silent(loss.value).backward()  # type: ignore[no-untyped-call]


def silent(value: torch.Tensor) -> torch.Tensor:
    """``value``, through which no gradient flows back but zeros."""
    passed: torch.Tensor = Silent.apply(value)  # type: ignore[no-untyped-call]
    return passed


@contextmanager
def uncounted(model: nn.Module, usage: Usage | None) -> Iterator[None]:
    layers = [module for module in model.modules() if isinstance(module, SharedStatistics)]
    for layer in layers:
        layer.counts = False
    try:
        with nullcontext() if usage is None else usage.paused():
            yield
    finally:
        for layer in layers:
            layer.counts = True


@contextmanager
def zeroed(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    hooks: list[Any] = [parameter.register_hook(torch.zeros_like) for parameter in parameters]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _kind(batch: Batch) -> Any:
    return tree_structure((batch.positional, dict(batch.named)))
