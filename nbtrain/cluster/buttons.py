"""The hang card's buttons, where the notebook has anywidget; elsewhere the card says what to type.

ipywidgets' own buttons speak to the kernel over the channel that the running cell blocks. These ask over the control
channel, which the kernel serves by a thread of its own.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from IPython.core.getipython import get_ipython

from nbtrain.cluster.sinks import CellSink, Sink

MAX_RANKS = 8  # buttons
REQUEST = "nbtrain_request"


class Bar:
    """A row of buttons: Interrupt, and Restart for each of ``ranks``."""

    def __init__(self, sink: Sink, display_id: str, ranks: Sequence[int]) -> None:
        self._sink = sink
        self._id = display_id
        self._widget = _widget_class()(ranks=list(ranks[:MAX_RANKS]))
        view = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
        sink.display({"application/vnd.jupyter.widget-view+json": view, "text/plain": ""}, {}, display_id, update=False)

    def update(self, ranks: Sequence[int]) -> None:
        """Offer to restart these."""
        self._widget.ranks = list(ranks[:MAX_RANKS])

    def close(self) -> None:
        """Remove the buttons."""
        self._sink.display({"text/plain": ""}, {}, self._id, update=True)
        self._widget.close()


def show(sink: Sink, display_id: str, ranks: Sequence[int], ask: Callable[[str, int], None]) -> Bar | None:
    """Show buttons that call ``ask(verb, rank)`` on the kernel's control thread; None where there can be none."""
    kernel = getattr(get_ipython(), "kernel", None)
    if not isinstance(sink, CellSink) or kernel is None or importlib.util.find_spec("anywidget") is None:
        return None

    def answer(stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        ask(parent["content"]["verb"], int(parent["content"]["rank"]))

    kernel.control_handlers[REQUEST] = answer
    return Bar(sink, display_id, ranks)


@functools.cache
def _widget_class() -> Any:
    import anywidget
    import traitlets

    class HangButtons(anywidget.AnyWidget):
        _esm = Path(__file__).with_suffix(".js")
        _css = Path(__file__).with_suffix(".css")
        ranks = traitlets.List(traitlets.Int()).tag(sync=True)

    return HangButtons
