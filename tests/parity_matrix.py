"""The parity matrix: every model under every plan, with every option, against one device.

`make parity` runs all of it and rewrites the README's table (`parity_table`); the suite runs each model under each plan
once, the options in turn.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass

import parity
import zoo
from parity import BF16, FP32, Run, Tolerance
from ranks import run_ranks

from nbtrain.errors import ModelError, PlanError


@dataclass(frozen=True)
class Layout:
    """A column of the table."""

    title: str
    spec: str
    ranks: int


@dataclass(frozen=True)
class Option:
    """What is varied beside model and layout."""

    title: str
    spec: str = ""
    run: Run = Run(steps=2)  # noqa: RUF009  # frozen
    tolerance: Tolerance = FP32


LAYOUTS = (
    Layout("zero 0", "zero=0", 4),
    Layout("zero 1", "zero=1", 4),
    Layout("zero 2", "zero=2", 4),
    Layout("zero 3", "zero=3", 4),
    Layout("HSDP 2x2", "zero=3,dp_replicate=2", 4),
    Layout("tp2", "tp=2", 2),
    Layout("tp4", "tp=4", 4),
    Layout("tp2 x zero 3", "tp=2,zero=3", 4),
    Layout("tp2 x zero 1", "tp=2,zero=1", 4),
)
OPTIONS = (
    Option("fp32"),
    # one step: where weights were rounded otherwise, the next one's gradients are of another point
    Option("bf16", ",precision=bf16", Run(steps=1), BF16),
    Option("recompute", ",recompute=full"),
    Option("accumulate", run=Run(steps=2, accumulate=3)),
    Option("clip", run=Run(steps=2, grad_clip=0.05)),
    Option("meta-init", run=Run(steps=2, meta=True)),
)


def outcomes(model: str, pairs: Sequence[tuple[Layout, Option]]) -> list[str]:
    """Of each pair: "" where the numbers are one device's, else the error that says why it cannot be.

    Args:
        model: A name in `zoo.CASES`.
        pairs: On as many ranks each.

    Raises:
        RanksFailed: Numbers differ, or an error that is not nbtrain's own.
    """

    def on_rank() -> list[str]:
        with contextlib.redirect_stdout(io.StringIO()):  # plans tell what they cut
            return [_outcome(model, layout, option) for layout, option in pairs]

    first, *others = run_ranks(on_rank, pairs[0][0].ranks, timeout=60 * len(pairs))
    assert all(other == first for other in others), "the same on every rank"
    return first


def _outcome(model: str, layout: Layout, option: Option) -> str:
    spec = layout.spec + option.spec
    try:
        parity.check_case(zoo.CASES[model], spec, option.run, option.tolerance)
    except (ModelError, PlanError) as refused:
        return str(refused).splitlines()[0]
    except Exception as error:
        error.add_note(f"{model} with {spec} and {option.title}")
        raise
    return ""
