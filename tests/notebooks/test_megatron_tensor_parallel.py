"""Tensor parallelism: cuts by hand and by the plan, what they communicate, and one device's numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest
from executed import shown

pytestmark = pytest.mark.slow  # `make slow` runs it: other tests hold the same numbers

NAME = "03_megatron_tensor_parallel.ipynb"


def number(pattern: str, text: str) -> float:
    (found, *_) = re.findall(pattern, text)
    return float(found)


@pytest.mark.timeout(300)
def test_an_mlp_cut_by_hand(cells: list[Any]) -> None:
    text = shown(cells, "class f(")
    assert number(r"output off by (\S+),", text) < 1e-5
    assert number(r"gradient by (\S+)", text) < 1e-5


def test_a_naive_cut_is_wrong_and_one_by_heads_right(cells: list[Any]) -> None:
    assert number(r"off by (\S+),", shown(cells, "ColwiseParallel()")) > 0.1
    assert number(r"off by (\S+)", shown(cells, "def rows_of_my_heads")) < 1e-5


def test_the_plan_says_what_is_cut(cells: list[Any]) -> None:
    text = shown(cells, "tp = nt.Trainer")
    assert re.search(r"blocks\.0-1\.attn\.qkv +colwise +192 = 64 \+ 64 \+ 64 outputs", text)
    assert re.search(r"tokens +vocab +512 rows", text)
    assert re.search(r"norm +a norm", text)


def test_heads_are_local(cells: list[Any]) -> None:
    text = shown(cells, "what comes to out")
    loss, one = re.findall(r"(\d\.\d{6})", text)[:2]
    assert float(loss) == pytest.approx(float(one), abs=1e-5)
    assert "qkv (96, 64)  what comes to out (4, 64, 32)  table (256, 64)" in text


def test_a_layer_communicates_four_times(cells: list[Any]) -> None:
    assert "a layer:  {'allreduce_': 4.0}" in shown(cells, "class Collectives")
    pairs = shown(cells, 'sequence_parallel=true", layers')
    assert "{'_allgather_base_': 4.0, '_reduce_scatter_base_': 4.0}" in pairs
    assert "{'allreduce_': 2.0}" in shown(cells, "mlps = nt.Plan")


def test_each_parallelism_keeps_less(cells: list[Any]) -> None:
    text = shown(cells, "def kept_bytes")
    rows = dict(re.findall(r"(\S+) MiB kept   (\S+)", text))
    sizes = [float(size) for size in rows]
    assert len(sizes) == 4
    assert sizes == sorted(sizes, reverse=True)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", text)]
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-5)


def test_figures_are_drawn(cells: list[Any]) -> None:
    figures = [cell for cell in cells if "plt.figure" in cell.source or "plt.subplots" in cell.source]
    assert len(figures) == 2
    assert all(any("image/png" in output.get("data", {}) for output in cell.outputs) for cell in figures)


def test_masks_are_equal_where_activations_are_whole(cells: list[Any]) -> None:
    text = shown(cells, "different masks")
    assert "in the MLP, cut: 4 different masks" in text
    assert "residual, whole: 1 different masks" in text


def test_two_dimensions_give_one_devices_losses(cells: list[Any]) -> None:
    text = shown(cells, 'both = trainer_of("tp=2,zero=3")')
    two, one = ([float(n) for n in re.findall(rf"{name} +(.*)", text)[0].split()] for name in ("zero=3", "one device"))
    assert two == pytest.approx(one, abs=1e-4)
    assert "rank 3 holds (48, 64) of qkv" in text
    assert "sharded and cut" in shown(cells, "print(both.describe())")


def test_what_cannot_be_right_is_an_error(cells: list[Any]) -> None:
    text = shown(cells, "attempts = {")
    assert "ModelError\n  tp=4 does not divide heads=6" in text
    assert "tensor-parallel ranks 0, 1 compute one batch together" in text
    assert "did you mean 'blocks.*.mlp.up'?" in text
    assert "needs 'blocks.0.mlp.down': 'rowwise' as well" in text


def test_all_plans_are_verified(cells: list[Any]) -> None:
    text = shown(cells, "nt.verify")
    assert text.count("verified: ") >= 5
    assert "NOT" not in text
