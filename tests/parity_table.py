"""Runs the parity matrices and rewrites their tables in README.md.

``python tests/parity_table.py [--table parity|pipelines] [--only MODEL]``
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import parity_matrix
import pipeline_matrix
import pipeline_models
import zoo
from pipeline_matrix import COMPOSITIONS, PIPELINES
from ranks import RanksFailed

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
from table import rewrite

README = Path(__file__).parents[1] / "README.md"


@dataclass(frozen=True)
class Table:
    """One of the README's tables.

    Attributes:
        block: Its name there.
        models: Its rows.
        columns: Its columns.
        outcomes: Of a cell, by model and column: "" or the reason of a refusal, of each of its runs.
        cells: What the runs in a cell are.
    """

    block: str
    models: Sequence[str]
    columns: Sequence[str]
    outcomes: Callable[[str, str], list[str]]
    cells: str


def _data_and_tensor(model: str, column: str) -> list[str]:
    layout = next(layout for layout in parity_matrix.LAYOUTS if layout.title == column)
    return parity_matrix.outcomes(model, [(layout, option) for option in parity_matrix.OPTIONS])


def _pipelines(model: str, column: str) -> list[str]:
    layout = next(layout for layout in (*PIPELINES, *COMPOSITIONS) if layout.title == column)
    cells = pipeline_matrix.pipelines(layout) if layout in PIPELINES else pipeline_matrix.composition(model, layout)
    return pipeline_matrix.outcomes(pipeline_models.CASES[model], cells)


CHECKED = "loss, every gradient, every parameter and buffer after each step, elementwise"
TABLES = {
    "parity": Table(
        "parity",
        list(zoo.CASES),
        [layout.title for layout in parity_matrix.LAYOUTS],
        _data_and_tensor,
        f"Each cell: {', '.join(option.title for option in parity_matrix.OPTIONS)}; {CHECKED}.",
    ),
    "pipelines": Table(
        "pipeline parity",
        list(pipeline_models.CASES),
        [layout.title for layout in (*PIPELINES, *COMPOSITIONS)],
        _pipelines,
        f"pp2 and pp4: by each of {', '.join(pipeline_matrix.SCHEDULES)}. The others: "
        f"{', '.join(option.title for option in pipeline_matrix.OPTIONS)}, each by another schedule, which change from "
        f"row to row; {CHECKED}; and the loss of an evaluation.",
    ),
}


def main() -> None:
    options = _options()
    wrong = False
    for name in options.table or TABLES:
        table = TABLES[name]
        wrong |= _make(table, [model for model in table.models if options.only in (None, model)], options.only is None)
    sys.exit(1 if wrong else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--table", action="append", choices=list(TABLES))
    parser.add_argument("--only", help="a model; the tables are only printed")
    return parser.parse_args()


def _make(table: Table, models: Sequence[str], write: bool) -> bool:
    """Whether something was wrong; then the README keeps its table."""
    began, notes = time.monotonic(), Notes()
    rows = [_row(table, model, notes) for model in models]
    conditions = (
        f"{table.cells} `make parity` makes this table in {(time.monotonic() - began) / 60:.0f} minutes on 2 cores."
    )
    text = "\n".join([*_head(table), *rows, "", *notes.lines(), *[""] * bool(notes.lines()), conditions])
    print(text, flush=True)
    if write and not notes.wrong and not rewrite(README, text, table.block):
        print(f"{README} has no <!-- {table.block} --> markers and stays as it is", file=sys.stderr)
    return notes.wrong


class Notes:
    """Why pairs are refused, each reason once, by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self.wrong = False

    def number(self, reason: str) -> int:
        return self._numbers.setdefault(reason, len(self._numbers) + 1)

    def lines(self) -> list[str]:
        return [f"{number}. {reason}" for reason, number in self._numbers.items()]


def _head(table: Table) -> list[str]:
    titles = ["model", *table.columns]
    return [f"| {' | '.join(titles)} |", f"| {' | '.join(['---'] * len(titles))} |"]


def _row(table: Table, model: str, notes: Notes) -> str:
    cells = [_cell(table, model, column, notes) for column in table.columns]
    print(model, *cells, file=sys.stderr, flush=True)
    return f"| {' | '.join([model, *cells])} |"


def _cell(table: Table, model: str, column: str, notes: Notes) -> str:
    """How many runs equal one device, and the numbers of the reasons why others cannot be."""
    try:
        outcomes = table.outcomes(model, column)
    except RanksFailed as failure:
        notes.wrong = True
        print(model, column, failure, file=sys.stderr)
        return "WRONG"
    refused = [why for why in outcomes if why]
    reasons = sorted({notes.number(why) for why in refused})
    equal = len(outcomes) - len(refused)
    parts = [f"{equal} of {len(outcomes)}" if refused and equal else "all" if equal else "error"]
    return " ".join([*parts, *(f"({number})" for number in reasons)])


if __name__ == "__main__":
    main()
