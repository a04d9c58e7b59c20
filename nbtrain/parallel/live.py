"""What lives on process groups, and must learn of it when they are formed again."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch.distributed as dist


class Grouped:
    """A module that talks to the data-parallel ranks."""

    def regroup(self, group: dist.ProcessGroup) -> None:
        """Talk by ``group`` from now on."""
        raise NotImplementedError


class Rebindable(Protocol):
    """Holds process groups."""

    def rebind(self) -> None:
        """Take the groups that exist now. Moves nothing: ranks may hold different things."""


class Resumable(Protocol):
    """Takes steps that all ranks must end together."""

    def standing(self) -> Any:
        """How far this rank is: small, picklable, and what `agree` needs of the others."""

    def agree(self, standings: list[Any]) -> None:
        """End what another rank has ended, or begin again; ``standings`` are by rank."""


_numbers = itertools.count()
_rebindables: weakref.WeakValueDictionary[int, Rebindable] = weakref.WeakValueDictionary()
_resumables: weakref.WeakValueDictionary[int, Resumable] = weakref.WeakValueDictionary()


def track(thing: Rebindable) -> None:
    """Call ``thing.rebind()`` whenever groups were formed again, as long as it lives."""
    _rebindables[next(_numbers)] = thing


def track_steps(thing: Resumable) -> None:
    """Let ``thing`` agree with its twins on the other ranks. They are numbered: ranks create them in one order."""
    _resumables[next(_numbers)] = thing


def rebind() -> None:
    """Groups were formed again: give them to what lives on them, and bring ranks to one step. Collective."""
    for number in sorted(_rebindables):
        if (thing := _rebindables.get(number)) is not None:
            thing.rebind()
    standings = {number: thing.standing() for number, thing in _resumables.items()}
    everyone: list[dict[int, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, standings)
    for number in sorted(set.intersection(*map(set, everyone))):
        if (resumable := _resumables.get(number)) is not None:
            resumable.agree([rank[number] for rank in everyone])
