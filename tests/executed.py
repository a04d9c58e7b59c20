"""A notebook of the project, run cell by cell on a real kernel, and what its cells showed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from notebook import plain

FOLDER = Path(__file__).parents[1] / "notebooks"


def run(name: str) -> list[Any]:
    """The code cells of ``notebooks/name`` with their outputs."""
    notebook = nbformat.read(FOLDER / name, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cells: list[Any], marker: str) -> str:
    """All text that the cell with ``marker`` in its source has published."""
    (cell,) = [cell for cell in cells if marker in cell.source]
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type == "error":
            parts.append(plain("\n".join(output.traceback)))
        else:
            parts.append(output.data.get("text/plain", ""))
    return "\n".join(parts)


def is_stored_clean(name: str) -> bool:
    """Whether no output and no execution count is stored."""
    cells = [cell for cell in nbformat.read(FOLDER / name, as_version=4).cells if cell.cell_type == "code"]
    return all(cell.execution_count is None and cell.outputs == [] for cell in cells)
