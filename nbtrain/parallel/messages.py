"""`Messages`: those of one exchange, which have a tag of their own, and whose buffers stay while any may still arrive.

Ranks number the exchanges of a group as they begin them, so that none is taken for another. Where one breaks, some may
have begun more than others. So steps begin a round: a number that is the same on all that have begun as many steps.
Where a rank has not, the session sees it in `numbers`, and forms groups again.

gloo gives a buffer up with its handle. Bytes that arrive for a receive without a buffer are read by nobody, nor is
anything behind them on that connection: two ranks whose step broke in the middle wait for each other in the next one,
where the network was slow enough. So the handles of an exchange that does not end are kept. They go with the end of
one that began later: every connection keeps its order, so that nothing of the earlier can come any more.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Hashable, Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

ROUND = 2**11
"""Exchanges that a round has room for; with more, the next one begins later."""

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

    def tag(self, kind: Hashable) -> int:
        """Of its messages.

        Args:
            kind: What they carry, and how much: gloo ends the process where a message meets room of another size.
        """
        return zlib.crc32(repr(kind).encode()) % 2**9 * 2**22 + self.number % 2**22

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


def begin_round(groups: Iterable[dist.ProcessGroup]) -> None:
    """The exchanges that follow are numbered alike on all ranks that have begun as many rounds."""
    for group in groups:
        _begun[group] = (_begun.get(group, 0) // ROUND + 1) * ROUND


def numbers() -> dict[str, int]:
    """Of the last exchange that this rank has begun in each of its groups, by the group's name."""
    everyone: Any = c10d._world
    return {group.group_name: _begun.get(group, 0) for group in everyone.pg_map if group.size() > 1}


def num_left(group: dist.ProcessGroup) -> int:
    """Exchanges of ``group`` that did not end and whose buffers are kept."""
    return len(_left.get(group, ()))
