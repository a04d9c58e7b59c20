"""One tensor against another, as a row of a report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.parallel import mesh as meshes
from nbtrain.parallel.report import Row

# Of the largest element of all tensors of a kind: where terms of that size cancel (the gradient of a bias before a
# batch normalisation is 0), their rounding, magnified, is all there is.
_FLOOR = 0.5


def rows_of(
    kind: str, step: int, expected: Mapping[str, Any], got: Mapping[str, Any], relative: float
) -> Iterator[Row]:
    """Compares ``got`` with ``expected``, name by name, with an error of ``relative`` to the largest element."""
    largest = max((_largest(value) for value in expected.values()), default=0.0)
    for name, value in expected.items():
        allowed = relative * max(_largest(value), _FLOOR * largest)
        yield _row(Row(step, kind, name, 0.0, allowed), value, got.get(name))


def _row(row: Row, expected: Any, got: Any) -> Row:
    if expected is None or got is None:
        side = "one device has none" if expected is None else "the plan has none"
        return row if expected is got else replace(row, error=math.inf, note=f"is on one side only: {side}")
    ours, theirs = _plain(got), _plain(expected)
    if ours.shape != theirs.shape:
        return replace(row, error=math.inf, note=f"is {tuple(ours.shape)} and must be {tuple(theirs.shape)}")
    finite = theirs.isfinite()
    if not torch.equal(ours[~finite].nan_to_num(), theirs[~finite].nan_to_num()) or not ours[finite].isfinite().all():
        return replace(row, error=math.inf, note="has numbers that are not finite")
    ours, theirs = ours[finite], theirs[finite]
    error = _largest(ours - theirs)
    return replace(row, error=error, factor=None if error <= row.allowed else _factor(theirs, ours, row.allowed))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """float64 on the CPU; complex numbers as pairs."""
    tensor = tensor.detach().cpu()
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()


def _factor(expected: torch.Tensor, got: torch.Tensor, allowed: float) -> float | None:
    """The number that ``got`` is ``expected`` times of, if it is."""
    square = expected.square().sum().item()
    if not square:
        return None
    factor = (expected * got).sum().item() / square
    if abs(factor - 1) < 1e-3:
        return None
    return factor if (got - factor * expected).abs().max().item() <= allowed * max(1.0, abs(factor)) else None


def _largest(value: Any) -> float:
    """Of the finite elements: a mask of -inf is no reason to allow anything."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return 0.0
    return _plain(value).nan_to_num(0.0, 0.0, 0.0).abs().max().item()


def merged(rows: list[Row]) -> tuple[Row, ...]:
    """Of each comparison the worst rank's, and which ranks differ. Collective."""
    if meshes.world_size() == 1:
        return tuple(rows)
    by_rank: list[list[Row]] = [[]] * meshes.world_size()
    dist.all_gather_object(by_rank, rows)
    return tuple(_worst(alike) for alike in zip(*by_rank, strict=True))


def _worst(alike: tuple[Row, ...]) -> Row:
    worst = max(alike, key=lambda row: row.severity)
    return replace(worst, ranks=tuple(rank for rank, row in enumerate(alike) if not row.ok))
