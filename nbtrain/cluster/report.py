"""Small tables for a person, as text in a terminal and as HTML in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from IPython.core.getipython import get_ipython
from IPython.display import display

from nbtrain.cluster.failures import ranks_text, were
from nbtrain.cluster.ranks import compact
from nbtrain.plan.footprint import format_bytes


@dataclass(frozen=True)
class Table:
    """``rows`` under ``columns``, behind a headline. Columns without any value are left away."""

    headline: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def __repr__(self) -> str:
        if not self.rows:
            return self.headline
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in self._with_header()]
        return "\n".join([self.headline, *(line.rstrip() for line in lines)])

    def _with_header(self) -> list[tuple[str, ...]]:
        return [self.columns, *self.rows]

    def _repr_html_(self) -> str:
        return f"<div>{html.escape(self.headline)}</div>{self.table()}"

    def table(self) -> str:
        """The rows as HTML, without the headline."""
        head = "".join(f"<th style='text-align:left'>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if self.rows else ""

    def show(self) -> None:
        """Display it in the notebook, or print it."""
        if get_ipython() is None:
            print(repr(self))
        else:
            display(self)


class Status(Table):
    """The ranks of a session."""

    def __init__(self, headline: str, rows: list[dict[str, str]]) -> None:
        columns = tuple(name for name in (rows[0] if rows else {}) if any(row[name] for row in rows))
        super().__init__(headline, columns, [tuple(row[name] for name in columns) for row in rows])


class Holdings(Table):
    """What each rank holds of the modules that were just parallelized.

    ``holdings`` is by rank, then by module name, and then what `nbtrain.parallel.holdings.holdings` gives.
    """

    SHOWN: ClassVar = ("layout", "local_parameters", "parameters_bytes", "buffers_bytes")

    def __init__(self, holdings: dict[int, dict[str, dict[str, Any]]]) -> None:
        rows = [
            (name, str(rank), *(_text(key, held[key]) for key in self.SHOWN))
            for rank, by_name in holdings.items()
            for name, held in by_name.items()
        ]
        plan = next(iter(next(iter(holdings.values())).values()))["plan"]
        columns = ("module", "rank", "layout", "parameters held", "parameter memory", "buffer memory")
        super().__init__(f"What each rank holds under {plan}:", columns, sorted(rows))


@dataclass(frozen=True)
class Healing:
    """What came of replacing ``ranks``.

    ``reports`` are by rank, as `nbtrain.parallel.heal.heal` gives them; ``notes`` say what failed in the replay.
    """

    ranks: list[int]
    seconds: float
    reports: list[dict[str, Any]]
    notes: list[str]
    replayed: bool

    def __repr__(self) -> str:
        lines = [f"{ranks_text(self.ranks)} {were(self.ranks)} replaced in {self.seconds:.1f} s", *self.notes]
        if not self.reports:
            lines.append("what the ranks held is gone")
        own = [self.reports[rank] for rank in self.ranks if self.reports]
        healed = _union(report["healed"] for report in own)
        if healed:
            go = "goes" if len(healed) == 1 else "go"
            lines.append(f"{', '.join(healed)} {go} on as if nothing had happened")
        lost = {name: reason for report in own for name, reason in report["lost"].items()}
        lines += [f"{name} is lost: {reason}" for name, reason in lost.items()]
        if reset := _union(report["reset"] for report in own):
            lines.append(f"set to what a cell first gave them, and other now elsewhere: {', '.join(reset)}")
        missing = _union(report["missing"] for report in own)
        if missing:
            where = f"%%distributed -r {compact(self.ranks)}"
            lines.append(f"not there: {', '.join(missing)}")
            lines.append(f"  (run a cell that loads or computes with {where}; one in which ranks talk, on all ranks)")
        if not self.replayed:
            lines.append("with --replay, imports, functions and classes of earlier cells would be there too")
        return "\n".join(lines)

    def show(self) -> None:
        print(repr(self))


def _union(lists: Iterable[list[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


def _text(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
