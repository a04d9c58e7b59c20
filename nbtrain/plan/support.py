"""Which values this release can run. The constructor accepts more: the planner compares such plans too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbtrain.plan.plan import Plan

_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2, 3),
    "tp": (1,),
    "pp": (1,),
    "precision": ("fp32", "bf16"),
    "recompute": ("none",),
    "offload": (None,),
    "algorithm": ("allreduce",),
    "hierarchical": (False,),
}


def require_supported(plan: Plan) -> None:
    """Raises `NotImplementedError` that names the first field whose value this release cannot run."""
    for name, supported in _SUPPORTED.items():
        value = getattr(plan, name)
        if value not in supported:
            choices = " or ".join(f"{name}={choice}" for choice in supported)
            raise NotImplementedError(f"{name}={value!r} comes with a later release; type {choices}")
