"""The benchmarks' table, and its place in the README."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from measure import Row

HEADINGS = ("", "nbtrain", "peers, same run", "result", "target", "")
REACHED = {True: "reached", False: "missed", None: ""}


def render(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    cells = [HEADINGS, ("---",) * len(HEADINGS), *(_cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def conditions() -> str:
    """What the benchmarks' numbers mean."""
    return (
        "Medians, with the middle half in brackets (the extremes where there are fewer than 8 samples), "
        f"{conditions_text()} nbdistributed gets its first cell when its "
        "workers have connected; one that is sent sooner is lost. `make benchmarks` measures again."
    )


def conditions_text() -> str:
    """What numbers were taken on."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "ipyparallel", "ipykernel"))
    return (
        f"on {len(os.sched_getaffinity(0))} shared CPU cores without a GPU; Python {platform.python_version()}, "
        f"{packages}; {datetime.date.today():%Y-%m-%d}."
    )


def rewrite(path: Path, table: str, name: str = "benchmarks") -> bool:
    """Put ``table`` between the markers ``<!-- name -->`` of ``path``; False if it has none."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    text = path.read_text() if path.exists() else ""
    if begin not in text or end not in text:
        return False
    before, _, rest = text.partition(begin)
    path.write_text(f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}")
    return True


def _cells(row: Row) -> tuple[str, ...]:
    return row.what, row.ours, row.peers, row.result, row.target, REACHED[row.met]
