"""The frozen description of a layout: what a user types after ``--plan``. Imports no torch."""

from nbtrain.plan.plan import Plan

__all__ = ["Plan"]
