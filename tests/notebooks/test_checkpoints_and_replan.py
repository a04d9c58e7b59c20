"""Checkpoints and changes of layout: the losses of a run that nothing disturbed, whatever happens on the way."""

from __future__ import annotations

import re
from typing import Any

import pytest
from executed import shown

NAME = "06_checkpoints_and_replan.ipynb"
WITHIN = r"losses (\S+) from the calm run"


def worst(text: str) -> float:
    return max(float(off) for off in re.findall(WITHIN, text))


@pytest.mark.timeout(300)
def test_a_checkpoint_is_a_file_a_rank_a_manifest_and_a_name(cells: list[Any]) -> None:
    text = shown(cells, "folder.rglob")
    assert re.findall(r"step-00000006/(__\d_0\.distcp)", text) == [f"__{rank}_0.distcp" for rank in range(4)]
    assert "step-00000006/nbtrain.json" in text
    assert "latest says: step-00000006" in text
    manifest = shown(cells, "manifest = json.loads")
    assert "aliases: {'head.weight': 'tokens.weight'}" in manifest
    assert "a tensor: {'shape': [192, 64], 'dtype': 'float32'}" in manifest
    assert "its state: AdamW" in manifest


def test_the_same_plan_goes_on_bit_for_bit(cells: list[Any]) -> None:
    before, after = shown(cells, "dropout=0.2").splitlines()
    assert before.removeprefix("as before").split() == after.removeprefix("after load").split()
    assert len(before.split()) == 6


def test_what_is_written_behind_the_training_is_the_state_of_the_call(cells: list[Any]) -> None:
    text = shown(cells, "blocking=False")
    assert "step-00000007 holds step 7, the trainer is at step 8" in text
    assert shown(cells, "def look") == "step-00000007 step-00000008\nlatest: step-00000008\n"


def test_a_death_during_a_save_leaves_the_one_before(cells: list[Any]) -> None:
    assert "rank 2 died (SIGKILL)" in shown(cells, "signal.SIGKILL)")
    assert "trainer is lost" in shown(cells, "restart --ranks 2")
    (half,) = [cell for cell in cells if cell.source == "look()"]
    text = "".join(output.text for output in half.outputs)
    assert re.match(r"\.step-00000010\.\S+ step-00000007 step-00000008\nlatest: step-00000008\n", text)
    assert "went on at step 8; losses 0e+00 from the calm run" in shown(cells, "went on at step")


def test_a_full_disk_is_an_error_on_all_ranks(cells: list[Any]) -> None:
    text = shown(cells, "RLIMIT_FSIZE")
    assert text.startswith("the checkpoint of step 12 was not written: ")
    assert "too large" in text
    assert "(on rank 1)" in text


@pytest.mark.parametrize(("marker", "count"), [('"tp=2,zero=1", "tp=2,pp=2', 3), ('"zero=3", "pp=2"', 2)])
def test_other_plans_and_fewer_ranks_go_on(cells: list[Any], marker: str, count: int) -> None:
    text = shown(cells, marker)
    assert text.count("goes on at step 12") == count
    assert worst(text) < 1e-4


def test_what_does_not_fit_is_told_at_once(cells: list[Any]) -> None:
    text = shown(cells, "small.load")
    assert "its optimizer is AdamW, and the trainer's SGD" in text
    assert "its scheduler is LambdaLR, and the trainer's none" in text
    assert "'blocks.3.mlp.2.bias'" in text


def test_plain_torch_reads_the_weights(cells: list[Any]) -> None:
    (here,) = re.findall(r"4 ranks (\S+)", shown(cells, "export_weights"))
    text = shown(cells, "load_file")
    (plain,) = re.findall(r"plain torch +(\S+)", text)
    assert float(plain) == pytest.approx(float(here), abs=1e-5)
    assert "missing_keys=['head.weight'], unexpected_keys=[]" in text


def test_the_loss_curve_does_not_notice_a_change_of_layout(cells: list[Any]) -> None:
    text = shown(cells, "trainer.replan(plan)\n    losses")
    assert text.count("laid out anew at step") == 3
    assert "24 steps under four layouts" in text
    assert worst(text) < 1e-3
    (figure,) = [cell for cell in cells if "plt.subplots" in cell.source]
    assert any("image/png" in output.get("data", {}) for output in figure.outputs)


def test_nothing_of_an_old_layout_stays(cells: list[Any]) -> None:
    rows = re.findall(r"trainer +(\d+) KiB +process +(\d+) KiB", shown(cells, "in curve[0]:\n    print"))
    others = [int(process) - int(held) for held, process in rows]
    assert len(others) == 4
    assert max(others) - min(others) < 100
    assert len({held for held, _ in rows}) == 3  # three layouts, the last one the first again


def test_a_plan_that_does_not_fit_changes_nothing(cells: list[Any]) -> None:
    text = shown(cells, '"tp=3", "tp=8"')
    assert text.count("one of these fits: tp from 1, 2, 4") == 2
    assert "still zero=3,dp_shard=4" in text


def test_what_dead_processes_left_is_removed(cells: list[Any]) -> None:
    assert shown(cells, "the half is gone").startswith("step-00000012 step-00000016\nlatest: step-00000016\n")
