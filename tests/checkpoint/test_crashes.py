"""Whatever happens in the middle of a save, the checkpoint before it is whole, and no half is taken for one."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import nbtrain as nt
from nbtrain.errors import CheckpointError
from nbtrain.parallel.checkpoint import folder, saving, storage
from nbtrain.parallel.checkpoint.manifest import Manifest

POINTS: dict[str, tuple[Any, str]] = {
    "in its file": (storage.Writer, "_write_data"),
    "before its note": (saving.os, "replace"),
    "before the manifest": (Manifest, "write"),
    "before the latest": (folder, "_point"),
    "before an old one goes": (folder, "remove"),
}


def linear(size: int = 4, spec: str = "zero=1") -> nt.Trainer:
    torch.manual_seed(0)
    return nt.Trainer(
        nn.Linear(size, size),
        nt.Plan.parse(spec),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        loss_fn=nn.functional.mse_loss,
    )


def step(subject: nt.Trainer) -> None:
    size = subject.model.in_features
    subject.step(torch.ones(2, size), torch.zeros(2, size))


def test_kill_9_at_any_point(tmp_path: Path) -> None:
    def die(directory: Path, owner: Any, name: str) -> None:
        subject = linear()
        step(subject)
        subject.save(directory)
        step(subject)
        _before(owner, name, lambda: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(RuntimeError):  # the other rank is gone
            subject.save(directory, keep=1)

    def go_on(directories: list[Path]) -> list[int]:
        found = []
        for directory in directories:
            subject, alike = linear(), linear()
            subject.load(directory)
            for _ in range(subject.num_steps):
                step(alike)
            before, after = subject.state_dict(), alike.state_dict()
            assert all(torch.equal(value, after[name]) for name, value in before.items())
            found.append(subject.num_steps)
            step(subject)
            saved = subject.save(directory, keep=1)
            if dist.get_rank() == 0:
                assert sorted(path.name for path in directory.iterdir()) == ["latest", saved.path.name]
            dist.barrier()
        return found

    directories = [tmp_path / name.replace(" ", "-") for name in POINTS]
    for directory, point in zip(directories, POINTS.values(), strict=True):
        run_ranks(die, 2, directory, *point, mortal=(0, 1))
    steps = run_ranks(go_on, 2, directories)[0]
    # what has its name is whole, whether the latest names it or not; what names the latest is taken
    assert steps == [1, 1, 1, 1, 2]


def _before(owner: Any, name: str, happens: Callable[[], Any]) -> None:
    """Makes something happen before a function runs, in this process."""
    original = getattr(owner, name)

    def function(*args: Any, **kwargs: Any) -> Any:
        happens()
        return original(*args, **kwargs)

    setattr(owner, name, function)


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[bool]:
    """Whether ``path`` is a disk of 1 MiB; who may not mount one gets a plain directory."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0 if os.geteuid() == 0 else False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk(tmp_path: Path) -> None:
    def on_rank(directory: Path, mounted: bool) -> None:
        small, large = linear(8, "zero=3"), linear(500, "zero=3")  # 1 MB of weights
        step(small)
        step(large)
        saved = small.save(directory)
        if not mounted and dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(CheckpointError, match=r"the checkpoint of step 1 was not written: .*(No space|too large)"):
            large.save(directory)
        with pytest.raises(CheckpointError, match=r"No space|too large"):
            large.save(directory, blocking=False).wait()
        dist.barrier()
        assert sorted(path.name for path in directory.iterdir()) == ["latest", saved.path.name]
        small.load(directory)
        step(large)

    with small_disk(tmp_path / "disk") as mounted:
        run_ranks(on_rank, 2, tmp_path / "disk", mounted)


def test_another_hosts_directory_is_left_alone(tmp_path: Path) -> None:
    def on_rank() -> list[str]:
        subject = linear(spec="zero=0")
        dead = folder.begin(tmp_path, 7)
        for name in (dead.name.replace(folder._host(), "elsewhere"), dead.name.replace(f".{os.getpid()}.", ".1.")):
            (tmp_path / name).mkdir()
        subject.save(tmp_path)
        return sorted(path.name.split(".")[2] for path in tmp_path.glob(".step*"))

    assert run_ranks(on_rank, 1, group=False) == [["elsewhere"]]
