"""Where a cell's output goes: into the cell of the notebook that it belongs to, whichever cell runs now."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from IPython.core.getipython import get_ipython
from IPython.display import publish_display_data


class Sink(Protocol):
    """A place for output."""

    def stream(self, name: str, text: str) -> None: ...

    def display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, *, update: bool
    ) -> None: ...

    def clear(self, *, wait: bool) -> None: ...


class CellSink:
    """Publishes with the header of one cell's request as parent, from any thread.

    The front end files each message under the cell that its parent names. `sys.stdout` would name the cell that runs
    now, and ipyparallel's own streaming republishes the whole text at each chunk.
    """

    def __init__(self, kernel: Any, parent: dict[str, Any]) -> None:
        self.kernel = kernel
        self.parent = parent

    def stream(self, name: str, text: str) -> None:
        self._send("stream", {"name": name, "text": text})

    def display(self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, *, update: bool) -> None:
        kind = "update_display_data" if update else "display_data"
        transient = {"display_id": display_id} if display_id else {}
        self._send(kind, {"data": data, "metadata": metadata, "transient": transient})

    def clear(self, *, wait: bool) -> None:
        self._send("clear_output", {"wait": wait})

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        topic = f"kernel.{self.kernel.ident}.{kind}".encode()
        self.kernel.session.send(self.kernel.iopub_socket, kind, content, parent=self.parent, ident=topic)


class PlainSink:
    """Writes to the standard streams: a terminal, a script, or output that ``%%capture`` holds."""

    def __init__(self) -> None:
        self.streams = {"stdout": sys.stdout, "stderr": sys.stderr}

    def stream(self, name: str, text: str) -> None:
        self.streams[name].write(text)
        self.streams[name].flush()

    def display(self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, *, update: bool) -> None:
        if get_ipython() is None:
            self.stream("stdout", f"{data.get('text/plain', '')}\n")
        else:
            publish_display_data(
                data, metadata, transient={"display_id": display_id} if display_id else {}, update=update
            )

    def clear(self, *, wait: bool) -> None:
        """A stream cannot be cleared."""


def current() -> Sink:
    """The sink of the cell that runs now."""
    shell = get_ipython()
    kernel = getattr(shell, "kernel", None)
    if kernel is None or not hasattr(sys.stdout, "pub_thread"):  # replaced by %%capture or a redirect
        return PlainSink()
    sys.stdout.flush()
    sys.stderr.flush()
    return CellSink(kernel, kernel.get_parent("shell"))
