"""Data parallelism and ZeRO: what the notebook measures is what it says, and one device's numbers everywhere."""

from __future__ import annotations

import re
from typing import Any

import pytest
from executed import shown

pytestmark = pytest.mark.slow  # `make slow` runs it: other tests hold the same numbers

NAME = "01_ddp_and_zero.ipynb"
N = 4
SIDES = ("measured", "predicted")


def numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("marker", "count"),
    [
        ("by_hand = make_model()", 1),
        ('"static_graph": True', 3),
        ("gather_gradients()", 2),
        ("lengths = [40, 30, 20, 10]", 1),
        ("accumulate=4", 3),
    ],
)
def test_every_layout_gives_one_devices_numbers(cells: list[Any], marker: str, count: int) -> None:
    differences = numbers(r"(\de[-+]\d+) (?:from one device|apart)", shown(cells, marker))
    assert len(differences) >= count
    assert max(differences) < 1e-5  # ten steps with lr=0.1; sums over ranks in another order


def test_small_buckets_are_many(cells: list[Any]) -> None:
    counts = [line.count(",") for line in re.findall("buckets of (.*) MiB", shown(cells, '"static_graph": True'))]
    default, half, one = counts[:3]
    assert default < one < half


def test_both_figures_are_drawn(cells: list[Any]) -> None:
    figures = [cell for cell in cells if "plt.figure" in cell.source]
    assert len(figures) == 2
    assert all(any("image/png" in output.get("data", {}) for output in cell.outputs) for cell in figures)


def test_plain_ddp_stops_where_ranks_use_different_layers(cells: list[Any]) -> None:
    text = shown(cells, "class TwoWays")
    assert "plain DDP: Expected to have finished reduction" in text
    assert "nbtrain: gradients 0.25 = (0 + 1) / 4 and 1.25 = (2 + 3) / 4" in text


def test_a_rank_holds_what_the_formulas_say(cells: list[Any]) -> None:
    text = shown(cells, "def predicted")
    measured, predicted = (re.findall(rf"{side} +(.* Adam state = \S+ MiB)", text) for side in SIDES)
    assert len(measured) == N
    assert measured == predicted


def test_the_sharded_update_is_the_full_one(cells: list[Any]) -> None:
    text = shown(cells, "dist.reduce_scatter(")
    assert "largest difference: 0.0" in text
    assert "256 of 1024" in text


def test_what_a_rank_sends_is_what_the_formulas_say(cells: list[Any]) -> None:
    text = shown(cells, "def sent")
    measured = numbers(r"measured +(\S+) MiB", text)
    predicted = numbers(r"predicted (\S+) MiB", text)
    # torch's reduce-scatter over gloo, which zero=2 and zero=3 use, sends twice as much
    more = [0, 0, *numbers(r"(\S+) MiB in reduce-scatter", text)[1:]]
    assert len(measured) == N
    # zero=3 gathers its root unit once
    assert measured == pytest.approx([a + b for a, b in zip(predicted, more, strict=True)], rel=0.05)


def test_a_mean_of_means_is_wrong_and_sum_and_count_right(cells: list[Any]) -> None:
    one, means, counted = numbers(r"(\d\.\d{6})", shown(cells, "def sum_and_count"))
    assert abs(means - one) > 0.1
    assert counted == pytest.approx(one, abs=1e-5)


def test_ranks_run_out_one_after_another(cells: list[Any]) -> None:
    text = shown(cells, "lengths = [40, 30, 20, 10]")
    assert "rank 0: [10, 10, 10, 10]" in text
    assert "rank 3: [10, 0, 0, 0]" in text


def test_accumulation_costs_traffic_with_shards_only(cells: list[Any]) -> None:
    replicated, shared, sharded = numbers(r"(\S+) MiB sent", shown(cells, "accumulate=4"))[:3]
    assert replicated == pytest.approx(shared, rel=0.05)
    assert sharded > 4 * replicated


def test_all_stages_are_verified(cells: list[Any]) -> None:
    text = shown(cells, "nt.verify")
    for zero in range(N):
        assert f"\nverified: zero={zero},dp_shard=4 on 4 ranks" in f"\n{text}"
    assert "NOT" not in text
