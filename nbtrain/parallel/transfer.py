"""Moving plain objects and tensors between ranks, as `nbtrain.parallel.heal` needs it: by the CPU, in one order."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from nbtrain.errors import UsageError
from nbtrain.parallel.cell import call

_CPU = torch.device("cpu")
BATCH_BYTES = 64 * 2**20
"""Tensors travel together, up to so many bytes: a message of its own for each would be most of the time."""


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor that follows."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Slot:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def send(tree: Any, to: int) -> None:
    """Sends ``tree``: nested lists, tuples and dicts of tensors and of what pickles. To be received by `receive`."""
    dist.send_object_list([tree_map_only(torch.Tensor, _Slot.of, tree)], to, device=_CPU)
    for flat in _flats(tree):
        if flat.numel():
            dist.send(flat, to)


def receive(source: int) -> Any:
    """What ``source`` sends; its tensors on the CPU."""
    box: list[Any] = [None]
    dist.recv_object_list(box, source, device=_CPU)
    batches = _batches(box[0])
    flats = [_room(batch) for batch in batches]
    for flat in flats:
        if flat.numel():
            dist.recv(flat, source)
    return _filled(box[0], batches, flats)


def gather(thing: Any) -> list[Any]:
    """``thing`` of every rank, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, thing)
    return everyone


def gather_in_call(thing: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """`gather` among ranks of ``group`` that must all be in one call: what others send would make no sense.

    Raises:
        UsageError: They are not. On every rank.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (call(), thing), group=group)
    calls = [name for name, _ in everyone]
    if apart := next((rank for rank, name in enumerate(calls) if name != calls[0]), None):
        raise UsageError(
            f"rank {apart} is in {calls[apart] or 'another call'}, and rank 0 in {calls[0] or 'another call'}; make "
            "every rank come to the same calls in one order"
        )
    return [thing for _, thing in everyone]


def broadcast(thing: Any, source: int) -> Any:
    """``thing`` of ``source``, on every rank."""
    box = [thing]
    dist.broadcast_object_list(box, source, device=_CPU)
    return box[0]


def swap(outgoing: torch.Tensor, incoming: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sends ``outgoing`` to the next rank of a ring and fills ``incoming`` from the one before; both on the CPU."""
    ranks = dist.get_process_group_ranks(group)
    index = ranks.index(dist.get_rank())
    works = []
    if outgoing.numel():
        works.append(dist.isend(outgoing, ranks[(index + 1) % len(ranks)], group=group))
    if incoming.numel():
        works.append(dist.irecv(incoming, ranks[index - 1], group=group))
    for work in works:
        if work is not None:
            work.wait()
    return incoming


def pass_along(tree: Any, group: dist.ProcessGroup) -> Any:
    """Sends ``tree`` to the next rank of a ring and returns that of the one before; None sends none."""
    header = _bytes(pickle.dumps(tree_map_only(torch.Tensor, _Slot.of, tree)))
    size = swap(torch.tensor([len(header)]), torch.empty(1, dtype=torch.long), group)
    heard = pickle.loads(swap(header, torch.empty(int(size), dtype=torch.uint8), group).numpy().tobytes())
    batches = _batches(heard)
    nothing = torch.empty(0)
    flats = [
        swap(nothing if mine is None else mine, nothing if batch is None else _room(batch), group)
        for mine, batch in itertools.zip_longest(_flats(tree), batches)
    ]
    return _filled(heard, batches, flats)


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _flats(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of ``tree`` as bytes on the CPU, batch by batch."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    for batch in _batches([_Slot.of(tensor) for tensor in tensors]):
        parts, tensors = tensors[: len(batch)], tensors[len(batch) :]
        yield torch.cat([part.detach().to(_CPU).contiguous().flatten().view(torch.uint8) for part in parts])


def _batches(header: Any) -> list[list[_Slot]]:
    """The slots in ``header``, cut where a batch is full."""
    batches: list[list[_Slot]] = []
    size = BATCH_BYTES
    for slot in tree_leaves(header):
        if isinstance(slot, _Slot):
            if size >= BATCH_BYTES:
                batches.append([])
                size = 0
            batches[-1].append(slot)
            size += slot.num_bytes
    return batches


def _room(batch: list[_Slot]) -> torch.Tensor:
    return torch.empty(sum(slot.num_bytes for slot in batch), dtype=torch.uint8)


def _filled(header: Any, batches: list[list[_Slot]], flats: list[torch.Tensor]) -> Any:
    """``header`` with its tensors in their places."""
    tensors = iter(
        [
            # a copy: it would keep the whole batch in memory, and may not be aligned
            part.clone().view(slot.dtype).view(slot.shape)
            for batch, flat in zip(batches, flats, strict=False)
            for slot, part in zip(batch, torch.split(flat, [slot.num_bytes for slot in batch]), strict=True)
        ]
    )
    return tree_map_only(_Slot, lambda _: next(tensors), header)
