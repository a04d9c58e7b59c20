"""From every layout into every other and back, bytes for bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import LAYOUTS, data, train, trainer
from ranks import run_ranks
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict


@pytest.mark.parametrize("first", LAYOUTS)
def test_into_every_other_layout_and_back(first: str, tmp_path: Path) -> None:
    def on_rank() -> None:
        subject = trainer(first, seed=0)
        train(subject, subject.loader(data(), batch_size=16), 2)
        saved = subject.save(tmp_path / "first")
        expected = _contents(saved.path)
        for number, spec in enumerate(LAYOUTS):
            other = trainer(spec, seed=1)
            other.load(saved)
            again = other.save(tmp_path / f"other{number}")
            _require_equal(f"{first} to {spec}", _contents(again.path), expected)
        back = trainer(first, seed=2)
        back.load(again)
        _require_equal(f"{first} and back", _contents(back.save(tmp_path / "back").path), expected)
        before, after = subject.state_dict(), back.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())

    run_ranks(on_rank, 4, timeout=110)


def _contents(path: Path) -> dict[str, Any]:
    """All tensors of a checkpoint, and the optimizer's groups, as torch reads them on one process."""
    state: dict[str, Any] = {}
    _load_state_dict(state, FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    groups = state["trainer"]["optimizer"]["groups"]
    moments = {
        f"{name}.{key}": value for name, one in state["optimizer"]["state"].items() for key, value in one.items()
    }
    return {"groups": groups, **state["model"], **moments}


def _require_equal(what: str, got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys(), what
    for name, value in expected.items():
        same = torch.equal(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value
        assert same, f"{what}: {name}"
