"""`move`: every tensor of one layout into the memory of another, each element once, from a rank that has it.

::

    catalog     all ranks tell which boxes of which tensors they have           small, once
    requests    each rank asks for the boxes that it needs and has not          small, once
    batches     some tensors at a time: one message between two ranks           point to point

A rank holds no more than both layouts and what one batch moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nbtrain.errors import ModelError
from nbtrain.parallel.pieces import Box, Held
from nbtrain.parallel.regions import needs, within
from nbtrain.parallel.transfer import gather

BATCH_BYTES = 64 * 2**20
"""Of whole tensors that travel together; a larger one travels alone."""

Key = tuple[str, ...]
"""Of a tensor: the same on every rank."""


@dataclass(frozen=True)
class Entry:
    """What all ranks know of one tensor.

    Attributes:
        shape: Of the whole.
        dtype: Of its elements.
        boxes: For each rank, those that it has.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[tuple[Box, ...], ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Catalog = dict[Key, Entry]


@dataclass
class Traffic:
    """Bytes of this rank.

    Attributes:
        sent_bytes: To other ranks.
        kept_bytes: Copied from this rank's old memory to its new one.
    """

    sent_bytes: int = 0
    kept_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent_bytes + other.sent_bytes, self.kept_bytes + other.kept_bytes)


@dataclass(frozen=True)
class _Errand:
    """One box on its way."""

    key: Key
    source: int
    to: int
    box: Box


def catalog_of(held: Mapping[Key, Held]) -> Catalog:
    """What all ranks have. Collective over all ranks."""
    own = {key: (h.shape, h.dtype, tuple(piece.box for piece in h.pieces)) for key, h in held.items()}
    reports = gather(own)
    known = {key: (shape, dtype) for report in reports for key, (shape, dtype, _) in report.items()}
    return {
        key: Entry(shape, dtype, tuple(report[key][2] if key in report else () for report in reports))
        for key, (shape, dtype) in known.items()
    }


