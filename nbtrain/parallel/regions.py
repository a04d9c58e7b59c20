"""Boxes of a whole tensor: what two have in common, what is left of one, and who has what another needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nbtrain.parallel.pieces import Box


class Need(NamedTuple):
    """A box that a rank needs.

    Attributes:
        source: The rank that has it.
        box: In the whole tensor: within one piece of the source, and within one of who needs it.
    """

    source: int
    box: Box


def overlap(first: Box, second: Box) -> Box | None:
    """What is in both; None where nothing is."""
    starts = tuple(map(max, first.starts, second.starts))
    sizes = tuple(end - start for start, end in zip(starts, map(min, _ends(first), _ends(second)), strict=True))
    return None if any(size <= 0 for size in sizes) else Box(starts, sizes)


def without(box: Box, taken: Box) -> list[Box]:
    """What is left of ``box``: boxes without overlap.

    Args:
        box: In a whole tensor.
        taken: Within ``box``.
    """
    left = []
    for dim, (start, end) in enumerate(zip(taken.starts, _ends(taken), strict=True)):
        for low, high in ((box.starts[dim], start), (end, _ends(box)[dim])):
            if low < high:
                left.append(_narrowed(box, dim, low, high))
        box = _narrowed(box, dim, start, end)
    return left


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where ``box`` lies in a tensor that is ``outer``."""
    return tuple(
        slice(start - first, start - first + size)
        for start, size, first in zip(box.starts, box.sizes, outer.starts, strict=True)
    )


def needs(wanted: Iterable[Box], holders: Sequence[Sequence[Box]], rank: int) -> tuple[list[Need], list[Box]]:
    """From whom ``rank`` gets what it wants: from itself first, then from the ranks behind it.

    Replicas are asked in another order by each rank, so that no rank sends to all others.

    Args:
        wanted: Boxes of one tensor.
        holders: For each rank the boxes of that tensor that it has.
        rank: Who wants them.

    Returns:
        The needs, and what nobody has.
    """
    found: list[Need] = []
    left = list(wanted)
    for distance in range(len(holders)):
        source = (rank + distance) % len(holders)
        for box in holders[source]:
            left = [rest for part in left for rest in _take(part, box, source, found)]
    return found, left


def _take(part: Box, box: Box, source: int, found: list[Need]) -> list[Box]:
    common = overlap(part, box)
    if common is None:
        return [part]
    found.append(Need(source, common))
    return without(part, common)


def _ends(box: Box) -> tuple[int, ...]:
    return tuple(start + size for start, size in zip(box.starts, box.sizes, strict=True))


def _narrowed(box: Box, dim: int, low: int, high: int) -> Box:
    starts, sizes = list(box.starts), list(box.sizes)
    starts[dim], sizes[dim] = low, high - low
    return Box(tuple(starts), tuple(sizes))
