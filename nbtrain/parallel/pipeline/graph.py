"""Which weights' gradients can wait, when a backward is taken apart into those of inputs and those of weights.

torch starts the second part where the paths from a weight meet those from an input. It is right where each weight has
one such place: several of them lie on each other's ways, their graphs are run twice, and what leads to an output that
depends on no input is lost. Gradients of other weights come with those of inputs; then these weights are inputs, too,
and their paths count::

    tokens -> x -+-> attend(x, context) -> output        'tokens' meets 'context' in two places: q, and the sum
                 +-------------------------> +
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

_WHOLE = ("CheckpointFunctionBackward",)
"""Nodes that torch can only run in a whole backward: reentrant checkpoints."""

Users = Mapping[Any, list[Any]]
"""For each node of a graph those that use its output."""


def eager(
    roots: Collection[torch.Tensor], inputs: Collection[torch.Tensor], weights: Collection[nn.Parameter]
) -> list[nn.Parameter]:
    """Those of ``weights`` whose gradients come with those of ``inputs``.

    Args:
        roots: What backward starts from; no leaves.
        inputs: Leaves that require gradients.
        weights: Too.
    """
    starts = {root.grad_fn for root in roots}
    users = _users(starts)
    if any(node.name() in _WHOLE for node in users):
        return list(weights)
    nodes = {node: weight for weight in weights if (node := _accumulator(weight)) in users}
    covered = _upward({_accumulator(tensor) for tensor in inputs} & users.keys(), users)
    found: list[nn.Parameter] = []
    while joined := [node for node in nodes if not _meets_once(node, covered, starts, users)]:
        found += [nodes.pop(node) for node in joined]
        covered |= _upward(joined, users)
    return found


def _accumulator(leaf: torch.Tensor) -> Any:
    return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]  # it requires a gradient


def _users(starts: Collection[Any]) -> Users:
    """Of all nodes below ``starts``."""
    users: dict[Any, list[Any]] = {node: [] for node in starts}
    waiting = list(starts)
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            if following not in users:
                users[following] = []
                waiting.append(following)
            users[following].append(node)
    return users


def _upward(nodes: Collection[Any], users: Users) -> set[Any]:
    return set(_walk(nodes, users, set()))


def _meets_once(node: Any, covered: set[Any], starts: set[Any], users: Users) -> bool:
    """Whether all ways up from ``node`` come to the same node of ``covered`` first."""
    met: set[Any] = set()
    for passed in _walk([node], users, covered):
        if passed in covered:
            met.add(passed)
        elif passed in starts:
            return False
        if len(met) > 1:
            return False
    return len(met) == 1


def _walk(nodes: Collection[Any], users: Users, ends: set[Any]) -> Iterator[Any]:
    """``nodes`` and what is above them, no further than ``ends``."""
    seen, waiting = set(nodes), list(nodes)
    while waiting:
        yield (node := waiting.pop())
        if node in ends:
            continue
        for user in users[node]:
            if user not in seen:
                seen.add(user)
                waiting.append(user)
