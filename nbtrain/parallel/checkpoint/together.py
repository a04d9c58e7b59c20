"""An error on one rank is an error on all."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist

from nbtrain.errors import CheckpointError
from nbtrain.parallel import transfer
from nbtrain.parallel.cell import say

Result = TypeVar("Result")
_LACKING = re.compile(r"it lacks ('[^']*')")


def gather(thing: Any) -> list[Any]:
    """``thing`` of every rank, by rank. Collective."""
    return transfer.gather(thing) if dist.is_initialized() else [thing]


def attempt(work: Callable[[], Result]) -> tuple[Result | None, str]:
    """What ``work`` returns, or why it failed."""
    try:
        return work(), ""
    except Exception as problem:  # told by `require_all`, on every rank
        return None, told(problem)


def told(problem: BaseException) -> str:
    """An exception in one line, with what it came from."""
    text = str(problem) or type(problem).__name__
    if not isinstance(problem, CheckpointError):
        text = f"{type(problem).__name__}: {text}"
    cause = problem.__cause__ or problem.__context__
    if isinstance(cause, OSError) and not isinstance(problem, CheckpointError):
        text += f" ({cause})"
    return text


def require_all(what: str, problems: list[str]) -> None:
    """Raises where some rank has a problem.

    Args:
        what: That failed, as the beginning of a sentence.
        problems: By rank, "" where there is none; the same list on every rank.

    Raises:
        CheckpointError: Each distinct problem once, with the ranks that have it.
    """
    ranks: dict[str, list[int]] = {}
    for rank, problem in enumerate(problems):
        if problem:
            ranks.setdefault(problem, []).append(rank)
    if ranks:
        alone = len(problems) == 1
        parts = [problem if alone else f"{problem} (on {_ranks(held, problems)})" for problem, held in ranks.items()]
        raise CheckpointError(f"{what}: {'; '.join(parts)}")


def require_fit(what: str, problems: Iterable[str], gaps: Iterable[str], strict: bool, doing: str) -> None:
    """Raises where something is wrong, or, if ``strict``, missing; else says what is left as it is. The same on all.

    Args:
        what: Does not fit, in words.
        problems: That nothing cures.
        gaps: That ``strict=False`` leaves.
        strict: Whether gaps are problems.
        doing: What is going on, before what is said.

    Raises:
        CheckpointError: All of it.
    """
    problems, gaps = _joined(problems), _joined(gaps)
    if refused := [*problems, *(gaps if strict else ())]:
        cure = [] if problems else ["strict=False takes what fits"]
        if len(refused) == 1:
            raise CheckpointError("; ".join([f"{what}: {refused[0]}", *cure]))
        raise CheckpointError(
            "\n".join([f"{what}, and nothing was changed:", *(f"  - {one}" for one in refused), *cure])
        )
    for gap in gaps:
        say(f"{doing}: {gap}; left as it is")


def _joined(lines: Iterable[str]) -> list[str]:
    """What is lacking in one line: of another model, most is."""
    lines = list(lines)
    lacking = [found[1] for line in lines if (found := _LACKING.fullmatch(line))]
    if len(lacking) < 2:
        return lines
    return [*(line for line in lines if not _LACKING.fullmatch(line)), f"it lacks {', '.join(lacking)}"]


def host() -> str:
    return socket.gethostname()


def _ranks(ranks: list[int], problems: list[str]) -> str:
    if len(ranks) == len(problems):
        return "all ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
