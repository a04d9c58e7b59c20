"""`Counters`: the numbers that a block keeps as plain attributes, for one forward and what runs it again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

_ABSENT = object()
_KINDS = (int, float, bool)


class Counters:
    """Of ``block`` and the modules inside: ``self.calls += 1`` in a forward that uses it.

    Args:
        block: Changed nowhere but inside `untouched`.
    """

    def __init__(self, block: nn.Module) -> None:
        self._modules = list(block.modules())
        self._before: list[tuple[nn.Module, dict[str, Any]]] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """For the first forward: finds what it changes."""
        held = [_numbers(vars(module)) for module in self._modules]
        yield
        changes = [_changes(numbers, vars(module)) for module, numbers in zip(self._modules, held, strict=True)]
        self._before = [pair for pair in zip(self._modules, changes, strict=True) if pair[1]]

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """For the next ones: they begin with what the first one did, and leave no trace."""
        now = [(module, {name: vars(module).get(name, _ABSENT) for name in names}) for module, names in self._before]
        _put(self._before)
        try:
            yield
        finally:
            _put(now)


def _numbers(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if type(value) in _KINDS}


def _changes(before: dict[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
    """What changed or is new had before."""
    new = {name: _ABSENT for name in _numbers(attributes) if name not in before}
    return new | {name: value for name, value in before.items() if attributes.get(name, _ABSENT) != value}


def _put(values: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    # past nn.Module's __setattr__, and a block's own
    for module, attributes in values:
        for name, value in attributes.items():
            if value is _ABSENT:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = value
