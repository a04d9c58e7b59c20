"""Runs the whole parity matrix and rewrites the table in README.md: ``python tests/parity_table.py [--only MODEL]``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import parity_matrix as matrix
import zoo
from parity_matrix import LAYOUTS, OPTIONS
from ranks import RanksFailed

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
from table import rewrite

README = Path(__file__).parents[1] / "README.md"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--only", action="append", choices=list(zoo.CASES), help="a model; the table is only printed")
    chosen = options.parse_args().only
    began, notes = time.monotonic(), Notes()
    rows = [_row(model, notes) for model in chosen or zoo.CASES]
    table = "\n".join([*_head(), *rows, "", *notes.lines(), "", _conditions(time.monotonic() - began)])
    print(table)
    if chosen is None and not notes.wrong and not rewrite(README, table, "parity"):
        print(f"{README} has no <!-- parity --> markers and stays as it is", file=sys.stderr)
    sys.exit(1 if notes.wrong else 0)


class Notes:
    """Why pairs are refused, each reason once, by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self.wrong = False

    def number(self, reason: str) -> int:
        return self._numbers.setdefault(reason, len(self._numbers) + 1)

    def lines(self) -> list[str]:
        return [f"{number}. {reason}" for reason, number in self._numbers.items()]


def _head() -> list[str]:
    titles = ["model", *(layout.title for layout in LAYOUTS)]
    return [f"| {' | '.join(titles)} |", f"| {' | '.join(['---'] * len(titles))} |"]


def _row(model: str, notes: Notes) -> str:
    cells = [_cell(model, layout, notes) for layout in LAYOUTS]
    print(model, *cells, file=sys.stderr, flush=True)
    return f"| {' | '.join([model, *cells])} |"


def _cell(model: str, layout: matrix.Layout, notes: Notes) -> str:
    """How many options equal one device, and the numbers of the reasons why others cannot be."""
    try:
        refused = [why for why in matrix.outcomes(model, [(layout, option) for option in OPTIONS]) if why]
    except RanksFailed as failure:
        notes.wrong = True
        print(failure, file=sys.stderr)
        return "WRONG"
    reasons = sorted({notes.number(why) for why in refused})
    equal = len(OPTIONS) - len(refused)
    parts = [f"{equal} of {len(OPTIONS)}" if refused and equal else "all" if equal else "error"]
    return " ".join([*parts, *(f"({number})" for number in reasons)])


def _conditions(seconds: float) -> str:
    listed = ", ".join(option.title for option in OPTIONS)
    return (
        f"Each cell: {listed}; loss, every gradient, every parameter and buffer after each step, elementwise. "
        f"`make parity` makes this table in {seconds / 60:.0f} minutes on 2 cores."
    )


if __name__ == "__main__":
    main()
