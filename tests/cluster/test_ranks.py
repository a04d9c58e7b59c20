"""The grammar of rank specs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.cluster.ranks import compact, parse
from nbtrain.errors import RankSpecError


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        ("0", [0]),
        ("0,2", [0, 2]),
        ("2,0,2", [2, 0]),
        ("1-3", [1, 2, 3]),
        ("-1", [3]),
        ("-2--1", [2, 3]),
        ("0, 2-3", [0, 2, 3]),
        (" ALL ", [0, 1, 2, 3]),
        ("even", [0, 2]),
        ("odd", [1, 3]),
    ],
)
def test_specs(spec: str, ranks: list[int]) -> None:
    assert parse(spec, 4) == ranks


@pytest.mark.parametrize("spec", ["", "4", "-5", "1-4", "3-1", "a", "1,,2", "1-", "0 2", "1.5"])
def test_bad_specs_say_what_to_type(spec: str) -> None:
    with pytest.raises(RankSpecError, match=r"-r|choose from 0 to 3"):
        parse(spec, 4)


@given(st.sets(st.integers(0, 30), min_size=1))
def test_compact_is_read_back(ranks: set[int]) -> None:
    assert parse(compact(ranks), 31) == sorted(ranks)
