"""Where ranks part: their traces side by side."""

from __future__ import annotations

from collections.abc import Iterator

from nbtrain.magics.lint import findings
from nbtrain.magics.lint.findings import Finding
from nbtrain.magics.lint.trace import Exit, Failure, Item, Op, Part, Trace, ops

Traces = dict[int, Trace]


def differences(traces: Traces) -> list[Finding]:
    """The collectives that some ranks call and others do not, in the order of the cell."""
    return list(_differences({rank: list(trace) for rank, trace in traces.items()}))


def _differences(traces: Traces) -> Iterator[Finding]:
    every_op = [op for trace in traces.values() for op in ops(trace)]
    while True:
        traces = {rank: trace for rank, trace in traces.items() if not (trace and isinstance(trace[0], Failure))}
        groups = _groups(traces)
        if len(groups) > 1 and _unwrap_functions(traces):
            continue
        if not any(head is not None for head in groups):
            return
        if len(groups) == 1:
            yield from _inside([trace.pop(0) for trace in traces.values()], list(traces))
            continue
        odd = _odd(groups, traces)
        yield from _told(odd, groups, traces, every_op)
        for rank in groups[odd]:
            traces[rank].pop(0)


def _unwrap_functions(traces: Traces) -> bool:
    """Put the bodies of functions in the place of their calls, where other ranks come to something else."""
    wrapped = [
        rank for rank, trace in traces.items() if trace and isinstance(trace[0], Part) and trace[0].kind == "def"
    ]
    for rank in wrapped:
        first = traces[rank][0]
        assert isinstance(first, Part)
        traces[rank][:1] = [
            item for item in first.bodies[0] if isinstance(item, Failure) or any(True for _ in ops([item]))
        ]
    return bool(wrapped)


def _groups(traces: Traces) -> dict[object, list[int]]:
    """Ranks by what they come to next; None is the end."""
    groups: dict[object, list[int]] = {}
    for rank, trace in traces.items():
        groups.setdefault(trace[0].key if trace else None, []).append(rank)
    return groups


def _odd(groups: dict[object, list[int]], traces: Traces) -> object:
    """What most of the others will not come to later."""

    def num_coming(key: object) -> int:
        return sum(any(item.key == key for item in trace) for trace in traces.values())

    return min((key for key in groups if key is not None), key=num_coming)


def _inside(items: list[Item], ranks: list[int]) -> Iterator[Finding]:
    """The bodies of a branch or loop that all ranks come to."""
    parts = [item for item in items if isinstance(item, Part)]
    for bodies in zip(*(part.bodies for part in parts), strict=True) if parts else ():
        yield from _differences({rank: list(body) for rank, body in zip(ranks, bodies, strict=True)})


def _told(odd: object, groups: dict[object, list[int]], traces: Traces, every_op: list[Op]) -> Iterator[Finding]:
    there = groups[odd]
    others = [rank for rank in traces if rank not in there]
    item = traces[there[0]][0]
    if isinstance(item, Exit):
        if every_op:
            awaited = next((op for rank in others for op in ops(traces[rank])), every_op[0])
            yield findings.left(item, there, awaited, others)
        return
    op = next(ops([item]), None)
    if op is None:
        yield from _exit_inside(item, there, others, every_op)
        return
    meets = next((traces[rank][0] for rank in others if traces[rank]), None)
    same_place = isinstance(item, Op) and isinstance(meets, Op) and all(traces[rank] for rank in others)
    if same_place and isinstance(meets, Op) and meets.under == op.under:
        yield findings.elsewhere(op, there, meets, others)
    else:
        yield findings.alone(op, there, others)


def _exit_inside(item: Item, there: list[int], others: list[int], every_op: list[Op]) -> Iterator[Finding]:
    """A branch without collectives that only some ranks have, and that leaves."""
    leaving = next((one for body in getattr(item, "bodies", ()) for one in body if isinstance(one, Exit)), None)
    if leaving is not None and every_op:
        yield findings.left(leaving, there, every_op[0], others)
