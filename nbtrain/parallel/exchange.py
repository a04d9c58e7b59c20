"""Reduce-scatter and all-gather of a flat buffer, in place and asynchronous; and all-reduce of a few numbers.

::

    flat buffer     [ part of rank 0 | part of rank 1 | ... ]     as many equal parts as the group has ranks
    reduce-scatter  every part goes to its rank, which adds what it hears to its own
    all-gather      every rank's part goes to the others

gloo has no reduce-scatter of its own: torch runs its all-reduce and throws most of it away, and its all-gather copies
twice. On the CPU ranks therefore exchange the parts directly, in messages: the same (N-1)/N of the buffer in each
direction, measured 14 and 6 times as fast on 2 ranks (24 MB, loopback), and both together faster than an all-reduce.
A few numbers all ranks send to all: gloo's all-reduce hands them from thread to thread, 1.4 to 2.5 ms where a message
takes 0.08 (2 ranks on 2 cores; 6 and 3 on 4 ranks, 19 and 9 on 8).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.parallel.messages import Messages
from nbtrain.parallel.waits import waited

Message = tuple[torch.Tensor, int, torch.Tensor, int]
"""What is sent, to whom, where what is heard goes, from whom: ranks of the group."""

Finish = Callable[[], None]
"""Waits for what was begun."""

# torch 2.13 renamed them and warns at the old names
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

FEW_RANKS = 16
"""Up to here all send to all."""


def part(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part: a view."""
    return flat.view(group.size(), -1)[group.rank()]


def begin_reduce_scatter(flat: torch.Tensor, group: dist.ProcessGroup) -> Finish:
    """Begins to sum over ranks; when it is finished, this rank's part is the sum and the others are arbitrary.

    Args:
        flat: (N x part) elements, contiguous.
        group: N ranks, which begin the same in the same order.
    """
    own = part(flat, group)
    if not flat.is_cpu:
        finish: Finish = _reduce_scatter(own, flat, group=group, async_op=True).wait
        return finish
    parts = flat.view(group.size(), -1)
    heard = torch.empty_like(parts[1:])
    messages = [(parts[to], to, room, source) for (to, source), room in zip(_pairs(group), heard, strict=True)]
    wait = _exchanged("reduce_scatter", messages, flat, group)

    def add() -> None:
        wait()
        for room in heard:
            own.add_(room)

    return add


def begin_all_gather(flat: torch.Tensor, group: dist.ProcessGroup) -> Finish:
    """Begins to fill in the parts of the other ranks. Arguments as of `begin_reduce_scatter`."""
    own = part(flat, group)
    if not flat.is_cpu:
        finish: Finish = _all_gather(flat, own, group=group, async_op=True).wait
        return finish
    parts = flat.view(group.size(), -1)
    messages = [(own, to, parts[source], source) for to, source in _pairs(group)]
    return _exchanged("all_gather", messages, flat, group)


def all_reduce(numbers: torch.Tensor, group: dist.ProcessGroup, *, largest: bool = False) -> None:
    """Sums a few numbers over ranks, or takes the largest of each, in place, and waits. The same bits on all ranks.

    Args:
        numbers: One dimension, contiguous, as many on every rank.
        group: Its ranks call it in the same order.
        largest: Of each number, in the place of the sum.
    """
    if not numbers.is_cpu or group.size() > FEW_RANKS:
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        return
    rows = numbers.new_empty(group.size(), len(numbers))
    rows[group.rank()] = numbers
    messages = [(numbers, to, rows[source], source) for to, source in _pairs(group)]
    _exchanged("all_reduce", messages, numbers, group)()
    numbers.copy_(rows.amax(0) if largest else rows.sum(0))


def _pairs(group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Whom to send to and whom to hear from, in each round."""
    own, size = group.rank(), group.size()
    return [((own + distance) % size, (own - distance) % size) for distance in range(1, size)]


def _exchanged(op: str, parts: list[Message], flat: torch.Tensor, group: dist.ProcessGroup) -> Finish:
    messages, since = Messages(group), time.time()
    tag = messages.tag((op, flat.numel(), flat.dtype))
    for outgoing, to, room, source in parts:
        messages.keep([dist.isend(outgoing, group=group, tag=tag, group_dst=to)])
        messages.keep([dist.irecv(room, group=group, tag=tag, group_src=source)])

    def wait() -> None:
        with waited(op, group.group_name, dist.get_process_group_ranks(group), messages.number, [flat], since):
            messages.finish()

    return wait
