"""Every model of the zoo under some plans, each pair with one of the options: one device's numbers or a known error."""

from __future__ import annotations

import parity_matrix as matrix
import pytest
import zoo
from parity_matrix import LAYOUTS, OPTIONS, Layout, Option

KV_HEADS = "tp=4 does not divide {}=2 of '{}'; choose tp from 1, 2"
REFUSED = {
    ("conv + BatchNorm", "tp"): "nothing in ConvNet can be cut over tp=",
    ("MLP", "recompute"): "MLP has no repeated blocks to recompute",
    ("GQA", "tp4"): KV_HEADS.format("kv_heads", "blocks.0.attention"),
    ("HF Llama", "tp4"): KV_HEADS.format("num_key_value_heads", "model.layers.0.self_attn"),
}
"""What cannot be, by model and by how a layout or an option begins."""

EVERY = 3
"""A model takes every third layout here, so that each is taken by some; `make parity` runs all."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("model", zoo.CASES)
def test_equals_one_device(model: str) -> None:
    pairs = _pairs(model)
    for ranks in (2, 4):
        chosen = [pair for pair in pairs if pair[0].ranks == ranks]
        if not chosen:
            continue
        for (layout, option), outcome in zip(chosen, matrix.outcomes(model, chosen), strict=True):
            expected = _refusal(model, layout, option)
            assert outcome.startswith(expected), (layout.title, option.title, outcome)
            assert bool(outcome) == bool(expected), (layout.title, option.title, outcome)


def test_every_layout_and_every_option_is_taken_by_some() -> None:
    chosen = [pair for model in zoo.CASES for pair in _pairs(model)]
    assert {layout for layout, _ in chosen} == set(LAYOUTS)
    assert {option.title for _, option in chosen} == {option.title for option in OPTIONS}


def _pairs(model: str) -> list[tuple[Layout, Option]]:
    number = list(zoo.CASES).index(model)
    return [
        (layout, OPTIONS[(number // EVERY + index) % len(OPTIONS)])
        for index, layout in enumerate(LAYOUTS)
        if (number + index) % EVERY == 0
    ]


def _refusal(model: str, layout: Layout, option: Option) -> str:
    """How the error begins; "" where the pair works."""
    reasons = [
        reason
        for (name, begin), reason in REFUSED.items()
        if name == model and (layout.title.startswith(begin) or option.title == begin)
    ]
    return reasons[0] if reasons else ""
