"""Sequence parallelism inside of stages: whole activations cross between them, parts inside of each."""

from __future__ import annotations

import pipeline_matrix as matrix
import pipeline_models
import pytest
from pipeline_matrix import OPTIONS, Cell, Layout

FOUR = Layout("pp2 x tp2", "pp=2,tp=2,sequence_parallel=true", 4, batch=8)
EIGHT = Layout("pp2 x zero 3 x tp2", "pp=2,tp=2,zero=3,sequence_parallel=true", 8)
PLAIN, _, RECOMPUTE, ACCUMULATE, CLIP = OPTIONS


@pytest.mark.parametrize(
    ("model", "cells"),
    [
        ("HF BERT", [Cell(FOUR, "zbv", CLIP)]),
        ("HF GPT-2", [Cell(FOUR, "1f1b", RECOMPUTE)]),
        pytest.param("HF GPT-2", [Cell(FOUR, "interleaved_1f1b", ACCUMULATE)], marks=pytest.mark.slow),
        pytest.param("HF Llama", [Cell(EIGHT, "dualpipev", PLAIN)], marks=pytest.mark.slow),
    ],
)
def test_equals_one_device(model: str, cells: list[Cell]) -> None:
    assert matrix.outcomes(pipeline_models.CASES[model], cells) == [""] * len(cells)


def test_stages_that_begin_inside_of_blocks_are_refused() -> None:
    layout = Layout("many", "pp=2,tp=2,num_virtual_stages=8,sequence_parallel=true", 4, num_microbatches=16, batch=32)
    (told,) = matrix.outcomes(pipeline_models.CASES["HF Llama"], [Cell(layout, "looped_bfs", PLAIN)])
    assert "pipeline stages begin inside of 'model.layers.0'" in told
    assert told.endswith("begin them at blocks with split=[...], or type sequence_parallel=False")
