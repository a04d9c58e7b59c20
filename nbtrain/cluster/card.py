"""The hang card: under a silent cell, who waits for whom; a line that says so in the past when the cell has gone on."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from nbtrain.cluster import buttons
from nbtrain.cluster.hang import Where
from nbtrain.cluster.sinks import PlainSink, Sink

_numbers = itertools.count()
# The page's own colours, where it has them: light or dark.
_STYLE = """<style>
.nbtrain-card {margin: 4px 0; padding: 8px 12px; max-width: 1100px; overflow-x: auto; border-radius: 3px;
  border: 1px solid var(--jp-border-color2, rgba(128, 128, 128, 0.4));
  border-left: 4px solid var(--jp-warn-color1, rgb(230, 119, 0));
  font: var(--jp-ui-font-size1, 13px)/1.45 var(--jp-ui-font-family, sans-serif);
  color: var(--jp-ui-font-color1, inherit)}
.nbtrain-card ul {margin: 4px 0; padding-left: 18px}
.nbtrain-card table {border-collapse: collapse; margin: 8px 0 4px 0}
.nbtrain-card th, .nbtrain-card td {text-align: left !important; vertical-align: top; border: none;
  padding: 2px 16px 2px 0 !important; background: none !important; color: inherit;
  font-size: var(--jp-code-font-size, 12px)}
.nbtrain-card :is(th, td):nth-child(-n + 2) {white-space: nowrap}
.nbtrain-card.nbtrain-past {border-left-color: var(--jp-border-color1, rgba(128, 128, 128, 0.6))}
.nbtrain-card th, .nbtrain-card .nbtrain-todo {font-weight: 400; color: var(--jp-ui-font-color2, inherit)}
.nbtrain-card td {font-family: var(--jp-code-font-family, monospace)}
</style>"""


class Card:
    """One card in ``sink``. ``ask`` is told what its buttons ask for: a verb, and a rank or -1."""

    def __init__(self, sink: Sink, ask: Callable[[str, int], None]) -> None:
        self._sink = sink
        self._ask = ask
        self._id = f"nbtrain-card-{next(_numbers)}"
        self._shown = False
        self._bar: buttons.Bar | None = None

    def show(self, where: Where, absent: Sequence[int]) -> None:
        """Show ``where``, or bring the card up to date. ``absent`` are the ranks that one may want to restart."""
        self._put({"text/plain": repr(where), "text/html": _card(where)})
        if self._bar is None:
            self._bar = buttons.show(self._sink, f"{self._id}-buttons", absent, self._ask)
        else:
            self._bar.update(absent)

    def put_away(self, line: str) -> None:
        """Leave one line in its place: a saved notebook shows what was."""
        if self._bar is not None:
            self._bar.close()
        past = f"{_STYLE}<div class='nbtrain-card nbtrain-past'>{html.escape(line)}</div>"
        self._put({"text/plain": line, "text/html": past})

    def _put(self, data: dict[str, Any]) -> None:
        if self._shown and isinstance(self._sink, PlainSink):
            return  # what is printed stays
        self._sink.display(data, {}, self._id, update=self._shown)
        self._shown = True


def _card(where: Where) -> str:
    head, *rest = where.headline.splitlines()
    facts = "".join(f"<li>{html.escape(finding)}</li>" for finding in where.findings)
    todo = "".join(f"<div class='nbtrain-todo'>{html.escape(line)}</div>" for line in [*rest, *where.advice])
    return f"{_STYLE}<div class='nbtrain-card'><b>{html.escape(head)}</b><ul>{facts}</ul>{where.table()}{todo}</div>"
