"""What the session tells a rank about the cell that runs: which ranks run it, and which plan it was given.

Outside a session nothing is told: then all ranks are there, and there is no plan.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from nbtrain.errors import PlanError, UsageError
from nbtrain.parallel.mesh import rank, world_size
from nbtrain.plan import Plan


class _Told:
    ranks: tuple[int, ...] | None = None
    plan: Plan | None = None
    voice: Callable[[str], None] | None = None
    call = ""


def tell_voice(speak: Callable[[str], None]) -> None:
    """What shows a text that one rank says for all that run the cell."""
    _Told.voice = speak


def tell_ranks(ranks: tuple[int, ...] | None) -> None:
    """The ranks that run the cell; None where that is not known."""
    _Told.ranks = ranks


def say(text: str) -> None:
    """Prints what all ranks say alike. One rank says it for all: others may come to it much later."""
    if rank() == min(_Told.ranks or (0,)):
        (_Told.voice if _Told.ranks and _Told.voice else print)(text)


@contextmanager
def unheard() -> Iterator[None]:
    """What a model prints inside is not shown: a forward that is none of the user's batches only puzzles."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def tell_plan(plan: Plan) -> None:
    """The plan of ``%%distributed --plan``, until the next one."""
    _Told.plan = plan


def plan_or_default(plan: Plan | None) -> Plan:
    """``plan``, else that of the session, else ``Plan()``."""
    return plan if plan is not None else _Told.plan or Plan()


def require_plan(plan: object) -> None:
    """Raises `PlanError` for what is none, with what to type for it."""
    if isinstance(plan, Mapping):
        fields = ", ".join(f"{name}={value!r}" for name, value in plan.items())
        raise PlanError(f"{plan!r} is not a plan; type nt.Plan({fields})")
    if isinstance(plan, str):
        raise PlanError(f"{plan!r} is not a plan; type nt.Plan.parse({plan!r})")
    if not isinstance(plan, Plan):
        raise PlanError(f"{plan!r} is not a plan; type e.g. nt.Plan(zero=1), or what nt.Plan.parse makes of a text")


def require_all_ranks(what: str) -> None:
    """Refuses what waits for all ranks in a cell that some do not run: it would wait for ever.

    Raises:
        UsageError: The cell was aimed at some ranks.
    """
    if _Told.ranks is not None and len(_Told.ranks) < world_size():
        there = ", ".join(map(str, _Told.ranks))
        raise UsageError(
            f"{what} needs all {world_size()} ranks, and this cell runs on rank{'s' * (len(_Told.ranks) > 1)} {there} "
            "only; run it without -r"
        )


@contextmanager
def on_all_ranks(what: str, trainer: int) -> Iterator[None]:
    """Around a call that all ranks make together, of one trainer: `call` says which. Raises as `require_all_ranks`."""
    require_all_ranks(what)
    before, _Told.call = _Told.call, f"{what} of trainer {trainer}"
    try:
        yield
    finally:
        _Told.call = before


def call() -> str:
    """The call of `on_all_ranks` that this rank is in; "" outside of one."""
    return _Told.call
