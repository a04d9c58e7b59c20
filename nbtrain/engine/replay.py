"""Definitions of earlier cells, run on a rank that takes a dead one's place."""

from __future__ import annotations

import ast
from typing import Any

from IPython.core.getipython import get_ipython


def run(ns: dict[str, Any], source: str, label: str, offset: int) -> list[str]:
    """Run each statement of ``source`` by itself; what failed, a line each.

    An assignment may name what only the other cells' results were: that is no failure, the name is then missing.
    """
    shell = get_ipython()
    shell.cell_label = (label, offset)
    name = shell.compile.cache(source, shell.execution_count)
    failed = []
    for node in ast.parse(source).body:
        try:
            exec(shell.compile(ast.Module([node], []), name, "exec"), ns)
        except NameError as problem:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)):
                failed.append(_told(label, node.lineno + offset, problem))
        except Exception as problem:  # user code may raise anything; the other definitions are still of use
            failed.append(_told(label, node.lineno + offset, problem))
    return failed


def _told(label: str, line: int, problem: Exception) -> str:
    return f"{label or 'a cell'}, line {line}: {type(problem).__name__}: {problem}"
