"""The benchmarks' table, and its place in the README."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from measure import Row

OPEN, CLOSE = "<!-- benchmarks -->", "<!-- /benchmarks -->"
HEADINGS = ("", "nbtrain", "peers, same run", "result", "target", "")
REACHED = {True: "reached", False: "missed", None: ""}


def render(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    cells = [HEADINGS, ("---",) * len(HEADINGS), *(_cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def conditions() -> str:
    """What the numbers were taken on."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "ipyparallel", "ipykernel"))
    return (
        f"Medians, with the middle half in brackets (the extremes where there are fewer than 8 samples), on "
        f"{len(os.sched_getaffinity(0))} shared CPU cores without a GPU; Python {platform.python_version()}, "
        f"{packages}; {datetime.date.today():%Y-%m-%d}. nbdistributed gets its first cell when its "
        "workers have connected; one that is sent sooner is lost. `make benchmarks` measures again."
    )


def rewrite(path: Path, table: str) -> bool:
    """Put ``table`` between the markers of ``path``; False if it has none."""
    text = path.read_text() if path.exists() else ""
    if OPEN not in text or CLOSE not in text:
        return False
    before, _, rest = text.partition(OPEN)
    path.write_text(f"{before}{OPEN}\n{table}\n{CLOSE}{rest.partition(CLOSE)[2]}")
    return True


def _cells(row: Row) -> tuple[str, ...]:
    return row.what, row.ours, row.peers, row.result, row.target, REACHED[row.met]
