"""Which numbers of a file a tensor can take."""

from __future__ import annotations

import torch


def fits(saved: torch.dtype, own: torch.dtype) -> bool:
    """Whether numbers stay what they are, but for the rounding of floating-point ones: 300 is no int8, 2.7 no int64."""
    if saved == own:
        return True
    if _kind(saved) != _kind(own):
        return False
    if _kind(saved) != "integer":
        return True
    before, after = torch.iinfo(saved), torch.iinfo(own)
    return after.min <= before.min and before.max <= after.max


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating-point"
    return "bool" if dtype == torch.bool else "integer"
