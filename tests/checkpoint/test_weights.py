"""One safetensors file of the model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from layouts import Model, data, momentum, train, trainer
from ranks import run_ranks
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import nbtrain as nt
from nbtrain.errors import CheckpointError
from nbtrain.parallel.checkpoint.numbers import fits

TINY = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=12)


def test_out_of_any_layout_and_into_any(tmp_path: Path) -> None:
    def on_rank() -> None:
        file = tmp_path / "model.safetensors"
        for number, (out, into) in enumerate((("tp=2,zero=3", "zero=1"), ("zero=1", "zero=3"))):
            subject = trainer(out, number)
            train(subject, subject.loader(data(), batch_size=16), 1)
            expected = subject.state_dict()
            subject.export_weights(file)
            found = safetensors.torch.load_file(file)
            assert found.keys() == expected.keys() - {"head.weight"}
            assert all(torch.equal(value, expected[name]) for name, value in found.items())
            with safetensors.safe_open(file, "pt") as opened:
                assert json.loads(opened.metadata()["aliases"]) == {"head.weight": "tokens.weight"}
            other = trainer(into, 9)
            other.import_weights(file)
            assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
        assert [path.name for path in tmp_path.iterdir()] == [file.name]

    run_ranks(on_rank, 4)


def test_transformers_reads_it_and_its_files_are_read(tmp_path: Path) -> None:
    theirs = GPT2LMHeadModel(TINY)
    theirs.half().save_pretrained(tmp_path / "theirs")

    def on_rank() -> dict[str, torch.Tensor]:
        subject = nt.Trainer(GPT2LMHeadModel(TINY), nt.Plan(zero=3), optimizer=momentum)
        subject.import_weights(tmp_path / "theirs" / "model.safetensors")
        (tmp_path / "ours").mkdir(exist_ok=True)
        subject.export_weights(tmp_path / "ours" / "model.safetensors")
        return subject.state_dict()

    run_ranks(on_rank, 2)
    (tmp_path / "ours" / "config.json").write_text((tmp_path / "theirs" / "config.json").read_text())
    ours = GPT2LMHeadModel.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value.float()), name


def test_what_does_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    weights = {name: value.clone() for name, value in Model().state_dict().items() if name != "head.weight"}
    del weights["norm.weight"]
    safetensors.torch.save_file({**weights, "bias": torch.zeros(3), "more": torch.zeros(2)}, file)
    safetensors.torch.save_file({**weights, "more": torch.zeros(2)}, tmp_path / "partial.safetensors")
    tied = {**Model().state_dict(), "seen": torch.zeros(()), "head.weight": torch.ones(46, 16)}
    safetensors.torch.save_file(tied, tmp_path / "untied.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:-40])
    (tmp_path / "long.safetensors").write_bytes(struct.pack("<Q", 10**12) + b"{}")

    def on_rank() -> None:
        subject = trainer("zero=1", 0)
        before = subject.state_dict()
        with pytest.raises(CheckpointError, match=r"'bias' is \(3,\) and must be \(7,\)\n  - it lacks 'norm\.weight'"):
            subject.import_weights(file)
        for name, words in (
            ("cut", "is cut off"),
            ("long", "header would have 1000000000000 bytes"),
            ("missing", "No such file"),
            (
                "untied",
                r"'seen' is torch\.float32 and must be torch\.int64\n  - its 'tokens.weight' and 'head.weight' diff",
            ),
        ):
            with pytest.raises(CheckpointError, match=words):
                subject.import_weights(tmp_path / f"{name}.safetensors")
        with pytest.raises(
            CheckpointError, match=r"is a folder; give one .* \(it has cut\.safetensors, .* make one fir"
        ):
            subject.import_weights(tmp_path)
        with pytest.raises(CheckpointError, match="is a table of several files; of a model"):
            subject.import_weights(tmp_path / "model.safetensors.index.json")
        assert all(torch.equal(value, before[name]) for name, value in subject.state_dict().items())
        with pytest.raises(CheckpointError, match=r"it lacks 'norm.weight'\n  - the model has no 'more'\nstrict=False"):
            subject.import_weights(tmp_path / "partial.safetensors")
        subject.import_weights(tmp_path / "partial.safetensors", strict=False)
        assert torch.equal(subject.state_dict()["tokens.weight"], weights["tokens.weight"])
        with pytest.raises(CheckpointError, match=r"was not written: .*(Not a directory|File exists).* \(on rank 0\)"):
            subject.export_weights(file / "below.safetensors")
        for name in (".", "", tmp_path):
            with pytest.raises(CheckpointError, match=r"was not written: it is a folder; give a file in it: '.*model"):
                subject.export_weights(name)
        with pytest.raises(CheckpointError, match=r"which torch.load does not read; give model\.safetensors, or type"):
            subject.export_weights(tmp_path / "model.pt")
        with pytest.raises(CheckpointError, match=r"'a.*b' was not written: ValueError: .*null"):
            subject.export_weights("a\0b")

    run_ranks(on_rank, 2)


def test_every_kind_of_number(tmp_path: Path) -> None:
    class Numbers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 1))
            for index, dtype in enumerate((torch.bfloat16, torch.bool, torch.int8, torch.float64, torch.complex64)):
                self.register_buffer(f"b{index}", torch.randn(3).to(dtype))
            self.register_buffer("none", torch.empty(0, 4))
            self.register_buffer("scalar", torch.tensor(3, dtype=torch.int16))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs @ self.weight

    def on_rank() -> None:
        options: dict[str, Any] = {"optimizer": momentum, "loss_fn": nn.functional.mse_loss}
        torch.manual_seed(0)
        subject = nt.Trainer(Numbers(), nt.Plan(), **options)
        subject.export_weights(tmp_path / "numbers.safetensors")
        expected = subject.state_dict()
        found = safetensors.torch.load_file(tmp_path / "numbers.safetensors")
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
        other = nt.Trainer(Numbers(), nt.Plan(), **options)
        other.import_weights(tmp_path / "numbers.safetensors")
        assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
        other.load(subject.save(tmp_path / "run"))

    run_ranks(on_rank, 1, group=False)


def test_numbers_are_rounded_and_nothing_else() -> None:
    taken = (("float32", "bfloat16"), ("complex128", "complex64"), ("uint8", "int16"), ("int8", "int64"))
    refused = (("int64", "int8"), ("int8", "uint64"), ("int8", "bool"), ("complex64", "float32"), ("float32", "int64"))
    for pairs, expected in ((taken, True), (refused, False)):
        for saved, own in pairs:
            assert fits(getattr(torch, saved), getattr(torch, own)) is expected, (saved, own)
