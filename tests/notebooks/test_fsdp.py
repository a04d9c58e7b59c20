"""FSDP: what is gathered when, what a rank holds, and one device's losses by every way to train."""

from __future__ import annotations

import re
from typing import Any

import pytest
from executed import shown

pytestmark = pytest.mark.slow  # `make slow` runs it: other tests hold the same numbers

NAME = "02_fsdp.ipynb"
LOSSES = r"^(?:\S+\| )?%s +(\d\.\d{4} \d\.\d{4} \d\.\d{4} \d\.\d{4})"


def losses(cells: list[Any], marker: str, name: str) -> list[float]:
    (found, *_) = re.findall(LOSSES % name, shown(cells, marker), re.MULTILINE)
    return [float(loss) for loss in found.split()]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("marker", "name", "close"),
    [
        ("sharded = trainer_of", "zero=3", 1e-3),
        ("hsdp = trainer_of", "HSDP 2x2", 1e-3),
        ('for precision in ("bf16"', "bf16", 3e-2),
        ('for precision in ("bf16"', "fp16", 3e-3),
        ("class Living", "none", 1e-3),
        ("class Living", "selective", 1e-3),
        ("class Living", "full", 1e-3),
        ("offload=params", "offloaded", 1e-3),
        ('compile="eager"', "captured", 1e-3),
    ],
)
def test_every_way_gives_one_devices_losses(cells: list[Any], marker: str, name: str, close: float) -> None:
    one = losses(cells, "reference = []", "one device")
    assert losses(cells, marker, name) == pytest.approx(one, abs=close)
    assert one[-1] < one[0]


def test_a_rank_holds_a_quarter_with_hsdp_a_half(cells: list[Any]) -> None:
    assert "rank 0 holds 59,232 of 236,928 parameters" in shown(cells, "print(sharded.describe())")
    text = shown(cells, "hsdp = trainer_of")
    quarter, half = (float(size) for size in re.findall(r"(\S+) KiB measured", text)[:2])
    assert half == pytest.approx(2 * quarter, rel=0.01)
    sums = dict(re.findall(r"rank (\d) holds a block of \(96, 64\) that sums to (\S+)", text))
    assert sums["0"] == sums["2"] != sums["1"] == sums["3"]


def test_figures_are_drawn(cells: list[Any]) -> None:
    figures = [cell for cell in cells if "plt.figure" in cell.source or "plt.subplots" in cell.source]
    assert len(figures) == 2
    assert all(any("image/png" in output.get("data", {}) for output in cell.outputs) for cell in figures)


def test_a_rank_grows_by_its_shards_only(cells: list[Any]) -> None:
    text = shown(cells, "def tower")
    whole, quarter = (int(n) for n in re.findall(r"(\d+) MiB of weights, a quarter is (\d+)", text)[0])
    meta, plain = (int(n) for n in re.findall(r"by (\d+) MiB with meta_init and by (\d+) MiB", text)[0])
    assert quarter <= meta < whole / 2
    assert plain > whole


def test_weights_do_not_depend_on_the_layout(cells: list[Any]) -> None:
    digests = re.findall(r"^(?:\S+\| )?(zero=\S+) +(\w{16})$", shown(cells, "hashlib.sha256"), re.MULTILINE)
    assert len({plan for plan, _ in digests}) == 4
    assert len({digest for _, digest in digests}) == 1


def test_an_overflow_is_skipped_and_the_scale_falls(cells: list[Any]) -> None:
    text = shown(cells, 'for precision in ("bf16"')
    assert "computes in torch.bfloat16, holds torch.float32" in text
    ((skipped, scale),) = set(re.findall(r"(\d) of 4 steps skipped, loss scale (\S+)", text))
    assert int(skipped) > 0
    assert float(scale) == 65536 / 2 ** int(skipped)


def test_recomputation_keeps_less(cells: list[Any]) -> None:
    none, selective, full = (float(size) for size in re.findall(r"keeps +(\S+) MiB", shown(cells, "class Living"))[:3])
    assert selective < 0.8 * none
    assert full < 0.3 * none


def test_an_early_optimizer_trains_nothing_in_plain_torch(cells: list[Any]) -> None:
    plain, here = (float(size) for size in re.findall(r"by (\d\S*)", shown(cells, "early = ")))
    assert plain == 0
    assert here == pytest.approx(1e-3, rel=0.1)  # Adam's first step is the learning rate


def test_all_plans_are_verified(cells: list[Any]) -> None:
    text = shown(cells, "nt.verify")
    assert text.count("verified: ") >= 5
    assert "NOT" not in text