class Move:
    """From one layout to another.

    Args:
        catalog: Of the old one.
        old: This rank's part of it.
        new: What this rank is to hold, by the same keys.
        device: That the default group moves.

    Raises:
        ModelError: Nobody has some of it or nobody takes it, or shapes differ; on all ranks, and nothing was moved.
    """

    def __init__(
        self, catalog: Catalog, old: Mapping[Key, Held], new: Mapping[Key, Held], device: torch.device | None
    ) -> None:
        self._catalog, self._old, self._new = catalog, old, new
        self._device = device or torch.device("cpu")
        self._rank = dist.get_rank()
        own, problems = self._own_errands()
        reports = gather((own, problems, list(new)))
        wanted = {key for _, _, keys in reports for key in keys}
        lost = [f"nothing of it takes {_spelled(key)}" for key in catalog if key not in wanted]
        if found := next((problems for _, problems, _ in reports if problems), lost):
            raise ModelError("what the model holds does not fit the new layout: " + "; ".join(found[:5]))
        self._errands = [errand for errands, *_ in reports for errand in errands]

    def run(self) -> Traffic:
        """Fills the new memory. Collective over all ranks."""
        traffic = Traffic()
        by_key: dict[Key, list[_Errand]] = {}
        for errand in self._errands:
            by_key.setdefault(errand.key, []).append(errand)
        with torch.no_grad():
            for batch in self._batches():
                self._pass([errand for key in batch for errand in by_key.get(key, ())], traffic)
        return traffic

    def _own_errands(self) -> tuple[list[_Errand], list[str]]:
        errands, problems = [], []
        for key, held in self._new.items():
            entry = self._catalog.get(key)
            if entry is None or (entry.shape, entry.dtype) != (held.shape, held.dtype):
                problems.append(_misfit(key, held, entry))
                continue
            found, missing = needs([piece.box for piece in held.pieces], entry.boxes, self._rank)
            errands += [_Errand(key, need.source, self._rank, need.box) for need in found]
            problems += [f"no rank has {box} of {_spelled(key)}" for box in missing]
        return errands, problems

    def _batches(self) -> Iterator[list[Key]]:
        batch: list[Key] = []
        size = 0
        for key, entry in self._catalog.items():
            if batch and size + entry.num_bytes > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(key)
            size += entry.num_bytes
        if batch:
            yield batch

    def _pass(self, errands: list[_Errand], traffic: Traffic) -> None:
        """One message from each rank to each that needs something of it."""
        outgoing, incoming = _by_peer(errands, self._rank)
        flats = {to: self._packed(parcel) for to, parcel in outgoing.items()}
        rooms = {source: self._room(parcel) for source, parcel in incoming.items()}
        requests = [dist.P2POp(dist.isend, flat, to) for to, flat in flats.items()]
        requests += [dist.P2POp(dist.irecv, room, source) for source, room in rooms.items()]
        works = dist.batch_isend_irecv(requests) if requests else []
        for errand in errands:
            if errand.source == errand.to == self._rank:
                target = _part(self._new[errand.key], errand.box)
                target.copy_(_part(self._old[errand.key], errand.box))
                traffic.kept_bytes += target.nbytes
        for work in works:
            work.wait()
        for source, parcel in incoming.items():
            self._unpack(parcel, rooms[source])
        traffic.sent_bytes += sum(flat.nbytes for flat in flats.values())

    def _packed(self, parcel: list[_Errand]) -> torch.Tensor:
        parts = [_part(self._old[errand.key], errand.box) for errand in parcel]
        return torch.cat([_as_bytes(part.to(self._device)) for part in parts])

    def _room(self, parcel: list[_Errand]) -> torch.Tensor:
        return torch.empty(sum(map(self._num_bytes, parcel)), dtype=torch.uint8, device=self._device)

    def _unpack(self, parcel: list[_Errand], room: torch.Tensor) -> None:
        for errand, data in zip(parcel, torch.split(room, list(map(self._num_bytes, parcel))), strict=True):
            target = _part(self._new[errand.key], errand.box)
            # a copy: elements of a dtype must begin at a multiple of its size
            target.copy_(data.clone().view(target.dtype).view(target.shape))

    def _num_bytes(self, errand: _Errand) -> int:
        return errand.box.numel * self._catalog[errand.key].dtype.itemsize


def _by_peer(errands: Iterable[_Errand], rank: int) -> tuple[dict[int, list[_Errand]], dict[int, list[_Errand]]]:
    """What goes to each other rank, and what comes from each, in one order on both sides."""
    outgoing: dict[int, list[_Errand]] = {}
    incoming: dict[int, list[_Errand]] = {}
    for errand in errands:
        if errand.source == errand.to:
            continue
        if errand.source == rank:
            outgoing.setdefault(errand.to, []).append(errand)
        if errand.to == rank:
            incoming.setdefault(errand.source, []).append(errand)
    return outgoing, incoming


def _part(held: Held, box: Box) -> torch.Tensor:
    """The view of ``box``, which lies within one piece."""
    for piece in held.pieces:
        if all(
            first <= start and start + size <= first + width
            for start, size, first, width in zip(box.starts, box.sizes, piece.box.starts, piece.box.sizes, strict=True)
        ):
            return piece.view[within(box, piece.box)]
    raise AssertionError("errands are of boxes that ranks have told of")


def _as_bytes(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().flatten().view(torch.uint8)


def _misfit(key: Key, held: Held, entry: Entry | None) -> str:
    if entry is None:
        return f"nobody has {_spelled(key)}"
    return f"{_spelled(key)} is {entry.shape} {entry.dtype} and would be {held.shape} {held.dtype}"


def _spelled(key: Key) -> str:
    name, *state = key
    return f"'{name}'" if not state else f"the optimizer's '{state[0]}' of '{name}'"
