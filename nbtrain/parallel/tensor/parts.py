"""A rank's part of a tensor, and the whole of all ranks' parts: no communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nbtrain.errors import ModelError
from nbtrain.parallel.tensor.cuts import Cut
from nbtrain.parallel.tensor.peers import Peers


def take_part(tensor: torch.Tensor, cut: Cut, rank: int, degree: int) -> torch.Tensor:
    """Part ``rank`` of ``degree``: of each segment its piece, one behind the other. A copy, on any device.

    Raises:
        ModelError: The segments are not those of the tensor, or ``degree`` does not divide one.
    """
    _check(tensor, cut, degree)
    segments = torch.split(tensor, list(cut.segments), cut.dim)
    pieces = [segment.chunk(degree, cut.dim)[rank] for segment in segments]
    return torch.cat(pieces, cut.dim).contiguous() if len(pieces) > 1 else _copy(pieces[0])


def join_parts(parts: Sequence[torch.Tensor], cut: Cut) -> torch.Tensor:
    """The whole, in the element order that it had before `take_part`; ``parts`` are by rank."""
    degree = len(parts)
    pieces = [torch.split(part, [size // degree for size in cut.segments], cut.dim) for part in parts]
    return torch.cat([piece for segment in zip(*pieces, strict=True) for piece in segment], cut.dim)


def joined(parts: torch.Tensor, cut: Cut, peers: Peers) -> torch.Tensor:
    """Features (..., d) in the whole's order, from all ranks' parts one behind the other along the last dim."""
    if len(cut.segments) == 1:
        return parts
    return join_parts(parts.chunk(peers.degree, -1), Cut(-1, cut.segments))


def _copy(piece: torch.Tensor) -> torch.Tensor:
    return piece.clone(memory_format=torch.contiguous_format)


def _check(tensor: torch.Tensor, cut: Cut, degree: int) -> None:
    if tensor.shape[cut.dim] != cut.size:
        raise ModelError(
            f"a cut of dim {cut.dim} into segments {cut.segments} needs {cut.size} elements there, and the tensor is "
            f"{tuple(tensor.shape)}; give segments that add up to {tensor.shape[cut.dim]}"
        )
    for size in cut.segments:
        if size % degree:
            raise ModelError(
                f"tp={degree} does not divide a segment of {size} elements; choose tp from "
                f"{', '.join(str(divisor) for divisor in range(1, size + 1) if size % divisor == 0)}"
            )
