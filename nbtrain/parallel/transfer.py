"""Moving plain objects and tensors between ranks, as `nbtrain.parallel.heal` needs it: by the CPU, in one order."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_map_only

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor that follows."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Slot:
        return cls(tuple(tensor.shape), tensor.dtype)


def send(tree: Any, to: int) -> None:
    """Sends ``tree``: nested lists, tuples and dicts of tensors and of what pickles. To be received by `receive`."""
    dist.send_object_list([tree_map_only(torch.Tensor, _Slot.of, tree)], to, device=_CPU)
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            dist.send(leaf.detach().to(_CPU).contiguous(), to)


def receive(source: int) -> Any:
    """What ``source`` sends; its tensors on the CPU."""
    box: list[Any] = [None]
    dist.recv_object_list(box, source, device=_CPU)
    return tree_map_only(_Slot, lambda slot: _receive_tensor(slot, source), box[0])


def gather(thing: Any) -> list[Any]:
    """``thing`` of every rank, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, thing)
    return everyone


def broadcast(thing: Any, source: int) -> Any:
    """``thing`` of ``source``, on every rank."""
    box = [thing]
    dist.broadcast_object_list(box, source, device=_CPU)
    return box[0]


def _receive_tensor(slot: _Slot, source: int) -> torch.Tensor:
    tensor = torch.empty(slot.shape, dtype=slot.dtype)
    if tensor.numel():
        dist.recv(tensor, source)
    return tensor


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
    header = _packed(tree_map_only(torch.Tensor, _Slot.of, tree))
    size = swap(torch.tensor([len(header)]), torch.empty(1, dtype=torch.long), group)
    heard = pickle.loads(swap(header, torch.empty(int(size), dtype=torch.uint8), group).numpy().tobytes())
    outgoing = [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
    slots = [leaf for leaf in tree_flatten(heard)[0] if isinstance(leaf, _Slot)]
    nothing = torch.empty(0)
    arrived = [
        swap(
            nothing if mine is None else mine.detach().to(_CPU).contiguous(),
            nothing if slot is None else torch.empty(slot.shape, dtype=slot.dtype),
            group,
        )
        for mine, slot in itertools.zip_longest(outgoing, slots)
    ][: len(slots)]
    remaining = iter(arrived)
    return tree_map_only(_Slot, lambda _: next(remaining), heard)


def _packed(thing: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
