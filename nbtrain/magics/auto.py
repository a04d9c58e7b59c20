"""``%distributed auto on``: every cell runs on the ranks."""

from __future__ import annotations

from typing import Any

# Cells that begin so run in the notebook's kernel: they steer the session, or say so.
_LOCAL = ("%%", "%distributed", "%load_ext", "%reload_ext", "%unload_ext")


def distribute(lines: list[str]) -> list[str]:
    """An input transformation: the cell as a ``%%distributed`` cell, unless it begins with another magic's name."""
    first = next((line.strip() for line in lines if line.strip()), "")
    if not first or first.startswith(_LOCAL) or first.endswith("?"):
        return lines
    return ["%%distributed\n", *lines]


def install(shell: Any) -> None:
    if not is_on(shell):
        shell.input_transformers_cleanup.append(distribute)


def remove(shell: Any) -> None:
    if is_on(shell):
        shell.input_transformers_cleanup.remove(distribute)


def is_on(shell: Any) -> bool:
    return distribute in shell.input_transformers_cleanup
