"""What lives on process groups, and must learn of it when they are formed again."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist

from nbtrain.parallel import mesh


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


class _Counts:
    rebindables = 0
    resumables = 0  # ranks create what must agree in one order, so that twins have one number
    in_doubt = False


_rebindables: weakref.WeakValueDictionary[int, Rebindable] = weakref.WeakValueDictionary()
_resumables: weakref.WeakValueDictionary[int, Resumable] = weakref.WeakValueDictionary()


def track(thing: Rebindable) -> None:
    """Call ``thing.rebind()`` whenever groups were formed again, as long as it lives."""
    _rebindables[_Counts.rebindables] = thing
    _Counts.rebindables += 1


def tracked() -> list[Rebindable]:
    """What `track` got and is still there."""
    return list(_rebindables.values())


def untrack(thing: Rebindable) -> None:
    """Forget what `track` got."""
    for number in [number for number, known in _rebindables.items() if known is thing]:
        del _rebindables[number]


def in_doubt() -> bool:
    """Whether ranks may have begun different numbers of messages since groups were formed, so that no later one of one
    rank would meet that of another: groups must be formed again."""
    return _Counts.in_doubt


def doubt() -> None:
    """This rank has not ended what others may have ended: groups must be formed again, where ranks agree."""
    _Counts.in_doubt = True


@contextmanager
def together(alone: bool) -> Iterator[None]:
    """Around what ranks do together, unless this one is ``alone``: an interrupt catches each at another place."""
    try:
        yield
    except KeyboardInterrupt:
        _Counts.in_doubt |= not alone
        raise


def track_steps(thing: Resumable, number: int | None = None) -> int:
    """Let ``thing`` agree with its twins on the other ranks. Its number, which they have too.

    Args:
        thing: What takes steps.
        number: Of its twins, where it takes a lost one's place; None takes the next.
    """
    if number is None:
        number = _Counts.resumables
        _Counts.resumables += 1
    _resumables[number] = thing
    return number


def resumables() -> dict[int, Resumable]:
    """What takes steps on this rank, by number."""
    return dict(sorted(_resumables.items()))


def rebind(newcomers: Collection[int] = ()) -> None:
    """Groups were formed again: give them to what lives on them, and bring ranks to one step. Collective.

    Args:
        newcomers: Ranks that have just begun, in the place of dead ones: they have nothing to agree on yet.
    """
    _Counts.in_doubt = False
    reports: list[Any] = [None] * dist.get_world_size()
    standings = {number: thing.standing() for number, thing in resumables().items()}
    dist.all_gather_object(reports, (mesh.standing(), standings, _Counts.resumables))
    meshes, everyone, numbers = zip(*reports, strict=True)
    mesh.carry_over(set.intersection(*map(set, meshes)))
    for number, thing in sorted(_rebindables.items()):
        try:
            thing.rebind()
        except Exception as problem:  # the session must not end with one model; whoever uses it hears of the dead group
            _rebindables.pop(number, None)
            print(f"a model cannot go on with the new process groups; make it again ({problem!r})", file=sys.stderr)
    # a rank that was cut off before it numbered its part, or has just begun, counts on from where the others are
    _Counts.resumables = max(numbers)
    old = [standings for rank, standings in enumerate(everyone) if rank not in newcomers]
    for number in sorted(set.intersection(*map(set, old))):
        if (resumable := _resumables.get(number)) is not None:
            resumable.agree([standings[number] for standings in old])
