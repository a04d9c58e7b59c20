"""Three dimensions on eight ranks: who holds what, who talks to whom, and one device's losses in all of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from executed import shown

pytestmark = pytest.mark.slow  # `make slow` runs it: other tests hold the same

NAME = "05_three_dimensions.ipynb"


def numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


@pytest.mark.timeout(300)
def test_losses_and_weights_are_one_devices(cells: list[Any]) -> None:
    one = numbers(r" (\d\.\d{5})", shown(cells, "reference.append"))
    text = shown(cells, "2 x 2 x 2 ")
    assert numbers(r" (\d\.\d{5})", text) == pytest.approx(one, abs=1e-4)
    assert one[-1] < one[0]
    assert max(numbers(r"(\de[-+]\d+) apart", text)) < 1e-4


def test_the_mesh_is_drawn(cells: list[Any]) -> None:
    (figure,) = [cell for cell in cells if "plt.subplots" in cell.source]
    assert any("image/png" in output.get("data", {}) for output in figure.outputs)


def test_each_axis_divides_something_else(cells: list[Any]) -> None:
    text = shown(cells, 'endswith("qkv.weight")')
    for rank in range(8):
        at = f"pp={rank // 4} dp_replicate=0 dp_shard={rank // 2 % 2} tp={rank % 2}"
        names = re.findall(rf"{at}: (\S+) \(48, 64\)", text)
        assert names == [f"blocks.{2 * (rank // 4) + i}.qkv.weight" for i in range(2)]
    told = shown(cells, "print(trainer.describe())")
    assert "sharded and cut and split" in told
    assert re.search(r"blocks\.0-3\.qkv +colwise +192 = 64 \+ 64 \+ 64 outputs", told)
    assert "stage 1, pp rank 1: blocks.2-3, norm, head" in told


def test_what_moves_along_which_axis(cells: list[Any]) -> None:
    text = shown(cells, "moved.calls.items()")
    moved = {(axis, name): int(count) for axis, name, count in re.findall(r"^(\S+) +(\S+) +(\d+) times", text, re.M)}
    assert moved["dp_shard", "allgather_base"] == moved["dp_shard", "reduce_scatter_base"] == 3  # two blocks, the root
    assert moved["tp", "allreduce"] == 2 * 4 * 4 + 4
    assert (moved["tp", "send"], moved["pp", "send"], moved["all", "send"]) == (1, 4 + 1, 7)
    assert numbers(r"pp +send +5 times +(\S+) KiB", text) == [4 * 2 * 32 * 64 * 4 / 2**10]


def test_the_norm_counts_each_element_once(cells: list[Any]) -> None:
    text = shown(cells, "squares of all ranks")
    one, here, squares = numbers(r"(\d\.\d{4})", text.splitlines()[0])
    assert here == pytest.approx(one, abs=1e-4)
    assert squares > one + 1e-3
    assert max(numbers(r"alone (\S+)", text)) < one - 1e-3


def test_every_combination_gives_one_devices_losses(cells: list[Any]) -> None:
    rows = re.findall(
        r"^(\S+) +losses (\S+) apart +all ranks hold (\S+) bytes", shown(cells, "tolerance in cases"), re.M
    )
    held = {spec: float(num_bytes) for spec, _, num_bytes in rows}
    assert len(rows) == 5
    assert all(float(off) < (2e-2 if "bf16" in spec else 2e-3 if "fp16" in spec else 1e-4) for spec, off, _ in rows)
    # two replicas of 4 + 4 + 8 bytes; of 4 + 4, and once 8; once 16; norms are there on tensor-parallel peers too
    expected = {"zero=0": 32, "zero=1,schedule=interleaved_1f1b": 24, "zero=3,recompute=full,accumulate=2": 16}
    assert {spec: held[spec] for spec in expected} == pytest.approx(expected, rel=0.03)


def test_an_overflow_is_skipped_by_all(cells: list[Any]) -> None:
    ((skipped, scale),) = set(re.findall(r"(\d) of 3 steps skipped, loss scale (\S+)", shown(cells, "loud = ")))
    assert int(skipped) > 0
    assert float(scale) == 65536 / 2 ** int(skipped)


def test_degrees_trade_memory_traffic_and_bubble(cells: list[Any]) -> None:
    lines = shown(cells, "on 64 ranks").splitlines()[1:]
    rows = {words[0]: [float(word) for word in words[1:]] for line in lines if (words := line.split())}
    states, activations, data, tp, pp, bubble = zip(*rows.values(), strict=True)
    assert states[0] == pytest.approx(39.1e9 * (4 + 4 + 8 / 64) / 2**30, abs=0.1)
    assert rows["zero=3"][0] == pytest.approx(39.1e9 * 16 / 64 / 2**30, abs=0.1)
    assert rows["zero=1,pp=8"][1] == activations[0] > rows["zero=1,tp=8"][1]
    assert rows["zero=1,pp=8"][5] == pytest.approx(7 / 64, abs=1e-3)
    assert max(tp) > max(data) > max(pp)
    assert max(bubble) == rows["zero=1,pp=8"][5]


def test_errors_say_what_to_type(cells: list[Any]) -> None:
    text = shown(cells, "attempts = {")
    assert "no error" not in text
    assert "one of these fits: pp from 1, 2, 4" in text
    assert "choose tp from 1, 2, 4" in text
    assert "type sequence_parallel=False" in text
    assert "type num_microbatches=4" in text
    assert "tensor-parallel ranks 6, 7 compute one batch together" in text


def test_the_plan_is_verified(cells: list[Any]) -> None:
    text = shown(cells, "nt.verify")
    assert "verified: zero=3,dp_shard=2,tp=2,pp=2" in text
    assert "NOT" not in text
