"""Gradients behind a schedule: summed over stages that share a parameter, then over data-parallel ranks.

Hooks that reduce during backward do not see gradients that a zero-bubble schedule computes apart, and must not run
with every microbatch. So every rank reduces once, when its last microbatch is through, by explicit collectives::

    zero 0      all-reduce of buckets
    zero 1      reduce-scatter of buckets: `ShardedUpdate.reduce`
    zero 2, 3   FSDP's own reduce-scatter, called by hand; parameters stay gathered from the first microbatch to it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nbtrain.events import EventKind
from nbtrain.parallel.bucket import in_buckets
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.update import ShardedUpdate
from nbtrain.parallel.usage import sharded_records
from nbtrain.telemetry.timeline import recorder


def hold_back(model: nn.Module, layout: Layout) -> None:
    """Before the first microbatch: nothing is reduced until `reduce`."""
    if isinstance(layout.result, ShardedUpdate):
        layout.result.hold_back()
    if layout.shards:
        _set_fsdp(model, last=False)


def reduce(model: nn.Module, layout: Layout, bucket_mb: float | None) -> None:
    """Makes gradients the mean over data-parallel ranks, as they would be without a pipeline. Collective over them."""
    if layout.group is None:
        return
    with recorder().span(EventKind.COLLECTIVE, name="all-reduce" if layout.plan.zero == 0 else "reduce-scatter"):
        if isinstance(layout.result, ShardedUpdate):
            layout.result.reduce()
        elif layout.shards:
            _reduce_fsdp(model)
        else:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            _all_reduce(trained, layout.group, bucket_mb)


def settle_weights(model: nn.Module, layout: Layout) -> None:
    """Behind a backward of weights only: FSDP adds up microbatches in the dtype in which it reduces."""
    if layout.shards:
        for record in sharded_records(model):
            record.accumulate_unsharded_grad_if_needed()
            record.to_accumulated_grad_if_needed()  # the first one: it would replace a sum


def found_gradients(model: nn.Module, layout: Layout, trained: Sequence[nn.Parameter]) -> list[bool]:
    """Whether each of the ``trained`` parameters got a gradient on this rank, before `reduce`."""
    if layout.shards:
        return [_arrived(record) for record in sharded_records(model)]
    return [parameter.grad is not None for parameter in trained]


def _arrived(record: Any) -> bool:
    if record.unsharded_accumulated_grad is not None:
        return True
    return hasattr(record, "_unsharded_param") and record._unsharded_param.grad is not None


def _all_reduce(parameters: list[nn.Parameter], group: dist.ProcessGroup, bucket_mb: float | None) -> None:
    buckets = in_buckets(parameters, bucket_mb)
    flats = []
    for bucket in buckets:
        # what this rank did not reach counts as zeros: the others wait for it
        parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in bucket]
        flats.append(torch.cat([part.reshape(-1) for part in parts]))
    works = [dist.all_reduce(flat, group=group, async_op=True) for flat in flats]
    for bucket, flat, work in zip(buckets, flats, works, strict=True):
        work.wait()
        flat.div_(group.size())
        for parameter, part in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
            parameter.grad = part.view(parameter.shape)


def _set_fsdp(model: nn.Module, *, last: bool) -> None:
    root = cast(FSDPModule, model)
    root.set_is_last_backward(last)
    root.set_requires_gradient_sync(last)
    root.set_reshard_after_backward(last)
    root.set_reshard_after_forward(False)


def _reduce_fsdp(model: nn.Module) -> None:
    _set_fsdp(model, last=True)
    state = cast(Any, model)._get_fsdp_state()
    for unit in state._state_ctx.all_states:
        for group in unit._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()
