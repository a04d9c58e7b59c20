"""The parity matrix of pipelines: every model over stages, by every schedule, alone and with every other axis.

`make parity` runs all of it and rewrites the README's second table (`parity_table`); the suite runs a part of it
(`test_pipeline_matrix`).
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import parity
import pipeline_models
from models import Case
from parity import BF16, Run
from parity_matrix import Option
from ranks import run_ranks

from nbtrain.errors import ModelError, PlanError
from nbtrain.plan.fields import SCHEDULES


@dataclass(frozen=True)
class Layout:
    """A column of the table.

    Attributes:
        spec: Of the plan; ``pp`` is in it.
        num_microbatches: Enough for every schedule.
        batch: Samples in all, two of each rank's in a microbatch where there is no accumulation.
    """

    title: str
    spec: str
    ranks: int
    num_microbatches: int = 4
    batch: int = 16


@dataclass(frozen=True)
class Cell:
    """One training run."""

    layout: Layout
    schedule: str
    option: Option

    @property
    def spec(self) -> str:
        """Of the plan."""
        rest = f"schedule={self.schedule},num_microbatches={self.layout.num_microbatches}"
        return f"{self.layout.spec},{rest}{self.option.spec}"

    @property
    def run(self) -> Run:
        return replace(self.option.run, batch=self.layout.batch)

    def __str__(self) -> str:
        return f"{self.layout.title}, {self.schedule}, {self.option.title}"


PIPELINES = (
    Layout("pp2", "pp=2", 2, batch=8),
    Layout("pp4", "pp=4", 4, num_microbatches=8),
)
COMPOSITIONS = (
    Layout("pp2 x zero 3", "pp=2,zero=3", 4),
    Layout("pp2 x zero 1", "pp=2,zero=1", 4),
    Layout("pp2 x dp2", "pp=2,zero=0", 4),
    Layout("pp2 x tp2", "pp=2,tp=2", 4, batch=8),
    Layout("pp2 x dp2 x tp2", "pp=2,tp=2,zero=0", 8),
    Layout("pp2 x zero 3 x tp2", "pp=2,tp=2,zero=3", 8),
)
PLAIN = Option("fp32")
OPTIONS = (
    PLAIN,
    # one step: where weights were rounded otherwise, the next one's gradients are of another point
    Option("bf16", ",precision=bf16", Run(steps=1), BF16),
    Option("recompute", ",recompute=full"),
    # each chunk is half a batch: a sample of each rank in a microbatch
    Option("accumulate", run=Run(steps=2, accumulate=2)),
    Option("clip", run=Run(steps=2, grad_clip=0.05)),
)


def pipelines(layout: Layout) -> list[Cell]:
    """A layout by every schedule."""
    return [Cell(layout, schedule, PLAIN) for schedule in SCHEDULES]


def composition(model: str, layout: Layout) -> list[Cell]:
    """A layout with every option, by the schedules in turn: another one for each model."""
    first = list(pipeline_models.CASES).index(model) + COMPOSITIONS.index(layout)
    return [Cell(layout, SCHEDULES[(first + index) % len(SCHEDULES)], option) for index, option in enumerate(OPTIONS)]


def outcomes(case: Case, cells: Sequence[Cell]) -> list[str]:
    """Of each cell: "" where the numbers are one device's, else the error that says why it cannot be.

    Args:
        case: The model.
        cells: On as many ranks each.

    Raises:
        RanksFailed: Numbers differ, or an error that is not nbtrain's own.
    """
    first, *others = run_ranks(lambda: list(_on_rank(case, cells)), cells[0].layout.ranks, timeout=60 * len(cells))
    assert all(other == first for other in others), "the same on every rank"
    return first


def _on_rank(case: Case, cells: Sequence[Cell]) -> Iterator[str]:
    for cell in cells:
        with contextlib.redirect_stdout(io.StringIO()):  # plans tell what they cut
            yield _outcome(case, cell)


def _outcome(case: Case, cell: Cell) -> str:
    try:
        parity.check_case(case, cell.spec, cell.run, cell.option.tolerance)
    except (ModelError, PlanError) as refused:
        return str(refused).splitlines()[0]
    except Exception as error:
        error.add_note(str(cell))
        raise
    return ""
