"""The quickstart, cell by cell, on a real kernel: what it shows is what it says."""

from __future__ import annotations

import re
from typing import Any

import pytest
from executed import shown

NAME = "00_quickstart.ipynb"


@pytest.mark.timeout(300)
def test_hello_and_an_all_reduce(cells: list[Any]) -> None:
    hello = shown(cells, "one line for all of us").splitlines()
    assert hello == ["one line for all of us", *(f"{r}| hello from rank {r} of 4 on cpu" for r in range(4))]
    assert shown(cells, "dist.all_reduce(t)") == "tensor([6., 6.])"


def test_the_loss_falls_alike_under_both_plans(cells: list[Any]) -> None:
    (start, ddp), (also, fsdp) = (
        map(float, re.findall(r"loss (\d+\.\d+) -> (\d+\.\d+)", shown(cells, marker))[0])
        for marker in ("ddp = make_trainer", "fsdp = make_trainer")
    )
    assert start == also > 5
    assert ddp < 3
    assert abs(ddp - fsdp) < 0.05  # the sums of gradients are ordered differently


def test_bars_show_once_and_the_figure_is_drawn(cells: list[Any]) -> None:
    bars = [line.rsplit("\r", 1)[-1] for line in shown(cells, "ddp = make_trainer").split("\n")]
    assert sum("120/120" in bar for bar in bars) == 1
    (figure,) = [cell for cell in cells if "plt.plot(ddp_losses" in cell.source]
    assert any("image/png" in output.get("data", {}) for output in figure.outputs)


def test_a_sharded_rank_holds_a_quarter(cells: list[Any]) -> None:
    table = shown(cells, "MiB on rank 0")
    for kind in ("parameters", "gradients", "optimizer"):
        whole, shard = map(float, re.findall(rf"{kind}\s+(\S+)\s+(\S+)", table)[0])
        assert shard == pytest.approx(whole / 4, rel=0.05, abs=0.01)


def test_text_is_sampled(cells: list[Any]) -> None:
    assert shown(cells, "def sample").startswith("def ")
    assert len(shown(cells, "def sample")) > 150


def test_an_error_is_survived(cells: list[Any]) -> None:
    assert "ValueError on rank 2: something only rank 2 saw" in shown(cells, "something only rank 2 saw")
    assert shown(cells, "still here after") == "still here after 120 steps\n"
    assert shown(cells, "%distributed stop") == "the ranks have stopped\n"
