"""Schedules whose stages go round the ranks: rank r of p holds the stages r, p + r, 2p + r, ...

All are one pattern, a warm-up of forwards, then a forward and a backward in turn, then the backwards that are left::

    F F F | F B F B F B | B B B

They differ in how long the warm-up is and in which order stages and microbatches follow. ``p`` is the number of ranks,
``v`` of stages a rank, ``m`` of microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator

from nbtrain.plan.pipeline import num_rounds
from nbtrain.planner.schedule import Action, Kind, Step

_Chunk = tuple[int, int]
"""A stage and a microbatch."""


def gpipe(rank: int, p: int, v: int, m: int) -> list[Step]:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965, section 2.3); a rank keeps m live microbatches."""
    chunks = _breadth_first(rank, p, v, m)
    return _weave(chunks, chunks, num_warmup=m)


def one_forward_one_backward(rank: int, p: int, v: int, m: int) -> list[Step]:
    """As early a backward as there can be (PipeDream-Flush, arXiv 2104.04473, section 2.2.1): p - rank live ones."""
    chunks = _breadth_first(rank, p, v, m)
    return _weave(chunks, chunks, num_warmup=p - 1 - rank)


def interleaved_1f1b(rank: int, p: int, v: int, m: int) -> list[Step]:
    """1F1B with v stages a rank, whose bubble is v times shorter (arXiv 2104.04473, section 2.2.2).

    Microbatches go in rounds through a rank's stages. Where m is no multiple of p, a round has more than p of them.
    """
    per_round = m // num_rounds("interleaved_1f1b", p, m)
    warmup = (v - 1) * per_round + 2 * (p - 1 - rank)
    forwards, backwards = _depth_first(rank, p, v, m, per_round)
    return _weave(forwards, backwards, num_warmup=min(warmup, v * m))


def interleaved_zero_bubble(rank: int, p: int, v: int, m: int) -> list[Step]:
    """Weights' gradients later, in place of bubbles (ZB-H1 of arXiv 2401.10241, section 3.1), with v stages a rank.

    The gradient of a stage's input goes out at once, so that a rank warms up with half of 1F1B's forwards; the part
    for the weights follows ``rank`` backwards behind, so that every rank keeps as much as rank 0.
    """
    per_round = m // num_rounds("interleaved_zero_bubble", p, m)
    warmup = (v - 1) * per_round + (p - 1 - rank)
    forwards, backwards = _depth_first(rank, p, v, m, per_round)
    steps = _weave(forwards, backwards, num_warmup=min(warmup, v * m), backward=Kind.BACKWARD_INPUT)
    return _with_weights(steps, backwards, lag=rank)


def looped_bfs(rank: int, p: int, v: int, m: int) -> list[Step]:
    """All microbatches through a stage before the next one (breadth-first, arXiv 2211.05953, section 3).

    Each stage's parameters are in use once in forward and once in backward, which is what sharded parameters like.
    """
    chunks = _breadth_first(rank, p, v, m)
    return _weave(chunks, chunks[::-1], num_warmup=v * m)


def _breadth_first(rank: int, p: int, v: int, m: int) -> list[_Chunk]:
    return [(stage, microbatch) for stage in range(rank, p * v, p) for microbatch in range(m)]


def _depth_first(rank: int, p: int, v: int, m: int, per_round: int) -> tuple[list[_Chunk], list[_Chunk]]:
    """The order of forwards and that of backwards: each round of microbatches through all stages of the rank."""
    stages = range(rank, p * v, p)
    rounds = [range(first, first + per_round) for first in range(0, m, per_round)]
    forwards = [(stage, microbatch) for part in rounds for stage in stages for microbatch in part]
    backwards = [(stage, microbatch) for part in rounds for stage in reversed(stages) for microbatch in part]
    return forwards, backwards


def _weave(
    forwards: list[_Chunk], backwards: list[_Chunk], num_warmup: int, backward: Kind = Kind.BACKWARD
) -> list[Step]:
    steps = [_step(chunk, Kind.FORWARD) for chunk in forwards[:num_warmup]]
    for position, chunk in enumerate(backwards):
        steps += [_step(later, Kind.FORWARD) for later in forwards[num_warmup + position : num_warmup + position + 1]]
        steps.append(_step(chunk, backward))
    return steps


def _with_weights(steps: list[Step], backwards: list[_Chunk], lag: int) -> list[Step]:
    """``steps`` with the weights' part of each backward behind the inputs' part of the ``lag``-th one after it."""
    return [*_follow(steps, backwards, lag), *(_step(chunk, Kind.BACKWARD_WEIGHT) for chunk in _last(backwards, lag))]


def _follow(steps: list[Step], backwards: list[_Chunk], lag: int) -> Iterator[Step]:
    num_backwards = 0
    for step in steps:
        yield step
        if step[0].kind is Kind.BACKWARD_INPUT:
            if num_backwards >= lag:
                yield _step(backwards[num_backwards - lag], Kind.BACKWARD_WEIGHT)
            num_backwards += 1


def _last(chunks: list[_Chunk], number: int) -> list[_Chunk]:
    return chunks[max(0, len(chunks) - number) :]


def _step(chunk: _Chunk, kind: Kind) -> Step:
    stage, microbatch = chunk
    return (Action(stage, kind, microbatch),)
