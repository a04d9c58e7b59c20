"""From every layout into every other, bytes for bytes; and what torch's own tools make of the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import LAYOUTS, data, momentum, train, trainer
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import nbtrain as nt
from nbtrain.parallel.pieces import Held, held_optimizer, held_parameters


def test_from_every_layout_into_every_other(tmp_path: Path) -> None:
    def on_rank() -> None:
        subjects = [trainer(spec, seed, optimizer=momentum) for seed, spec in enumerate(LAYOUTS)]
        loaders = [subject.loader(data(), batch_size=16) for subject in subjects]
        for first, subject in enumerate(subjects):
            train(subject, loaders[first], 1)  # so that its state is new to all others
            saved = subject.save(tmp_path / f"{first}")
            expected = _read_by_torch(saved.path)
            for second, other in enumerate(subjects):
                other.load(saved)
                _require_state(f"{LAYOUTS[first]} to {LAYOUTS[second]}", other, expected)
        # and each made a checkpoint of what the next one trains on with
        assert subjects[0].num_steps == len(LAYOUTS)

    run_ranks(on_rank, 4, timeout=110)


def test_onto_fewer_ranks_and_back(tmp_path: Path) -> None:
    def save(spec: str, fresh: bool) -> dict[str, Any]:
        subject = trainer(spec, seed=3)
        if fresh:
            train(subject, subject.loader(data(), batch_size=16), 2)
        else:
            subject.load(tmp_path)
        saved = subject.save(tmp_path)
        expected = _read_by_torch(saved.path)
        _require_state(spec, subject, expected)
        return expected if dist.get_rank() == 0 else {}

    results = [
        run_ranks(save, ranks, spec, fresh)[0]
        for ranks, spec, fresh in (
            (4, "tp=2,zero=1", True),
            (2, "zero=3", False),
            (1, "zero=0", False),
            (2, "zero=1", False),
            (4, "zero=3,dp_replicate=2", False),
        )
    ]
    flat = [_flat(result) for result in results]
    for other in flat[1:]:
        assert other.keys() == flat[0].keys()
        assert all(torch.equal(value, other[name]) for name, value in flat[0].items())


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
            expected = _read_by_torch(saved.path)
            for spec in ("zero=0", "zero=1"):
                other = trainer(spec, 1, **options)
                other.load(saved)
                _require_state(spec, other, expected)
                other.step(inputs, targets)
            subject.step(inputs, targets)
            before, after = subject.state_dict(), other.state_dict()
            assert all(torch.equal(value, after[name]) for name, value in before.items())

    run_ranks(on_rank, 2)


def _read_by_torch(path: Path) -> dict[str, Any]:
    """All of a checkpoint, by torch's converter. Collective."""
    converted = path.with_name(f"{path.name}.pt")
    if dist.get_rank() == 0:
        dcp_to_torch_save(path, converted)
    dist.barrier()
    state: dict[str, Any] = torch.load(converted)
    return state


def _flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    moments = state["optimizer"]["state"]
    return {f"{name}.{key}": value for name, one in moments.items() for key, value in one.items()} | state["model"]


def _require_state(what: str, subject: nt.Trainer, expected: dict[str, Any]) -> None:
    """Each piece of this rank's is what torch's reader finds there."""
    layout = subject._stepper.layout
    held = held_parameters(subject.model, layout)
    assert held.keys() == expected["model"].keys()
    for name, one in held.items():
        _require_pieces(f"{what}: {name}", one, expected["model"][name])
    optimizer = held_optimizer(subject.optimizer, subject.model, layout)
    for name, entries in optimizer.state.items():
        assert entries.keys() == expected["optimizer"]["state"][name].keys(), what
        for key, one in entries.items():
            _require_pieces(f"{what}: {key} of {name}", one, expected["optimizer"]["state"][name][key])
    groups = expected["trainer"]["optimizer"]["groups"]
    assert [dict(group.options) for group in optimizer.groups] == [group["options"] for group in groups]


def _require_pieces(what: str, held: Held, whole: torch.Tensor) -> None:
    assert (held.shape, held.dtype) == (tuple(whole.shape), whole.dtype), what
    for piece in held.pieces:
        slices = tuple(slice(start, start + size) for start, size in zip(*_box(piece), strict=True))
        assert torch.equal(piece.view, whole[slices]), what


def _box(piece: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return piece.box.starts, piece.box.sizes
