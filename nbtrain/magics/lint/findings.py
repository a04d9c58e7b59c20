"""The warnings, in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from nbtrain.cluster.failures import ranks_text
from nbtrain.magics.lint.trace import Exit, Op, Trace, ops


@dataclass(frozen=True)
class Finding:
    """One line for a person. ``line`` counts from the first line of the source; ``cause`` is the condition's line."""

    line: int
    text: str
    cause: int = field(default=0, compare=False)


def alone(op: Op, there: Iterable[int], others: Iterable[int]) -> Finding:
    """``op`` is called where others do not come."""
    text = f"only {ranks_text(there)} come{_s(there)} to {op.text}, which waits for {ranks_text(others)}; {_cure(op)}"
    return Finding(op.line, text, op.under)


def elsewhere(op: Op, there: Iterable[int], other: Op, others: Iterable[int]) -> Finding:
    """Two collectives meet that are not the same."""
    text = (
        f"{ranks_text(there)} call{_s(there)} {op.text} here while {ranks_text(others)} call{_s(others)} {other.text} "
        f"(line {other.line}): they wait for each other; call the same collectives in the same order on all ranks"
    )
    return Finding(op.line, text, op.under)


def left(leaving: Exit, there: Iterable[int], op: Op, others: Iterable[int]) -> Finding:
    """Some ranks leave a loop or a function in which others come to ``op``."""
    what = {"break": "the loop", "continue": "this turn of the loop", "return": "the function"}[leaving.kind]
    text = (
        f"{ranks_text(there)} may leave {what} here, and {ranks_text(others)} then wait{_s(others)} in {op.text} "
        f"(line {op.line}); let all ranks decide alike, e.g. by an all_reduce of what they decide by"
    )
    return Finding(leaving.line, text, leaving.under)


def on_some_ranks(traces: dict[int, Trace], which: str, world_size: int) -> list[Finding]:
    """World collectives in a cell that was aimed at some ranks."""
    found = {}
    for trace in traces.values():
        for op in ops(trace):
            text = f"{op.text} waits for all {world_size} ranks, and this cell runs on {which}; run it without -r"
            found[op.line] = Finding(op.line, text + (", or give group=" if op.takes_group else ""))
    return list(found.values())


def prompts(asked: dict[int, dict[int, str]]) -> list[Finding]:
    """Lines that ask a person, and do so on several ranks."""
    by_line: dict[tuple[int, str], list[int]] = {}
    for rank, lines in asked.items():
        for line, text in lines.items():
            by_line.setdefault((line, text), []).append(rank)
    return [
        Finding(line, f"{text} asks you on {ranks_text(ranks)}, one after another; to be asked once, use -r 0")
        for (line, text), ranks in by_line.items()
        if len(ranks) > 1
    ]


def _s(ranks: Iterable[int]) -> str:
    return "s" if len(list(ranks)) == 1 else ""


def _cure(op: Op) -> str:
    above = 0 < op.under < op.line
    cure = f"move it out of the condition in line {op.under}" if above else "call it on all ranks"
    return cure + (", or give it a group of these ranks (group=)" if op.takes_group else "")
