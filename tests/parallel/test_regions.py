"""Every element of what a rank wants comes from exactly one rank that has it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nbtrain.parallel.pieces import Box
from nbtrain.parallel.regions import needs, overlap, within, without

SHAPE = (4, 5, 3)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    starts = [draw(st.integers(0, size - 1)) for size in SHAPE]
    sizes = [draw(st.integers(1, size - start)) for start, size in zip(starts, SHAPE, strict=True)]
    return Box(tuple(starts), tuple(sizes))


def marked(*regions: Box) -> np.ndarray:
    """How many of them each element is in."""
    count = np.zeros(SHAPE, dtype=int)
    for box in regions:
        count[within(box, Box((0, 0, 0), SHAPE))] += 1
    return count


@settings(deadline=None, max_examples=60)
@given(boxes(), boxes())
def test_a_box_is_what_it_shares_and_what_is_left(first: Box, second: Box) -> None:
    common = overlap(first, second)
    shared = [] if common is None else [common]
    rest = [first] if common is None else without(first, common)
    assert (marked(*shared) == marked(first) * marked(second)).all()
    assert (marked(*shared, *rest) == marked(first)).all()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(boxes(), max_size=2), min_size=1, max_size=4), boxes(), st.data())
def test_needs_cover_what_is_wanted_once(holders: list[list[Box]], wanted: Box, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(holders) - 1))
    found, missing = needs([wanted], holders, rank)
    assert (marked(*(need.box for need in found), *missing) == marked(wanted)).all()
    had = marked(*(box for boxes in holders for box in boxes)) > 0
    assert not (marked(*missing) * had).any()
    for need in found:
        assert any(overlap(need.box, box) == need.box for box in holders[need.source])
    own = marked(*holders[rank]) > 0
    assert (marked(*(need.box for need in found if need.source == rank)) == marked(wanted) * own).all()


def test_a_scalar_is_one_box() -> None:
    scalar = Box((), ())
    assert needs([scalar], [[], [scalar], [scalar]], 2) == ([(2, scalar)], [])
    assert needs([scalar], [[scalar], []], 1) == ([(0, scalar)], [])
    assert needs([scalar], [[], []], 1) == ([], [scalar])
