"""Plain values of a notebook's names, which a rank that takes a dead one's place can have from the others."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from nbtrain.errors import SessionError

MAX_BYTES = 1 << 20  # of a value; larger ones are data, which cells load
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, set, frozenset)


def plain_values(namespace: Mapping[str, Any]) -> dict[str, bytes]:
    """Pickles of the numbers, texts and containers of them that the user's names are bound to."""
    found = {}
    for name, value in list(namespace.items()):
        if not name.startswith("_") and _is_plain(value) and len(data := pickle.dumps(value)) <= MAX_BYTES:
            found[name] = data
    return found


def agreed(values: list[dict[str, bytes]]) -> dict[str, bytes]:
    """What is the same on all of the ranks that ``values`` are from."""
    first, *others = values
    return {name: data for name, data in first.items() if all(other.get(name) == data for other in others)}


class Lost:
    """Is bound to the name of something that could not be healed, and says so when it is used."""

    def __init__(self, reason: str) -> None:
        object.__setattr__(self, "_reason", reason)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        raise SessionError(self._reason)

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise SessionError(self._reason)

    def __repr__(self) -> str:
        return f"<lost: {self._reason}>"


def _is_plain(value: Any, depth: int = 0) -> bool:
    if isinstance(value, _SCALARS):
        return type(value) in _SCALARS
    if depth > 8:
        return False
    if type(value) is dict:
        return all(_is_plain(part, depth + 1) for pair in value.items() for part in pair)
    return type(value) in _CONTAINERS and all(_is_plain(part, depth + 1) for part in value)
