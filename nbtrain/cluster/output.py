"""A cell's output: merged by rank, published in chunks, capped when it floods.

The ranks' messages arrive on the client's IO thread. One thread a session publishes what is ready, a few times a
second, so that the cost is linear in what is printed and a blocking cell shows its output live.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from nbtrain.cluster.failures import ranks_text
from nbtrain.cluster.merge import Line, Merger, Piece, Rich
from nbtrain.cluster.sinks import Sink
from nbtrain.events import FOR_ALL

FLOOD_LINES = 5_000  # a cell's lines that the page gets; the rest goes to a file
FLOOD_CHARS = 5_000_000  # and characters
TAIL_LINES = 10  # of the spilled lines, these are shown when the cell ends
TAIL_CHARS = 200  # of each
PUBLISH_S = 0.05  # between two chunks
BAR_STREAM = "stdout"  # ranks write bars to stderr, which a notebook shows on red; they are no errors
BAR_S = 0.2  # between two states of a progress bar


class CellOutput:
    """The output of one cell on ``ranks``, published to ``sink``. Thread-safe."""

    def __init__(self, ranks: Sequence[int], sink: Sink, spill: Path) -> None:
        self.merger = Merger(ranks)
        self.sink = sink
        self.last_bar = ""
        self._lock = threading.RLock()
        self._flood = _Flood(spill)
        self._open_bar: Line | None = None
        self._bar_time = 0.0
        self._leader = min(ranks)
        self._shown_as: dict[tuple[int, str], str] = {}  # a rank's display, by its id there: its id on the page

    def feed(self, rank: int, kind: str, content: dict[str, Any]) -> None:
        """A message from a rank: a stream chunk, a display, or a request to clear."""
        now = time.monotonic()
        with self._lock:
            if kind == "stream":
                self.merger.text(rank, content["name"], content["text"], now)
            elif kind == "clear_output":
                self.merger.rich(rank, Rich(kind, {"wait": content.get("wait", False)}), now)
            elif content.get("metadata") == FOR_ALL:
                self.merger.shared(rank, content["data"]["text/plain"], now)
            elif "data" in content:
                display_id = content.get("transient", {}).get("display_id")
                self.merger.rich(rank, Rich(kind, _portable(content["data"]), content["metadata"], display_id), now)

    def finish(self, rank: int) -> None:
        """The rank's cell is over."""
        with self._lock:
            self.merger.finish(rank, time.monotonic())

    @property
    def busy(self) -> bool:
        """Whether something may have to be published soon."""
        with self._lock:
            return not self.merger.empty or self.merger.bar() is not None

    def publish(self, *, final: bool = False) -> None:
        """Publish what is ready; with ``final``, all that is left."""
        with self._lock:
            chunk = _Chunk(self)
            for piece in self.merger.take(time.monotonic(), final=final):
                self._publish_piece(piece, chunk)
            chunk.flush()
            if final:
                self._flood.close(self.sink)
            else:
                self._publish_bar()

    def _publish_piece(self, piece: Piece, chunk: _Chunk) -> None:
        if isinstance(piece.token, Line):
            text = labelled(piece.label, piece.token.text)
            if not self._flood.takes(text):
                chunk.add(_shown_on(piece.token), text)
            return
        self._publish_rich(piece, piece.token, chunk)

    def _publish_rich(self, piece: Piece, rich: Rich, chunk: _Chunk) -> None:
        if rich.kind == "clear_output":
            chunk.flush()
            if self._leader in piece.ranks:  # one clear, not one a rank
                self.sink.clear(wait=rich.data["wait"])
            return
        if rich.kind == "update_display_data":
            chunk.flush()
            shown = {self._shown_as.get((rank, rich.display_id or ""), "") for rank in piece.ranks}
            for there in sorted(shown - {""}):
                self.sink.display(rich.data, rich.metadata, there, update=True)
            return
        if piece.label and not rich.display_id and set(rich.data) == {"text/plain"}:
            chunk.add("stdout", labelled(piece.label, rich.data["text/plain"] + "\n"))
            return
        if piece.label:
            chunk.add("stdout", f"{ranks_text(piece.ranks)}:\n")
        chunk.flush()
        display_id = f"{piece.ranks[0]}-{rich.display_id}" if rich.display_id else None
        if display_id:
            self._shown_as.update({(rank, rich.display_id or ""): display_id for rank in piece.ranks})
        self.sink.display(rich.data, rich.metadata, display_id, update=False)

    def erase_bar(self) -> str:
        """What to print before other text while a bar stands: it is drawn again below."""
        if self._open_bar is None:
            return ""
        width, self._open_bar = len(self._open_bar.text), None
        self._bar_time = 0.0
        return "\r" + " " * width + "\r"

    def _publish_bar(self) -> None:
        bar = self.merger.bar()
        now = time.monotonic()
        if bar is None or now - self._bar_time < BAR_S or (self._open_bar and bar.text == self._open_bar.text):
            return
        before = len(self._open_bar.text) if self._open_bar else 0
        self.sink.stream(BAR_STREAM, "\r" + bar.text.ljust(before))
        self._open_bar, self._bar_time, self.last_bar = bar, now, bar.text


