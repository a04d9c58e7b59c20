"""What every benchmark shares: repeated samples of several contenders in turn, process memory, and a table's row."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one thing."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def text(self, unit: str, digits: int = 1, scale: float = 1.0) -> str:
        """The median with the quartiles, or with the extremes of few samples: ``"3.9 s (3.8 to 4.1)"``."""
        low, high = self._spread()
        shown = [f"{value * scale:.{digits}f}" for value in (self.median, low, high)]
        return f"{shown[0]} {unit}" + (f" ({shown[1]} to {shown[2]})" if shown[1] != shown[2] else "")

    def _spread(self) -> tuple[float, float]:
        if len(self.values) < 8:
            return min(self.values), max(self.values)
        quartiles = statistics.quantiles(self.values, n=4)
        return quartiles[0], quartiles[2]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: What is measured.
        ours: nbtrain's number.
        peers: The peers' numbers.
        result: What the target is about, as measured.
        target: What it should be.
        met: Whether it is; None where there is nothing to compare.
    """

    what: str
    ours: str
    peers: str
    result: str
    target: str
    met: bool | None


def interleave(rounds: int, *measures: Callable[[], float]) -> list[Samples]:
    """Each of ``measures`` once a round, every other round in reverse order: a drift of the machine hits all alike."""
    taken: list[list[float]] = [[] for _ in measures]
    for index in range(rounds):
        order = range(len(measures))
        for contender in reversed(order) if index % 2 else order:
            taken[contender].append(measures[contender]())
    return [Samples(tuple(values)) for values in taken]


def ratio(ours: Samples, theirs: Samples) -> Samples:
    """Ours over theirs, round by round."""
    return Samples(tuple(a / b for a, b in zip(ours.values, theirs.values, strict=True)))


def at_most(measured: float, bound: float) -> bool:
    """Whether a target is met at the precision that the table shows."""
    return round(measured, 2) <= bound


def pss_bytes(pids: Sequence[int]) -> list[int]:
    """Proportional set size of each process: a page that k processes share counts 1/k in each."""
    return [_pss(Path(f"/proc/{pid}/smaps_rollup").read_text()) for pid in pids]


def _pss(rollup: str) -> int:
    kibibytes = next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:"))
    return int(kibibytes) * 1024
