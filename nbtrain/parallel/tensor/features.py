"""Which features of which layers must be on one rank: connected components.

Each input and output feature of each linear layer is a node. An operation that computes one number from several
features joins them. What is in one component cannot be cut apart: a head of queries with its keys and values, a feature
of a gated MLP with its gate. Node 0 stands for what is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Labels = npt.NDArray[np.int64]


@dataclass
class Features:
    """Nodes and what joins them."""

    size: int = 1
    edges: list[Tensor] = field(default_factory=list)

    def new(self, count: int) -> Tensor:
        """Nodes that nothing joins yet. (count,)"""
        self.size += count
        return torch.arange(self.size - count, self.size, device="cpu")

    def join(self, one: Tensor, other: Tensor) -> int:
        """Each node with the one at its place in the other tensor, which broadcast; returns how many pairs differ."""
        shape = np.broadcast_shapes(tuple(one.shape), tuple(other.shape))
        left, right = _distinct(one.expand(shape), other.expand(shape))
        differ = left != right
        keys = torch.unique(left[differ] * self.size + right[differ])
        if len(keys):
            self.edges.append(torch.stack((keys // self.size, keys % self.size)))
        return len(keys)

    def join_along(self, nodes: Tensor, dims: Iterable[int]) -> int:
        """All nodes along these dims."""
        return sum(self.join(nodes, nodes.narrow(dim, 0, 1)) for dim in dims if nodes.shape[dim] and nodes.stride(dim))

    def components(self) -> Labels:
        """For each node the smallest node of its component. (size,)"""
        labels = np.arange(self.size)
        if not self.edges:
            return labels
        left, right = torch.cat(self.edges, 1).numpy()
        while True:
            lowest = np.minimum(labels[left], labels[right])
            if (lowest == labels[left]).all() and (lowest == labels[right]).all():
                return labels
            for ends in (left, right):
                np.minimum.at(labels, labels[ends], lowest)
            while (labels[labels] != labels).any():
                labels = labels[labels]


def _distinct(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Without dims along which both only repeat: samples and tokens."""
    for dim, strides in enumerate(zip(one.stride(), other.stride(), strict=True)):
        if strides == (0, 0) and one.shape[dim] > 1:
            one, other = one.narrow(dim, 0, 1), other.narrow(dim, 0, 1)
    return one, other


def pieces(sides: list[Labels], degree: int) -> list[Labels] | None:
    """For each feature of each side, the rank that holds it; None where ``degree`` cannot divide them.

    Components are counted in the order in which they come, among those that occur on the same sides.

    Args:
        sides: Components of each side's features.
    """
    where: dict[int, list[int]] = {}
    for at, side in enumerate(sides):
        for component in dict.fromkeys(side.tolist()):
            where.setdefault(component, []).append(at)
    groups: dict[tuple[int, ...], list[int]] = {}
    for component, on in where.items():
        groups.setdefault(tuple(on), []).append(component)
    if any(len(group) % degree for group in groups.values()):
        return None
    rank = {one: at * degree // len(group) for group in groups.values() for at, one in enumerate(group)}
    return [np.array([rank[one] for one in side.tolist()]) for side in sides]


def segments(ranks: Labels, degree: int) -> tuple[int, ...] | None:
    """Sizes of segments of which each rank has one of ``degree`` equal pieces in order; None where there are none."""
    starts = np.flatnonzero(np.diff(ranks, prepend=-1))
    runs = list(zip(ranks[starts].tolist(), np.diff(starts, append=len(ranks)).tolist(), strict=True))
    found = [runs[at : at + degree] for at in range(0, len(runs), degree)]
    fits = all(
        [rank for rank, _ in run] == list(range(degree)) and len({size for _, size in run}) == 1 for run in found
    )
    return tuple(run[0][1] * degree for run in found) if fits else None


def num_groups(sides: list[Labels]) -> int:
    """How many components the sides can at most be cut into equally: what ``degree`` must divide."""
    count = [len(np.unique(side)) for side in sides]
    return int(np.gcd.reduce(count))
