"""How many ranks each axis takes: degrees that multiply to the world size."""

from __future__ import annotations

import math
from collections.abc import Mapping

from nbtrain.errors import PlanError

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""Outermost first: tensor-parallel peers are neighbours, since they talk most."""


def fill(degrees: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Concrete degrees, the -1 among them replaced by the ranks that are left.

    Args:
        degrees: A degree for each of `AXES`; at most one is -1.
        world_size: The number of ranks, at least 1.

    Raises:
        PlanError: The degrees do not multiply to ``world_size``; the message lists single changes that do.
    """
    if world_size < 1:
        raise PlanError(f"world_size={world_size} must be at least 1")
    known = math.prod(degree for degree in degrees.values() if degree != -1)
    left, remainder = divmod(world_size, known)
    filled = {axis: left if degree == -1 else degree for axis, degree in degrees.items()}
    if remainder or math.prod(filled.values()) != world_size:
        raise PlanError(_misfit(degrees, known, world_size))
    return filled


def _misfit(degrees: Mapping[str, int], known: int, world_size: int) -> str:
    factors = [f"{axis}={degree}" for axis, degree in degrees.items() if degree not in (1, -1)]
    product = f"{' * '.join(factors)} = {known}" if len(factors) > 1 else "".join(factors) or "1"
    relation = "does not divide" if -1 in degrees.values() else "is not"
    fits = _single_changes(degrees, world_size)
    cure = f"one of these fits: {'; '.join(fits)}" if fits else f"type dp_replicate=1,dp_shard={world_size},tp=1,pp=1"
    return f"{product} {relation} the {world_size} ranks there are; {cure}"


def _single_changes(degrees: Mapping[str, int], world_size: int) -> list[str]:
    """``"tp from 1, 2, 4"`` for each axis that alone can make the product fit."""
    changes = []
    for axis, degree in degrees.items():
        others = math.prod(other for name, other in degrees.items() if name != axis and other != -1)
        if degree == -1 or world_size % others:
            continue
        quotient = world_size // others
        free = any(other == -1 for name, other in degrees.items() if name != axis)
        changes.append(f"{axis} from {_listed(divisors(quotient))}" if free else f"{axis}={quotient}")
    return changes


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, smallest first."""
    small = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
    return small + [number // factor for factor in reversed(small) if factor * factor != number]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
