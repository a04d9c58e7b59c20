"""Pipelines: seven schedules of one model, what they cost, and what stages by hand get wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest
from executed import shown

NAME = "04_pipelines.ipynb"
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")


def numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


@pytest.mark.timeout(300)
def test_four_stages_give_one_devices_losses_and_weights(cells: list[Any]) -> None:
    one = numbers(r" (\d\.\d{5})", shown(cells, "def one_device"))
    text = shown(cells, "4 stages   ")
    assert numbers(r" (\d\.\d{5})", text)[:4] == pytest.approx(one[:4], abs=1e-4)
    assert one[3] < one[0]
    assert max(numbers(r"(\de[-+]\d+) apart", text)) < 1e-4


def test_a_rank_holds_its_stage_and_sends_activations(cells: list[Any]) -> None:
    text = shown(cells, "class Sent")
    rows = re.findall(r"^(\S+)\| holds (\S+) parameters, (\S+) MiB .*; sends (\d+) KiB", text, re.MULTILINE)
    assert [(ranks, kib) for ranks, _, _, kib in rows] == [("0", "256"), ("1-2", "512"), ("3", "256")]
    held = {ranks: int(count.replace(",", "")) for ranks, count, _, _ in rows}
    assert held["0"] + 2 * held["1-2"] + held["3"] == 436_864
    assert "held by" not in text


def test_bubbles_and_memory_are_the_literatures(cells: list[Any]) -> None:
    text = shown(cells, "formulas = {")
    rows = {row[0]: [float(word) for word in row[2:]] for line in text.splitlines()[1:] if (row := line.split())}
    assert {name: row[0] for name, row in rows.items()} == {
        "gpipe": 0.375,
        "1f1b": 0.375,
        "interleaved_1f1b": 0.188,
        "looped_bfs": 0.188,
        "interleaved_zero_bubble": 0.062,
        "zbv": 0.062,
        "dualpipev": 0.062,
    }
    assert rows["gpipe"][-4:] == [8, 8, 8, 8]
    assert rows["1f1b"][-4:] == [4, 3, 2, 1]


def test_all_schedules_train_alike(cells: list[Any]) -> None:
    text = shown(cells, "timelines[name] = timeline")
    rows = re.findall(r"^(\S+) +losses (\S+) apart .* replayed (\S+), measured (\S+)$", text, re.MULTILINE)
    assert tuple(name for name, *_ in rows) == SCHEDULES
    assert max(float(off) for _, off, _, _ in rows) < 1e-4
    replayed = {name: float(bubble) for name, _, bubble, _ in rows}
    # thread time of what a rank computes: a busy machine makes it larger, and all of them alike
    assert replayed["zbv"] < replayed["gpipe"]
    assert all(0 < bubble < 2 for bubble in replayed.values())


def test_figures_are_drawn(cells: list[Any]) -> None:
    figures = [cell for cell in cells if "zip(figure(" in cell.source]
    assert len(figures) == 3
    assert all(any("image/png" in output.get("data", {}) for output in cell.outputs) for cell in figures)


def test_auto_leaves_fewer_blocks_where_the_head_is(cells: list[Any]) -> None:
    auto, stated = (part.splitlines() for part in shown(cells, '"auto", ["blocks.2"').split("split=")[1:])
    costs = [[int(cost) for cost in re.findall(r"(\d+)% of", "\n".join(part))] for part in (auto, stated)]
    assert [len(one) for one in costs] == [4, 4]
    assert max(costs[0]) < max(costs[1]) == costs[1][-1]


@pytest.mark.parametrize("marker", ["copies by hand", "stage {rank} alone", "def sum_and_count", "def conv_net"])
def test_what_goes_wrong_by_hand_is_right_here(cells: list[Any], marker: str) -> None:
    text = shown(cells, marker)
    by_hand, here, one = {
        "copies by hand": (r"by hand: (\S+) apart", r"here: losses (\S+),", None),
        "stage {rank} alone": (r"alone: (\S+)", r"here (\S+)", r"one device (\S+),"),
        "def sum_and_count": (r"means (\S+) ", r"here (\S+)", r"one device (\S+) "),
        "def conv_net": (None, r"statistics (\S+) from", None),
    }[marker]
    expected = numbers(one, text)[0] if one else 0.0
    assert numbers(here, text)[0] == pytest.approx(expected, abs=1e-4)
    if by_hand:
        assert all(abs(number - expected) > 1e-3 for number in numbers(by_hand, text))


def test_a_tied_table_is_told(cells: list[Any]) -> None:
    text = shown(cells, "copies by hand")
    assert "held by several ranks, whose gradients are summed: 'tokens.weight'" in text


def test_skips_frozen_stages_accumulation_and_few_samples(cells: list[Any]) -> None:
    rows = re.findall(r"^(.*?) +loss (\S+) apart, .* (\S+) apart$", shown(cells, "class Skips"), re.MULTILINE)
    assert [name for name, *_ in rows] == ["skips", "frozen stage", "accumulation", "5 samples"]
    assert max(float(off) for _, *offs in rows for off in offs) < 1e-4


def test_errors_say_what_to_type(cells: list[Any]) -> None:
    text = shown(cells, "attempts = {")
    assert "no error" not in text
    assert "type num_microbatches=4" in text
    assert "num_microbatches=8 or num_microbatches=10" in text
    assert "did you mean 'blocks.2'?" in text
    assert "take fewer (pp, num_virtual_stages)" in text
    assert "pipeline-parallel ranks 0, 1, 2, 3 compute one batch together" in text


def test_a_script_for_torchrun_runs(cells: list[Any]) -> None:
    losses = numbers(r" (\d\.\d{4})", shown(cells, "runpy.run_path"))
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


def test_the_plans_are_verified(cells: list[Any]) -> None:
    text = shown(cells, "nt.verify")
    assert text.count("verified: ") >= 3
    assert "NOT" not in text
