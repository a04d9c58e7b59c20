"""What a rank does that others must do too: collectives in their order, in branches and loops that are not decided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """A call that waits for all ranks. ``under`` is the line of the condition on the rank that leads to it, or 0."""

    name: str  # torch's, so that two spellings are one
    text: str  # the cell's
    line: int
    under: int
    takes_group: bool = False

    @property
    def key(self) -> object:
        return self.name


@dataclass(frozen=True)
class Exit:
    """Leaving a loop ("break") or a function ("return") where more may come."""

    kind: str
    line: int
    under: int

    @property
    def key(self) -> object:
        return self.kind


@dataclass(frozen=True)
class Failure:
    """What nothing is known behind: an exception, which ends the cell everywhere, or a function that is handed out."""

    key: object = "raise"


@dataclass(frozen=True)
class Part:
    """A branch whose condition is unknown ("if"), a loop ("for"), or a function that is called ("def")."""

    kind: str
    text: str
    line: int
    bodies: tuple[tuple[Item, ...], ...]

    @property
    def key(self) -> object:
        return (self.kind, self.text)


Item = Op | Exit | Failure | Part
Trace = list[Item]


def ops(trace: Iterable[Item]) -> Iterator[Op]:
    """The collectives, at any depth."""
    for item in trace:
        if isinstance(item, Op):
            yield item
        elif isinstance(item, Part):
            for body in item.bodies:
                yield from ops(body)


def leaves(trace: Iterable[Item], past: str) -> bool:
    """Whether the trace may end what is around it: a part of kind ``past`` ("for", "def") keeps its own exits."""
    for item in trace:
        if isinstance(item, Exit):
            return True
        if isinstance(item, Part) and item.kind != past and any(leaves(body, past) for body in item.bodies):
            return True
    return False
