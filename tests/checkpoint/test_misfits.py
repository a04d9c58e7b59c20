"""What does not fit is one error that lists it all, before anything is changed."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import Model, data, momentum, train, trainer
from ranks import run_ranks
from torch import nn

import nbtrain as nt
from nbtrain.errors import CheckpointError, SessionError, UsageError
from nbtrain.parallel.checkpoint import folder


class Changed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(9))
        self.fresh = nn.Linear(4, 4, bias=False)
        del self.seen
        self.register_buffer("seen", torch.zeros((), dtype=torch.float32))
        self.positions, self.place = None, nn.Embedding(3, 3)


def test_one_error_lists_all(tmp_path: Path) -> None:
    def on_rank() -> None:
        subject = trainer("zero=1", 0)
        loader = subject.loader(data(), batch_size=16)
        train(subject, loader, 1)
        saved = subject.save(tmp_path)
        other = trainer("zero=3", 1, make=Changed, optimizer=momentum, scheduler=_step)
        kept = other.loader(data(), batch_size=32)
        before = other.state_dict()
        with pytest.raises(CheckpointError) as caught:
            other.load(tmp_path)
        told = str(caught.value)
        for part in (
            "'bias' is (7,) and must be (9,)",
            "'seen' is torch.int64 and must be torch.float32",
            "it lacks 'fresh.weight', 'place.weight'",
            "the model has no 'positions.weight'",
            "its optimizer is AdamW, and the trainer's SGD",
            "its scheduler is none, and the trainer's StepLR",
            "its loader 0 has batch_size=16, length=4, and the trainer's batch_size=32, length=2",
        ):
            assert part in told
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
        assert (other.num_steps, kept.state_dict()["batches"]) == (0, 0)
        # what only is missing may be
        subject = trainer("zero=3", 1, make=Larger, optimizer=momentum)
        with pytest.raises(CheckpointError, match=r"(?s)it lacks 'fresh\.weight'.*strict=False takes what fits"):
            subject.load(saved)
        subject.load(saved, strict=False)
        assert subject.num_steps == 1
        assert not subject.optimizer.state
        # positions go to loaders that are alike, in whatever order they are made
        subject, sizes = trainer("zero=1", 0), ({"seed": 3}, {"shuffle": False}, {})
        loaders = [subject.loader(data(), batch_size=16, **options) for options in sizes]
        for number, one in enumerate(loaders):
            one.load_state_dict({"epoch": 0, "batches": number})
        subject.save(tmp_path / "three")
        other = trainer("zero=1", 1)
        loaders = [other.loader(data(), batch_size=16, **options) for options in reversed(sizes[1:])]
        other.load(tmp_path / "three")
        loaders.append(other.loader(data(), batch_size=16, seed=3))
        assert [one.state_dict()["batches"] for one in loaders] == [2, 1, 0]
        kept = other.loader(data(80), batch_size=16, seed=4)
        del loaders[0]
        with pytest.raises(CheckpointError, match=r"loader 2 has length=4, num_samples=64, seed=0, .* seed=4; strict"):
            other.load(tmp_path / "three")
        other.load(tmp_path / "three", strict=False)
        assert kept.state_dict()["batches"] == 0
        with pytest.raises(UsageError, match="keep=0 must be a number"):
            subject.save(tmp_path, keep=0)

    run_ranks(on_rank, 2)


class Larger(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fresh = nn.Linear(4, 4, bias=False)


def _step(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def test_damage_and_wrong_places_are_told(tmp_path: Path) -> None:
    def on_rank() -> None:
        subject = trainer("zero=3", 0)
        path = subject.save(tmp_path / "run").path
        rank = dist.get_rank()

        with pytest.raises(CheckpointError, match=r"there is no directory .*nowhere"):
            subject.load(tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match=r"there is no directory .*step-7; .*run holds step-00000000$"):
            subject.load(tmp_path / "run" / "step-7")
        with pytest.raises(CheckpointError, match="is no checkpoint and holds none"):
            subject.load(_empty(tmp_path))
        with pytest.raises(CheckpointError, match="is a checkpoint itself; save to"):
            subject.save(path)
        with pytest.raises(CheckpointError, match=r"'extra\.model' holds a object, which is no plain"):
            subject.save(tmp_path / "run", extra={"model": object()})
        # two hosts without a common disk
        own = tmp_path / f"own{rank}"
        with pytest.raises(CheckpointError, match=r"which rank 0 made; give a directory that all ranks share.*rank 1"):
            subject.save(own)
        assert not list(own.glob(".*")) if own.exists() else rank == 1
        if rank == 0:
            shutil.copytree(path, tmp_path / "cut")
            data_file = tmp_path / "cut" / "__1_0.distcp"
            os.truncate(data_file, 100)
            shutil.copytree(path, tmp_path / "later")
            manifest = tmp_path / "later" / "nbtrain.json"
            manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 99'))
        dist.barrier()
        with pytest.raises(CheckpointError, match=r"the file __1_0\.distcp has 100 bytes and must have"):
            subject.load(tmp_path / "cut")
        with pytest.raises(CheckpointError, match=r"has format 99, .* upgrade it"):
            subject.load(tmp_path / "later")
        subject.load(path)
        subject.load(tmp_path / "run" / "latest")
        dist.barrier()
        if rank == 0:
            (tmp_path / "run" / "latest").write_text("step-00000007\n")  # of a checkpoint that somebody removed
        dist.barrier()
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            subject.load(tmp_path / "run")
        told = f"latest names 'step-00000007', which is not there; taking {path.name}, the newest that is"
        assert (told in out.getvalue()) == (rank == 0)
        # a neighbour's damage is not this one's; what fails behind the rename does not undo it
        (tmp_path / "mixed" / "latest").mkdir(parents=True, exist_ok=True)
        with pytest.raises(CheckpointError, match=r"latest is a directory, where the name of .*; rename it"):
            subject.save(tmp_path / "mixed")
        subject.save(tmp_path / "near").path.joinpath("nbtrain.json").write_text("{")
        point, folder._point = folder._point, _failing
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            second = subject.save(tmp_path / "near", keep=1).path
        folder._point = point
        assert second.joinpath("nbtrain.json").is_file()
        assert ("is whole, but latest may name an older one" in out.getvalue()) == (rank == 0)
        third = subject.save(tmp_path / "near", keep=1).path
        assert [entry.name for entry in folder.numbered(tmp_path / "near")] == [third.name]
        subject.load(tmp_path / "near")
        # a rank that looks before another trainer's save is there takes what rank 0 takes; what only it has not is told
        train(subject, subject.loader(data(), batch_size=16), 1)
        subject.save(tmp_path / "near")
        find = folder.find
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(folder, "find", lambda path: third if rank else find(path))
            subject.load(tmp_path / "near")
            assert subject.num_steps == 1
            patch.setattr(folder, "find", lambda path: tmp_path / "gone" if rank else find(path))
            subject.load(tmp_path / "near")
            patch.setattr(folder, "find", lambda path: find(path) if rank else tmp_path / "gone")
            with pytest.raises(CheckpointError, match=r"gone cannot be loaded: .* has no .*gone, which rank 0 has"):
                subject.load(tmp_path / "near")
        subject.load(third)
        bias = subject.state_dict()["bias"][:3].numpy().tobytes()
        # damage that shows when everything is read
        if rank == 0:
            shutil.copytree(path, tmp_path / "rotten")
            with (tmp_path / "rotten" / "__1_0.distcp").open("r+b") as file:
                file.write(bytes(3000))
        dist.barrier()
        with pytest.raises(CheckpointError, match="was loaded in part, and no step can be taken until a load succeeds"):
            subject.load(tmp_path / "rotten")
        if rank == 0:
            shutil.copytree(path, tmp_path / "flipped")
            data_file = tmp_path / "flipped" / "__0_0.distcp"
            stored = data_file.read_bytes()
            assert bias in stored
            data_file.write_bytes(stored.replace(bias, bytes([bias[0] ^ 1]) + bias[1:]))
        dist.barrier()
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged behind byte \d+: the checksum of"):
            subject.load(tmp_path / "flipped")
        batch = next(iter(subject.loader(data(), batch_size=16)))
        with pytest.raises(SessionError, match="was loaded in part; load it again, or another one"):
            subject.step(*batch)
        subject.load(path)
        assert subject.step(*batch) > 0

    run_ranks(on_rank, 2)


def _failing(*args: Any) -> None:
    raise PermissionError(13, "Permission denied")


class Counting(nn.Module):
    """Keeps state beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return inputs

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.first, self.counting, self.last = nn.Linear(4, 4), Counting(), nn.Linear(4, 4)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.counting(self.first(inputs)))


