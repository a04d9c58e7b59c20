"""`Messages`: those of one exchange, whose buffers stay while any of them may still arrive.

gloo gives a buffer up with its handle. Bytes that arrive for a receive without a buffer are read by nobody, nor is
anything behind them on that connection: two ranks whose step broke in the middle wait for each other in the next one,
where the network was slow enough. So the handles of an exchange that does not end are kept. They go with the end of
one that began later: every connection keeps its order, so that nothing of the earlier can come any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

_begun: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_left: weakref.WeakKeyDictionary[dist.ProcessGroup, list[tuple[int, list[Any]]]] = weakref.WeakKeyDictionary()
"""Handles of exchanges that did not end, each with the number of those begun when it was let go."""


class Messages:
    """Of one exchange of a group, in which each rank sends to or hears from those it will next exchange with.

    Args:
        group: Its ranks begin their exchanges in the same order.

    Attributes:
        number: Of the exchange in the group, from 1.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        _begun[group] = self.number = _begun.get(group, 0) + 1
        self._group = weakref.ref(group)
        self._handles: dict[int, Any] = {}

    def keep(self, handles: Iterable[Any]) -> None:
        """``handles``: what isend and irecv gave."""
        self._handles |= {id(handle): handle for handle in handles}

    def wait(self, handles: Iterable[Any]) -> None:
        """For some of them, which are then let go with their buffers."""
        for handle in handles:
            handle.wait()
            self._handles.pop(id(handle), None)

    def finish(self) -> None:
        """Waits for all, and ends the exchange."""
        self.wait(list(self._handles.values()))
        self.end()

    def end(self) -> None:
        """All were waited for."""
        self._handles.clear()
        group = self._group()
        if group is not None and group in _left:
            _left[group] = [entry for entry in _left[group] if entry[0] >= self.number]

    def __del__(self) -> None:
        if self._handles and (group := self._group()) is not None:
            _left.setdefault(group, []).append((_begun[group], list(self._handles.values())))


def num_left(group: dist.ProcessGroup) -> int:
    """Exchanges of ``group`` that did not end and whose buffers are kept."""
    return len(_left.get(group, ()))