class _Chunk:
    """Joins neighbouring lines of a stream into one message."""

    def __init__(self, output: CellOutput) -> None:
        self.output = output
        self.stream = ""
        self.parts: list[str] = []

    def add(self, stream: str, text: str) -> None:
        if stream != self.stream:
            self.flush()
            self.stream = stream
        self.parts.append(text)

    def flush(self) -> None:
        if not self.parts:
            return
        erase = self.output.erase_bar()
        if erase and self.stream != BAR_STREAM:
            self.output.sink.stream(BAR_STREAM, erase)
            erase = ""
        self.output.sink.stream(self.stream, erase + "".join(self.parts))
        self.parts.clear()


class _Flood:
    """Counts a cell's lines and, past the cap, writes them to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shown = 0
        self.shown_chars = 0
        self.spilled = 0
        self.tail: list[str] = []
        self._file: TextIO | None = None

    def takes(self, text: str) -> bool:
        """Whether ``text`` went to the file instead of the page."""
        if self.shown < FLOOD_LINES and self.shown_chars + len(text) <= FLOOD_CHARS:
            self.shown += 1
            self.shown_chars += len(text)
            return False
        self.shown = FLOOD_LINES  # what follows stays in order behind it
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(text)
        self.spilled += 1
        self.tail = [*self.tail[-TAIL_LINES + 1 :], text]
        return True

    def close(self, sink: Sink) -> None:
        """Say where the rest is, and show its end."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        sink.stream(
            "stderr",
            f"… {self.spilled:,} more lines are in {self.path} (until the session stops); the last ones:\n"
            + "".join(line if len(line) <= TAIL_CHARS else f"{line[:TAIL_CHARS]}…\n" for line in self.tail),
        )


class Publisher:
    """The one thread of a session that publishes its cells' output."""

    def __init__(self) -> None:
        self._cells: set[CellOutput] = set()
        self._wake = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="nbtrain-output", daemon=True)
        self._thread.start()

    def touch(self, output: CellOutput) -> None:
        """``output`` has something to publish."""
        with self._wake:
            self._cells.add(output)
            self._wake.notify()

    def stop(self) -> None:
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._cells or self._stopped)
                if self._stopped:
                    return
                cells, self._cells = self._cells, set()
            for output in cells:
                output.publish()
                if output.busy:
                    self.touch(output)
            time.sleep(PUBLISH_S)  # the pace: chunks gather meanwhile


def _shown_on(line: Line) -> str:
    return BAR_STREAM if line.bar else line.stream


def _portable(data: dict[str, Any]) -> dict[str, Any]:
    """Without the views of widgets, whose models live on the rank: the page could not find them."""
    return {kind: value for kind, value in data.items() if not kind.startswith("application/vnd.jupyter.widget")}


def labelled(label: str, text: str) -> str:
    """``text`` behind its label, further lines indented under the first."""
    return label + text.rstrip("\n").replace("\n", "\n" + " " * len(label)) + text[len(text.rstrip("\n")) :]
