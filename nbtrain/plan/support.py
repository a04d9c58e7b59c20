"""Which values this release can run. The constructor accepts more: the planner compares such plans too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbtrain.errors import PlanError

if TYPE_CHECKING:
    from nbtrain.plan.plan import Plan

_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2, 3),
    "algorithm": ("allreduce",),
    "hierarchical": (False,),
}


def require_supported(plan: Plan) -> None:
    """Raises `NotImplementedError` that names the first field whose value this release cannot run.

    Raises:
        PlanError: Fields that cannot be together.
    """
    for name, supported in _SUPPORTED.items():
        value = getattr(plan, name)
        if value not in supported:
            choices = " or ".join(f"{name}={choice}" for choice in supported)
            raise NotImplementedError(f"{name}={value!r} comes with a later release; type {choices}")
    if "params" in (plan.offload or ()) and not plan.shards_parameters:
        raise PlanError(
            f"offload={'+'.join(plan.offload or ())} keeps parameter shards in host memory, and zero={plan.zero} "
            "shards no parameters; type zero=3 or zero=2, or offload=optimizer+activations"
        )
