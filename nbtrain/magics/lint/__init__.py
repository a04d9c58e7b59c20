"""Rank lint: says before a cell runs that it will hang. It warns and never refuses, and is silent where it isn't sure.

The cell is walked once a rank, with what is known of the rank put in: ``rank == 0`` is true on rank 0, ``loss < best``
is unknown, and taken to be alike on all ranks. That gives each rank's collectives in their order, and where two ranks
differ, one waits for the other.
"""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from collections.abc import Sequence

from IPython.core.inputtransformer2 import TransformerManager

from nbtrain.cluster.failures import ranks_text
from nbtrain.magics.lint.compare import differences
from nbtrain.magics.lint.findings import Finding, on_some_ranks, prompts
from nbtrain.magics.lint.state import MAX_NODES, MAX_RANKS, Endless
from nbtrain.magics.lint.trace import Trace
from nbtrain.magics.lint.walk import Walk

__all__ = ["Finding", "lint"]

_BLOCK_MAGICS = ("%%time", "%%capture", "%%prun")  # what is below them runs as it stands


def lint(source: str, ranks: Sequence[int], world_size: int, offset: int = 0) -> list[Finding]:
    """What will hang in ``source``, a cell's text, when ``ranks`` of ``world_size`` run it.

    Lines are the source's, counted on from ``offset``, which is how many lines of the cell precede it.
    """
    lines = _without_block_magic(source)
    python = TransformerManager().transform_cell("".join(lines))
    try:
        with warnings.catch_warnings(action="ignore"):
            flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            tree = compile(python, "<cell>", "exec", flags, dont_inherit=True)
        _number(tree, _places(lines, python.splitlines()), offset)
        found = _found(tree, list(ranks)[:MAX_RANKS], world_size)
    except (SyntaxError, ValueError, RecursionError, Endless):
        return []  # what is not Python is refused elsewhere; what is too deep is not judged
    return sorted(set(found), key=lambda one: one.line)


def _found(tree: ast.Module, ranks: list[int], world_size: int) -> list[Finding]:
    walks = {rank: Walk(rank, world_size, tree, MAX_NODES // len(ranks)) for rank in ranks}
    parts = [{rank: walk.cell() for rank, walk in walks.items()}]
    parts += _by_function({rank: walk.uncalled() for rank, walk in walks.items()})
    found = prompts({rank: walk.prompts for rank, walk in walks.items()})
    if len(ranks) < world_size:
        return found + on_some_ranks(parts[0], f"{ranks_text(ranks)} only", world_size)
    for part in parts:
        found += differences(part)
    return _one_a_condition(found)


def _by_function(traces: dict[int, dict[int, Trace]]) -> list[dict[int, Trace]]:
    """Each function's traces by rank; only functions that every rank would run from here only."""
    common = set.intersection(*map(set, traces.values())) if traces else set()
    first = next(iter(traces.values()), {})
    return [{rank: own[name] for rank, own in traces.items()} for name in first if name in common]


def _one_a_condition(found: list[Finding]) -> list[Finding]:
    """The first finding of each condition: what follows it there has the same cause."""
    first: dict[int, Finding] = {}
    for one in found:
        first.setdefault(one.cause or -one.line, one)
    return list(first.values())


def _without_block_magic(source: str) -> list[str]:
    lines = source.splitlines(keepends=True)
    begin = next((i for i, line in enumerate(lines) if line.strip()), None)
    if begin is not None and lines[begin].split()[0] in _BLOCK_MAGICS:
        lines[begin] = "\n"
    return lines


def _number(tree: ast.Module, places: dict[int, int], offset: int) -> None:
    """Give every node the line that a person sees."""
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            node.lineno = places.get(node.lineno, node.lineno) + offset


def _places(before: list[str], after: list[str]) -> dict[int, int]:
    """Line numbers before IPython's transformation, by those after: it drops empty lines and joins others."""
    seen: Counter[str] = Counter()
    old: dict[tuple[str, int], int] = {}
    for number, line in enumerate(before, 1):
        seen[line.strip()] += 1
        old[line.strip(), seen[line.strip()]] = number
    seen.clear()
    places = {}
    for number, line in enumerate(after, 1):
        seen[line.strip()] += 1
        places[number] = old.get((line.strip(), seen[line.strip()]), number)
    return places
