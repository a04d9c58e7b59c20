"""Blocks that are alike: of each kind one is run to find the shapes that all of them give.

Units are of one kind where their modules are: classes, modes, parameters, buffers and every other attribute. What only
an instance has, hooks or a forward of its own, is of one kind with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

KEPT_RUNS = 1024
_SIMPLE = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class Ran:
    """What a unit's forward without weights was.

    Attributes:
        output: Of tensors without meaning.
        kept: Tensors that it left as attributes, by the module's name inside of the unit and the attribute's.
        cost: Floating-point operations.
        random: Whether it drew random numbers.
    """

    output: Any
    kept: dict[tuple[str, str], torch.Tensor]
    cost: float
    random: bool


class Alike:
    """Remembers runs of units."""

    def __init__(self) -> None:
        self._runs: dict[Hashable, Ran] = {}

    def run(self, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Ran]) -> Ran:
        """What ``run()`` gives, which runs ``unit``, or gave for one that is alike, in the same modes.

        Args:
            unit: As it is now.
            args: That it gets.
            kwargs: Too.
        """
        kind, given = _kind(unit), _shapes((args, kwargs))
        key = kind, given
        if given is not None and (known := self._runs.get(key)) is not None:
            return known
        ran = run()
        # one that has changed may do something else the next time
        if given is not None and _shapes(ran.output) is not None and _kind(unit) == kind:
            if len(self._runs) >= KEPT_RUNS:
                self._runs.clear()
            self._runs[key] = ran
        return ran


@dataclass(frozen=True, eq=False)
class _Itself:
    """Equal to another of the same object, which it keeps: an address is its own only as long as it lives."""

    held: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


def _kind(unit: nn.Module) -> Hashable:
    return tuple((name, type(module), _attributes(module)) for name, module in unit.named_modules())


def _attributes(module: nn.Module) -> Hashable:
    """Equal for equal ones; what is neither a tensor nor plain is equal to itself."""
    found: list[Any] = []
    for name, value in vars(module).items():
        if name != "_modules":  # they have attributes of their own
            leaves, form = tree_flatten(_opened(value))
            found += [name, str(form), *(_shapes(leaf) or _Itself(leaf) for leaf in leaves)]
    return tuple(found)


def _opened(value: Any) -> Any:
    """Containers that torch's trees do not open, as those that they do."""
    if isinstance(value, dict):
        return dict(value)
    return sorted(map(repr, value)) if isinstance(value, set | frozenset) else value


def _shapes(value: Any) -> Hashable | None:
    """What can be compared of tensors and plain values in any form; None where there is anything else."""
    leaves, form = tree_flatten(value)
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append((tuple(leaf.shape), leaf.stride(), leaf.dtype))
        elif isinstance(leaf, _SIMPLE):
            found.append((type(leaf), leaf))
        else:
            return None
    return str(form), tuple(found)
