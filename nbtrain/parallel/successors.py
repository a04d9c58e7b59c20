"""Who else depends on a trainer's layout: other trainers of the model, and loaders that give its shares."""

from __future__ import annotations

import gc

from nbtrain.errors import BatchError, UsageError
from nbtrain.parallel import live
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.loader import Loader, owned_by, unowned
from nbtrain.parallel.stepper import Stepper
from nbtrain.plan import Plan


def require_alone(stepper: Stepper) -> None:
    """Raises `UsageError` where another trainer trains the model: its optimizer would hold what is gone."""
    if _num_others(stepper):
        gc.collect()  # of a cell that ran again it may be garbage
    # a number: the traceback, which a notebook keeps, must not keep trainers
    if number := _num_others(stepper):
        who = "1 more trainer trains" if number == 1 else f"{number} more trainers train"
        raise UsageError(
            f"{who} the model, and would stay behind in the old layout; delete it (del trainer), and make it again "
            "afterwards"
        )


def require_loaders_fit(stepper: Stepper, plan: Plan) -> None:
    """Raises `BatchError` where a loader cannot give the shares of ``plan``; all are told."""
    # words: the traceback must not keep a loader that the user then deletes
    if any(problems := [loader.misfit(plan) for loader in loaders_to_tell(stepper, plan)]):
        raise BatchError("; ".join(filter(None, problems)))


def loaders_to_tell(stepper: Stepper, plan: Plan) -> list[Loader]:
    """Those whose batches the trainer takes, and whose shares are others by ``plan``.

    Loaders that `nbtrain.loader` made belong to the one model that is laid out so; where there are more, to none.
    """
    old = stepper.layout
    if (old.plan.dp, old.plan.tp) == (plan.dp, plan.tp):
        return []
    return [*owned_by(stepper), *([] if _is_one_of_many(old) else unowned(old.plan))]


def _num_others(stepper: Stepper) -> int:
    steppers = (thing for thing in live.resumables().values() if isinstance(thing, Stepper))
    return sum(other is not stepper and other.layout is stepper.layout for other in steppers)


def _is_one_of_many(layout: Layout) -> bool:
    plan = layout.plan
    layouts = [thing for thing in live.tracked() if isinstance(thing, Layout) and not thing.gone]
    alike = [other for other in layouts if (other.plan.dp, other.plan.tp) == (plan.dp, plan.tp)]
    return any(other is not layout for other in alike)
