"""From every layout into every other, bytes for bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from layouts import LAYOUTS, data, momentum, train, trainer
from ranks import run_ranks
from stored import read_by_torch, require_state
from torch import nn


def test_from_every_layout_into_every_other(tmp_path: Path) -> None:
    def on_rank() -> None:
        subjects = [trainer(spec, seed, optimizer=momentum) for seed, spec in enumerate(LAYOUTS)]
        loaders = [subject.loader(data(), batch_size=16) for subject in subjects]
        for first, subject in enumerate(subjects):
            train(subject, loaders[first], 1)  # so that its state is new to all others
            saved = subject.save(tmp_path / f"{first}")
            expected = read_by_torch(saved.path)
            for second, other in enumerate(subjects):
                other.load(saved)
                require_state(f"{LAYOUTS[first]} to {LAYOUTS[second]}", other, expected)
        assert subjects[0].num_steps == len(LAYOUTS)  # each trained on with what the one before had saved

    run_ranks(on_rank, 4, timeout=110)


def test_memory_formats_and_whole_pieces(tmp_path: Path) -> None:
    """Channels-last weights, which ``zero=1`` cuts in the order of memory, and Adafactor's factors."""

    def conv() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 3)).to(memory_format=torch.channels_last)

    def on_rank() -> None:
        inputs, targets = torch.randn(4, 3, 8, 8), torch.randn(4, 2, 4, 4)
        for optimizer in (momentum, lambda params: torch.optim.Adafactor(params, lr=1e-2)):
            options = {"make": conv, "loss_fn": nn.functional.mse_loss, "optimizer": optimizer}
            subject = trainer("zero=1", 0, **options)
            subject.step(inputs, targets)
            saved = subject.save(tmp_path)
            expected = read_by_torch(saved.path)
            for spec in ("zero=0", "zero=1"):
                other = trainer(spec, 1, **options)
                other.load(saved)
                require_state(spec, other, expected)
                other.step(inputs, targets)
            subject.step(inputs, targets)
            before, after = subject.state_dict(), other.state_dict()
            assert all(torch.equal(value, after[name]) for name, value in before.items())

    run_ranks(on_rank, 2)
