"""Models over stages equal one device: a part of the matrix in which each model, schedule and composition is."""

from __future__ import annotations

from typing import Any

import parity
import pipeline_matrix as matrix
import pipeline_models
import pytest
import torch
from parity import FP32, Run, Tolerance, rank
from pipeline_matrix import COMPOSITIONS, PIPELINES, PLAIN, Cell
from pipeline_models import DROPOUT
from ranks import run_ranks
from torch import nn

import nbtrain as nt
from nbtrain.plan.fields import SCHEDULES

MODELS = list(pipeline_models.CASES)
NO_BLOCKS = "{} has no repeated blocks to recompute"
NO_CUT = "nothing in {} can be cut over tp="
REFUSED = {
    ("MLP", "recompute"): NO_BLOCKS.format("MLP"),
    ("conv + BatchNorm, one Sequential", "recompute"): NO_BLOCKS.format("Sequential"),
    ("conv + BatchNorm, one Sequential", "tp2"): NO_CUT.format("Sequential"),
    ("conv + BatchNorm, residual", "tp2"): NO_CUT.format("ResNet"),
    ("U-Net", "tp2"): NO_CUT.format("UNet"),
}
"""How errors begin, by model and by what a cell's name contains."""


def _cells(model: str) -> list[list[Cell]]:
    """By number of ranks: two stages, four stages and one composition, schedules and options in turn."""
    number = MODELS.index(model)
    layout = COMPOSITIONS[number % len(COMPOSITIONS)]
    options = matrix.composition(model, layout)
    chosen = [
        matrix.pipelines(PIPELINES[0])[number % len(SCHEDULES)],
        matrix.pipelines(PIPELINES[1])[(number + 3) % len(SCHEDULES)],
        options[(number + number // len(COMPOSITIONS)) % len(options)],
    ]
    return [group for ranks in (2, 4, 8) if (group := [cell for cell in chosen if cell.layout.ranks == ranks])]


# every other one, so that the suite stays within its time; `make slow` runs the rest
@pytest.mark.parametrize(
    "model",
    [pytest.param(model, marks=pytest.mark.slow) if number % 2 else model for number, model in enumerate(MODELS)],
)
def test_equals_one_device(model: str) -> None:
    for cells in _cells(model):
        for cell, outcome in zip(cells, matrix.outcomes(pipeline_models.CASES[model], cells), strict=True):
            expected = _refusal(model, cell)
            assert outcome.startswith(expected), (str(cell), outcome)
            assert bool(outcome) == bool(expected), (str(cell), outcome)


def test_every_schedule_stands_with_every_option() -> None:
    """The part of the matrix that the suite runs has all of its rows, columns and options; no processes here."""
    chosen = [cell for model in MODELS for group in _cells(model) for cell in group]
    assert {cell.layout for cell in chosen} == {*PIPELINES, *COMPOSITIONS}
    assert {(cell.layout, cell.schedule) for cell in chosen} >= {(p, s) for p in PIPELINES for s in SCHEDULES}
    assert {cell.option.title for cell in chosen} == {option.title for option in matrix.OPTIONS}


def _refusal(model: str, cell: Cell) -> str:
    """How the error begins; "" where the cell works."""
    found = [reason for (name, part), reason in REFUSED.items() if name == model and part in str(cell)]
    return found[0] if found else ""


def test_batches_change_their_size() -> None:
    """Microbatches of one and of two samples; at last some of none, and one in which nothing counts."""
    case, run = pipeline_models.CASES["GPT, (sum, count) loss"], Run(batch=(16, 10, 2))

    def on_rank() -> None:
        for spec in ("zero=0,schedule=zbv", "zero=3,schedule=1f1b"):
            parity.check_case(case, f"pp=2,num_microbatches=4,{spec}", run, FP32)

    run_ranks(on_rank, 4)


def test_16_bit_gradients_of_weights_add_up_over_microbatches() -> None:
    """FSDP keeps their sum apart, in float32; a zero-bubble schedule computes several in a row."""
    # between `BF16`, which hides a gradient that lacks microbatches here, and one rounding of each
    tolerance = Tolerance(atol=2e-3, rtol=5e-2)

    def on_rank() -> None:
        for schedule in ("zbv", "interleaved_zero_bubble"):
            spec = f"pp=2,zero=3,num_microbatches=4,precision=bf16,schedule={schedule}"
            parity.check_case(pipeline_models.CASES["GPT untied"], spec, Run(steps=1, batch=16), tolerance)

    run_ranks(on_rank, 4)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_dropout_differs_by_microbatch_and_recomputes_alike(schedule: str) -> None:
    plain = Cell(PIPELINES[0], schedule, PLAIN)

    def on_rank() -> tuple[list[torch.Tensor], int, int]:
        runs = [_drop(f"{plain.spec},recompute={kind}") for kind in ("none", "full")]
        (losses, masks), (again, _) = runs
        return [losses, again], len(masks), len({mask.numpy().tobytes() for mask in masks})

    for losses, num_masks, num_distinct in run_ranks(on_rank, 2):
        torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)
        # of each block of this rank, in each microbatch of each step
        assert num_masks == num_distinct == pipeline_models.DEPTH // 2 * plain.layout.num_microbatches * 3


def _drop(spec: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Losses of some steps on samples that are all alike, and which elements dropout left in them."""
    torch.manual_seed(5)
    plan = nt.Plan.parse(spec)
    trainer = nt.Trainer(DROPOUT.make(), plan, optimizer=_sgd, loss_fn=DROPOUT.loss_fn)
    masks: list[torch.Tensor] = []
    for module in trainer.model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda module, inputs, output: masks.append(output != 0))
    ids, targets = (tensor.expand(8, -1) for tensor in DROPOUT.batch(torch.Generator().manual_seed(3), 1))
    torch.manual_seed(rank())
    losses = [trainer.step(ids, targets) for _ in range(3)]
    return torch.stack(losses), masks


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)
