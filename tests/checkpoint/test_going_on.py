"""Losses go on where a checkpoint was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import Model, data, endless, train, trainer
from parity import FP32
from ranks import run_ranks
from stored import read_by_torch, require_state
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import nbtrain as nt


class Calm(Model):
    """Without dropout: what another plan draws is other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout.p = 0.0


def one_cycle(optimizer: Optimizer) -> Any:
    return OneCycleLR(optimizer, max_lr=[2e-2, 1e-2], total_steps=20)


def everything(spec: str, seed: int, **options: Any) -> nt.Trainer:
    return trainer(spec, seed, scheduler=one_cycle, grad_clip=1.0, accumulate=2, **options)


def test_bit_for_bit_by_the_same_plan(tmp_path: Path) -> None:
    """Dropout, the shuffled loader in the middle of its second epoch, the scheduler, clipping and the fp16 scale."""

    def on_rank() -> None:
        for spec in ("zero=1", "zero=3,precision=fp16", "tp=2", "pp=2"):
            subject = everything(spec, seed=0)
            loader = subject.loader(data(), batch_size=16)
            batches = endless(loader)
            train(subject, batches, 5)
            saved = subject.save(tmp_path / spec, extra={"best": 1.5, "mask": torch.ones(2)})
            expected = train(subject, batches, 4), subject.loss_scale, subject.grad_norm
            other = everything(spec, seed=9)
            torch.manual_seed(123)
            early = other.loader(data(), batch_size=16) if spec == "tp=2" else None
            extra = other.load(saved)
            assert extra["best"] == 1.5
            assert torch.equal(extra["mask"], torch.ones(2))
            # one that is made later goes on there too
            loader = early or other.loader(data(), batch_size=16)
            assert (other.num_steps, loader.epoch) == (5, 1)
            assert (train(other, endless(loader), 4), other.loss_scale, other.grad_norm) == expected, spec
            before, after = subject.state_dict(), other.state_dict()
            if spec == "pp=2":
                del before["seen"]  # a pipeline's rehearsal is one more forward
            assert all(torch.equal(value, after[name]) for name, value in before.items())
            assert other.optimizer.param_groups[0]["lr"] == subject.optimizer.param_groups[0]["lr"]

    run_ranks(on_rank, 2)


def test_within_rounding_by_another_plan(tmp_path: Path) -> None:
    """And onto fewer ranks."""

    def save() -> list[float]:
        subject = everything("tp=2,zero=1", 0, make=Calm)
        batches = endless(subject.loader(data(), batch_size=16))
        train(subject, batches, 3)
        subject.save(tmp_path)
        return train(subject, batches, 3)

    def go_on(spec: str) -> list[float]:
        subject = everything(spec, 1, make=Calm)
        subject.load(tmp_path)
        require_state(spec, subject, read_by_torch(tmp_path / "step-00000003"))
        return train(subject, endless(subject.loader(data(), batch_size=16)), 3)

    expected = run_ranks(save, 4)[0]
    for ranks, spec in ((2, "zero=3"), (1, "zero=0")):
        losses = run_ranks(go_on, ranks, spec)[0]
        assert losses == pytest.approx(expected, abs=FP32.atol, rel=FP32.rtol), spec


def test_random_numbers_by_the_same_share_of_batches(tmp_path: Path) -> None:
    """By another plan a rank goes on with the numbers of the first one that read the same samples."""

    def save() -> float:
        subject = trainer("zero=0", 0)
        torch.manual_seed(dist.get_rank())
        subject.save(tmp_path)
        return float(torch.rand(()))

    def load() -> float:
        trainer("tp=2", 0).load(tmp_path)
        return float(torch.rand(()))

    drawn = run_ranks(save, 2)
    assert len(set(drawn)) == 2
    assert run_ranks(load, 2) == [drawn[0], drawn[0]]
