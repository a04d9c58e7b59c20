"""Which ranks: the grammar of ``-r``.

::

    spec  = "all" | "even" | "odd" | part {"," part}
    part  = rank | rank "-" rank            both ends belong to the range
    rank  = ["-"] digits                    -1 is the last rank
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from nbtrain.errors import RankSpecError

_PART = re.compile(r"(?P<first>-?\d+)(?:-(?P<last>-?\d+))?")


def parse(spec: str, world_size: int) -> list[int]:
    """The ranks that ``spec`` names, in its order and each once.

    Raises:
        RankSpecError: the spec is malformed, or a rank is not in 0..world_size-1.
    """
    named = {"all": range(world_size), "even": range(0, world_size, 2), "odd": range(1, world_size, 2)}
    text = spec.strip().lower()
    if text in named:
        ranks = list(named[text])
    else:
        ranks = [rank for part in text.split(",") for rank in _part(part.strip(), spec, world_size)]
    if not ranks:
        raise RankSpecError(f"ranks {spec!r} name no rank of {world_size}; type e.g. -r 0")
    return list(dict.fromkeys(ranks))


def compact(ranks: Iterable[int]) -> str:
    """``[0, 2, 3]`` as ``0,2-3``: the shortest spec, for labels."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _part(part: str, spec: str, world_size: int) -> list[int]:
    match = _PART.fullmatch(part)
    if match is None:
        raise RankSpecError(
            f"ranks {spec!r} are not understood at {part!r}; type a rank, a list, a range or a name: "
            "-r 0   -r 0,2   -r 1-3   -r -1   -r all   -r even   -r odd"
        )
    first = _one(match["first"], spec, world_size)
    last = _one(match["last"], spec, world_size) if match["last"] else first
    if last < first:
        raise RankSpecError(f"ranks {spec!r}: the range {part!r} runs backwards; type -r {last}-{first}")
    return list(range(first, last + 1))


def _one(text: str, spec: str, world_size: int) -> int:
    rank = int(text)
    if not -world_size <= rank < world_size:
        raise RankSpecError(
            f"ranks {spec!r}: there is no rank {rank} among {world_size}; choose from 0 to {world_size - 1}"
        )
    return rank % world_size
