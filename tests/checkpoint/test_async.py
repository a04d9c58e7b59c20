"""Checkpoints that are written while training goes on, and which of them stay."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import data, endless, train, trainer
from ranks import run_ranks

from nbtrain.errors import CheckpointError
from nbtrain.parallel.checkpoint import saving, storage


def test_it_holds_the_state_at_the_call(tmp_path: Path) -> None:
    def on_rank() -> None:
        subject = trainer("zero=1", 0)
        batches = endless(subject.loader(data(), batch_size=16))
        train(subject, batches, 1)
        expected = subject.state_dict()
        gate = _gated()
        handle = subject.save(tmp_path, blocking=False)
        losses = train(subject, batches, 2)
        assert not handle.done
        assert "being written" in repr(handle)
        gate.set()
        assert handle.wait() == tmp_path / "step-00000001"
        assert handle.done
        other = trainer("zero=3", 1)
        other.load(handle)
        assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
        again = trainer("zero=1", 1)
        again.load(tmp_path)
        assert train(again, endless(again.loader(data(), batch_size=16)), 2) == losses
        # what was begun is ended by the next one
        for _ in range(3):
            train(subject, batches, 1)
            subject.save(tmp_path, blocking=False, keep=2)
        subject.save(tmp_path, keep=2)
        if dist.get_rank() == 0:
            names = sorted(path.name for path in tmp_path.iterdir())
            assert names == ["latest", "step-00000005", "step-00000006.2"]
            assert (tmp_path / "latest").read_text() == "step-00000006.2\n"
        dist.barrier()

    run_ranks(on_rank, 2)


def test_an_error_behind_the_training_is_told(tmp_path: Path) -> None:
    def on_rank() -> None:
        subject = trainer("zero=3", 0)
        whole = subject.save(tmp_path)
        write = storage.write
        if dist.get_rank() == 1:
            storage.write = _failing
        handle = subject.save(tmp_path, blocking=False)
        with pytest.raises(CheckpointError, match=r"step 0 was not written: OSError: .*Input/output.* \(on rank 1\)"):
            handle.wait()
        subject.save(tmp_path, blocking=False)
        with pytest.raises(CheckpointError, match=r"on rank 1"):
            subject.save(tmp_path)
        storage.write = write
        # one rank was interrupted before it began
        copied = saving.Draft.copied
        if dist.get_rank() == 1:
            saving.Draft.copied = _interrupted
            with pytest.raises(KeyboardInterrupt):
                subject.save(tmp_path, blocking=False)
        else:
            subject.save(tmp_path, blocking=False)
        saving.Draft.copied = copied
        subject.load(whole)
        again = subject.save(tmp_path)
        assert again.path.name == "step-00000000.2"
        if dist.get_rank() == 0:
            assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", again.path.name]
        dist.barrier()

    run_ranks(on_rank, 2)


def _gated() -> threading.Event:
    """Writing waits for it."""
    gate, write = threading.Event(), storage.write

    def gated(*args: Any) -> Any:
        assert gate.wait(30)
        return write(*args)

    storage.write = gated
    return gate


def _failing(*args: Any) -> Any:
    raise OSError(5, "Input/output error")


def _interrupted(draft: Any) -> Any:
    raise KeyboardInterrupt
