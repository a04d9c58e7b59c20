"""Run a notebook on a real kernel and print what each cell printed, as it goes: ``make demo``."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def main(path: str) -> None:
    notebook = nbformat.read(path, as_version=4)
    began = time.monotonic()
    client = NotebookClient(
        notebook,
        timeout=600,
        resources={"metadata": {"path": str(Path(path).parent)}},
        store_widget_state=False,
        coalesce_streams=True,  # a bar's states are one text
        extra_arguments=["--IPKernelApp.log_level=40"],
        on_cell_executed=lambda cell, **_: show(cell),
    )
    client.execute()
    print(f"\n{path} ran in {time.monotonic() - began:.0f} s; open it with: make lab")


def show(cell: Any) -> None:
    """The cell's first lines, then its output."""
    lines = cell.source.splitlines()
    rest = f"  … {len(lines) - 3} more lines" if len(lines) > 4 else ""
    print("\n" + "\n".join(f"  | {line}" for line in (lines[:3] if rest else lines)) + ("\n" + rest if rest else ""))
    for output in cell.get("outputs", []):
        print(text_of(output).rstrip())
    sys.stdout.flush()


def text_of(output: Any) -> str:
    if output.output_type == "stream":
        return "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in output.text.split("\n"))
    if output.output_type == "error":
        return _ANSI.sub("", "\n".join(output.traceback))
    kinds = ", ".join(kind for kind in output.data if kind != "text/plain")
    return str(output.data.get("text/plain", f"<{kinds}>"))


if __name__ == "__main__":
    main(sys.argv[1])