def test_extra_states_and_weights_that_are_tied_no_more(tmp_path: Path) -> None:
    def on_rank() -> None:
        options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "optimizer": momentum}
        subject = trainer("zero=1", 0, make=Tied, **options)
        subject.step(torch.ones(2, 4), torch.zeros(2, 4))
        saved = subject.save(tmp_path)
        other = trainer("zero=3", 1, make=lambda: Tied(tied=False), **options)
        other.load(saved)
        state = other.state_dict()
        assert torch.equal(state["last.weight"], state["first.weight"])
        assert other.model.counting.calls == 1
        with pytest.raises(CheckpointError, match=r"the model has no 'last\.weight'"):
            subject.load(other.save(tmp_path))

    run_ranks(on_rank, 2)


def _empty(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir(exist_ok=True)
    return tmp_path / "empty"


def test_a_table_runs_no_code(tmp_path: Path) -> None:
    def on_rank() -> None:
        subject = nt.Trainer(nn.Linear(2, 2), nt.Plan(), optimizer=momentum, loss_fn=nn.functional.mse_loss)
        path = subject.save(tmp_path / "run").path
        table = path / ".metadata"
        size = table.stat().st_size
        evil = b"cposix\nsystem\n(S'touch %s'\ntR." % os.fsencode(tmp_path / "ran")
        table.write_bytes(evil + b" " * (size - len(evil)))
        with pytest.raises(CheckpointError, match=r"names posix\.system, which is no part of a table"):
            subject.load(path)
        assert not (tmp_path / "ran").exists()

    run_ranks(on_rank, 1, group=False)
