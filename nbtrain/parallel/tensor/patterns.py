"""Tensor parallelism that a person, or the model itself, states: styles by patterns of module names."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from nbtrain.errors import PlanError, nearest
from nbtrain.parallel.tensor.cuts import STYLES

ALIASES = {
    "column": "colwise",
    "row": "rowwise",
    "colwise_rep": "colwise_gather_output",
    "packed_colwise": "colwise",
    "embedding_rowwise": "vocab",
    "sequence_parallel": "sequence",
    "replicated": "replicate",
    "replicated_with_grad_allreduce": "replicate",
    "whole": "replicate",
}
"""Names that other libraries have for `cuts.STYLES`."""


def own_plan(model: nn.Module) -> dict[str, str] | None:
    """What the model says of itself (Hugging Face's ``tp_plan``), in our styles; without what has no counterpart."""
    stated = getattr(model, "tp_plan", None)
    if not isinstance(stated, Mapping) or not stated:
        return None
    own = {str(pattern): ALIASES.get(style, style) for pattern, style in stated.items()}
    return {pattern: style for pattern, style in own.items() if style in STYLES}


def styles_of(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, str]:
    """The style of each module that a pattern matches, part by part; later patterns win."""
    names = [name for name, _ in model.named_modules()]
    return {name: style for pattern, style in patterns.items() for name in names if matches(name, pattern)}


def matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def style_named(style: str, pattern: str) -> str:
    """Of `cuts.STYLES`, from a name or an alias.

    Raises:
        PlanError: There is no such style.
    """
    found = ALIASES.get(style, style)
    if found not in STYLES:
        raise PlanError(f"tp_plan: {pattern!r} has the style {style!r}; {nearest(str(style), STYLES)}")
    return found
