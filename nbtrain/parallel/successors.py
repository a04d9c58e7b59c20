"""Who else depends on a trainer's layout: other trainers of the model, and loaders that give its shares."""

from __future__ import annotations

import gc

from nbtrain.errors import UsageError
from nbtrain.parallel import live
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.loader import Loader, owned_by, unowned
from nbtrain.parallel.stepper import Stepper
from nbtrain.plan import Plan


def require_alone(stepper: Stepper) -> None:
    """Raises `UsageError` where another trainer trains the model: its optimizer would hold what is gone."""
    if _others(stepper):
        gc.collect()  # of a cell that ran again it may be garbage
    if others := _others(stepper):
        who = "1 more trainer trains" if len(others) == 1 else f"{len(others)} more trainers train"
        raise UsageError(
            f"{who} the model, and would stay behind in the old layout; delete it (del trainer), and make it again "
            "afterwards"
        )


def loaders_to_tell(stepper: Stepper, plan: Plan) -> list[Loader]:
    """Those whose batches the trainer takes, and whose shares are others by ``plan``.

    Loaders that `nbtrain.loader` made belong to the one model that is laid out so; where there are more, to none.
    """
    old = stepper.layout
    if (old.plan.dp, old.plan.tp) == (plan.dp, plan.tp):
        return []
    return [*owned_by(stepper), *([] if _is_one_of_many(old) else unowned(old.plan))]


def _others(stepper: Stepper) -> list[Stepper]:
    steppers = (thing for thing in live.resumables().values() if isinstance(thing, Stepper))
    return [other for other in steppers if other is not stepper and other.layout is stepper.layout]


def _is_one_of_many(layout: Layout) -> bool:
    plan = layout.plan
    layouts = [thing for thing in live.tracked() if isinstance(thing, Layout) and not thing.gone]
    alike = [other for other in layouts if (other.plan.dp, other.plan.tp) == (plan.dp, plan.tp)]
    return any(other is not layout for other in alike)
