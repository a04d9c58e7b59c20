"""Which dim of a reshaped tensor is cut, and how large a rank's part of it is: arithmetic on shapes.

A dim that is cut consists of segments, one behind the other, each of which is cut into ``degree`` equal pieces
(`cuts.Cut`). Sizes are the whole tensor's, unless a name says ``part``.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from operator import mul

Shape = tuple[int, ...]
Place = tuple[int, Shape]
"""A dim, and the segments of which it consists."""


def relocate(shape: Shape, place: Place, new: Shape, degree: int) -> Place | None:
    """Where the cut lies after a reshape of the whole tensor from ``shape`` to ``new``.

    It lies on the outermost new dim whose index can be cut. A dim that only counts equal segments (the 3 of
    ``view(B, T, 3, heads, head_dim)``) is passed over. Merged dims repeat the segments.

    Returns:
        None where no new dim can be cut.
    """
    dim, segments = place
    inner = prod(shape[dim + 1 :])
    elements = tuple(segment * inner for segment in segments)
    strides = tuple(accumulate((1, *reversed(new[1:])), mul))[::-1] if new else ()
    for at, (stride, size) in enumerate(zip(strides, new, strict=True)):
        period = sum(elements)
        if stride >= period or stride * size < period:
            continue
        if stride * size % period:
            return None
        if all(element % (stride * degree) == 0 for element in elements):
            return at, tuple(element // stride for element in elements) * (stride * size // period)
        if len(set(elements)) > 1 or stride % elements[0]:
            return None
        elements = (elements[0],) * (stride // elements[0])
    return None


def part_of(sizes: Shape, place: Place, degree: int) -> Shape:
    """A rank's part of a tensor of these sizes."""
    dim = place[0]
    return (*sizes[:dim], sizes[dim] // degree, *sizes[dim + 1 :])


def reshape(part: Shape, place: Place, sizes: Shape, degree: int) -> tuple[Shape, Place] | None:
    """A rank's sizes for a reshape that was written for the whole tensor, or from the part's own shape.

    Args:
        part: The shape of the rank's part.
        place: The cut of the whole.
        sizes: As written, at most one of them -1.

    Returns:
        The sizes of the part after the reshape and the new cut; None where the cut is lost or the sizes do not fit.
    """
    whole = (*part[: place[0]], part[place[0]] * degree, *part[place[0] + 1 :])
    written = _fill(sizes, prod(whole))
    if written is not None and (new := relocate(whole, place, written, degree)):
        return part_of(written, new, degree), new
    own = _fill(sizes, prod(part))
    if own is None:
        return None
    grown = [(*own[:at], own[at] * degree, *own[at + 1 :]) for at in range(len(own))]
    found = [relocate(whole, place, sizes, degree) for sizes in grown]
    fits = [new for at, new in enumerate(found) if new and new[0] == at]
    return (own, min(fits, key=lambda new: len(new[1]))) if fits else None


def _fill(sizes: Shape, numel: int) -> Shape | None:
    """``sizes`` with -1 resolved; None where they do not hold ``numel`` elements."""
    known = prod(size for size in sizes if size != -1)
    if -1 in sizes and known and numel % known == 0:
        sizes = tuple(numel // known if size == -1 else size for size in sizes)
    return sizes if prod(sizes) == numel and -1 not in sizes else None


def span(segments: Shape, start: int, stop: int, degree: int) -> tuple[int, int, Shape] | None:
    """A rank's start and stop, and the segments between, for a slice that covers whole segments.

    ``start`` and ``stop`` are written for the whole dim, or else for the part.
    """
    for scale in (1, degree):
        edges = [sum(segments[:count]) // scale for count in range(len(segments) + 1)]
        if start in edges and stop in edges and start < stop:
            first, last = edges.index(start), edges.index(stop)
            shrink = degree // scale
            return start // shrink, stop // shrink, segments[first:last]
    return None
