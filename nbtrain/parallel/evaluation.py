"""The mean loss over many batches on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.errors import BatchError
from nbtrain.parallel import shard
from nbtrain.parallel.batch import Batch
from nbtrain.parallel.exchange import all_reduce
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.loss import LossFn, compute_loss
from nbtrain.parallel.peers import require_same_batch
from nbtrain.parallel.totals import Tally
from nbtrain.parallel.uneven import StandIn, joined_forward
from nbtrain.telemetry.timeline import recorder


def evaluate(
    model: nn.Module,
    loss_fn: LossFn | None,
    batches: Iterable[Any],
    doing: str,
    trainer: int,
    layout: Layout,
    device: torch.device,
) -> float:
    """Sum of losses over sum of weights, over batches and ranks. One small reduction at the end.

    ``doing`` says in words what ranks must all be in, and ``trainer`` whose number it is.

    Raises:
        BatchError: Ranks have different numbers of batches, or nothing in them counts.
    """
    require_same_batch(Batch((), {}, 0), doing, layout, device)  # before what only an evaluation exchanges
    if layout.everyone is not None and isinstance(batches, Sized):
        _require_same_length(len(batches), layout.everyone, device)
    tally = Tally(device)
    with _eval_mode(model), torch.no_grad(), recorder().paused():
        stand_in = StandIn()
        for item in batches:
            batch = batch_of(item)
            require_same_batch(batch, doing, layout, device)
            batch = batch.to(device)
            stand_in.remember(batch)
            if layout.pipeline is not None:
                layout.pipeline.evaluate(batch, loss_fn, tally, stand_in)
                continue
            if batch.num_samples == 0 and layout.group is not None:
                joined_forward(model, loss_fn, stand_in.of(batch))
            else:
                tally.add(compute_loss(model, loss_fn, batch))
    if layout.shards:
        shard.reshard(model)
    totals = tally.reduce(layout.everyone, copies=layout.plan.tp, trainer=trainer)
    totals.require_meaning()
    return totals.mean


def batch_of(item: Any) -> Batch:
    """A loader's item as ``step(*item)`` or ``step(**item)`` would take it."""
    if isinstance(item, Mapping):
        return Batch.of((), item)
    return Batch.of(tuple(item) if isinstance(item, tuple | list) else (item,), {})


def _require_same_length(length: int, group: dist.ProcessGroup, device: torch.device) -> None:
    span = torch.tensor([length, -length], device=device)
    all_reduce(span, group, largest=True)
    longest, shortest = int(span[0]), -int(span[1])
    if longest != shortest:
        raise BatchError(
            f"ranks have from {shortest} to {longest} batches, and would wait for each other; "
            "use nt.loader, which gives every rank as many"
        )


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
