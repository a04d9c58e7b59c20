"""An error on one rank is an error on all."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from nbtrain.errors import CheckpointError
from nbtrain.parallel import transfer
from nbtrain.parallel.cell import say

Result = TypeVar("Result")


def gather(thing: Any) -> list[Any]:
    """``thing`` of every rank, by rank. Collective; raises `UsageError` where ranks are in different calls."""
    return transfer.gather_in_call(thing) if dist.is_initialized() else [thing]


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


@dataclass
class Misfit:
    """What of a checkpoint or a file does not fit what a rank has.

    Attributes:
        problems: That nothing cures.
        lacking: Names of what it does not have.
        gaps: What else ``strict=False`` leaves as it is.
    """

    problems: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.problems or self.lacking or self.gaps)

    @classmethod
    def of_all(cls, ranks: Iterable[Misfit]) -> Misfit:
        """That of all ranks: each thing once."""
        found = list(ranks)
        kinds = ("problems", "lacking", "gaps")
        return cls(*(list(dict.fromkeys(one for rank in found for one in getattr(rank, kind))) for kind in kinds))

    def require_none(self, what: str, strict: bool, doing: str) -> None:
        """Raises for problems and, if ``strict``, for the rest; else says what is left as it is. The same on all ranks.

        Args:
            what: Does not fit, in words.
            strict: Whether all must fit.
            doing: What is going on, before what is said.

        Raises:
            CheckpointError: All of it.
        """
        left = [f"it lacks {listed(self.lacking)}"] if self.lacking else []
        left += self.gaps
        if refused := [*self.problems, *(left if strict else ())]:
            cure = [] if self.problems else ["strict=False takes what fits"]
            if len(refused) == 1:
                raise CheckpointError("; ".join([f"{what}: {refused[0]}", *cure]))
            raise CheckpointError(
                "\n".join([f"{what}, and nothing was changed:", *(f"  - {one}" for one in refused), *cure])
            )
        for gap in left:
            say(f"{doing}: {gap}; left as it is")


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def host() -> str:
    return socket.gethostname()


def _ranks(ranks: list[int], problems: list[str]) -> str:
    if len(ranks) == len(problems):
        return "all ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
