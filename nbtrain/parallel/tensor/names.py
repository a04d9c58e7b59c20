"""Tensors that carry, for each element, the name of the feature on which it depends (`features.Features`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

_NAME = "_nbtrain_features"


def nodes_of(value: Any) -> Tensor | None:
    found: Tensor | None = getattr(value, _NAME, None) if isinstance(value, Tensor) else None
    return found


def set_nodes(tensor: Tensor, nodes: Tensor) -> None:
    setattr(tensor, _NAME, nodes.expand(tensor.shape))


def shared(value: Tensor, nodes: Tensor) -> list[int]:
    """Dims of ``nodes`` along which both it and the aligned ``value`` vary."""
    shift = nodes.ndim - value.ndim
    dims = range(max(shift, 0), nodes.ndim)
    return [dim for dim in dims if value.shape[dim - shift] > 1 and varies(nodes, dim)]


def shape_of(have: list[Tensor]) -> tuple[int, ...]:
    return np.broadcast_shapes(*(tuple(nodes.shape) for nodes in have))


def varies(nodes: Tensor, dim: int) -> bool:
    return nodes.shape[dim] > 1 and nodes.stride(dim) > 0 and bool((nodes != nodes.narrow(dim, 0, 1)).any())


def tensors(value: Any) -> Iterable[Tensor]:
    """In nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
