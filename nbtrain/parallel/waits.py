"""What a rank waits in and torch's flight recorder does not see: messages between CPUs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_now: list[dict[str, Any]] = []


@contextmanager
def waited(
    op: str, group: str, ranks: Sequence[int], seq: int, tensors: Sequence[torch.Tensor], since: float, told: str = ""
) -> Iterator[None]:
    """What is waited for inside is in `waiting`.

    Args:
        op: The operation.
        group: Its name: those who wait under one name wait for each other.
        ranks: Of the group.
        seq: The operation's number in it; torch counts its own collectives by themselves.
        tensors: That move.
        since: When it was begun, in seconds since the epoch.
        told: The whole in words, in the place of operation, number and tensors.
    """
    sizes = [list(tensor.shape) for tensor in tensors]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    entry = {"op": op, "group": group, "ranks": list(ranks), "seq": seq, "sizes": sizes, "dtypes": dtypes}
    _now.append({**entry, "since": since, "told": told, "by": "messages"})
    try:
        yield
    finally:
        _now.pop()


def waiting() -> list[dict[str, Any]]:
    """What this rank waits in now, from any thread.

    Each with ``op``, ``group`` (its name), ``ranks`` (of the group), ``seq``, ``sizes``, ``dtypes``, ``told``,
    ``waits_s``, and ``by``, which is "messages".
    """
    return [{**entry, "waits_s": time.time() - entry["since"]} for entry in list(_now)]
