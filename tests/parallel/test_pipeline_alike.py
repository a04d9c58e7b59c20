"""Finding the shapes of a forward again is quick: of blocks that are alike one is run, and only of those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import GPT
from torch import nn

from nbtrain.parallel.pipeline.rehearsal import Rehearsal
from nbtrain.parallel.pipeline.score import Score
from nbtrain.parallel.pipeline.skeleton import Skeleton
from nbtrain.parallel.pipeline.twins import Twins
from nbtrain.parallel.pipeline.units import find_units, make_units


class Rehearsals:
    """Of one model; ``ran`` are the units that the latest one has run."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.units = model, find_units(model, 1)
        self.twins, self.skeleton = Twins(model, torch.device("cpu"), counts=True), Skeleton(model, self.units)
        make_units(self.units)
        self.ran: list[str] = []
        run = Twins._run

        def noted(twins: Twins, unit: str, *given: Any) -> Any:
            self.ran.append(unit)
            return run(twins, unit, *given)

        monkeypatch.setattr(Twins, "_run", noted)

    def __call__(self, *inputs: torch.Tensor) -> Score:
        self.ran.clear()
        rehearsal = Rehearsal(self.twins, self.units, self.skeleton, torch.device("cpu"))
        return rehearsal.run(self.model, lambda given: self.model.forward(*given), inputs)


def test_one_block_of_a_kind_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearse = Rehearsals(GPT(depth=6), monkeypatch)
    rehearse(torch.zeros(2, 5, dtype=torch.long))
    assert [unit for unit in rehearse.ran if unit.startswith("blocks.")] == ["blocks.0"]
    score = rehearse(torch.zeros(3, 7, dtype=torch.long))
    fresh = Rehearsals(GPT(depth=6), monkeypatch)(torch.zeros(3, 7, dtype=torch.long))
    assert score == fresh
    rehearse(torch.zeros(3, 7, dtype=torch.long))
    assert rehearse.ran == []
    rehearse.model.eval()  # where blocks may do other things
    rehearse(torch.zeros(3, 7, dtype=torch.long))
    assert "blocks.0" in rehearse.ran


class Strided(nn.Module):
    """Like its neighbours in all but a number."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride, self.inner = stride, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[:, :: self.stride])


def test_what_only_looks_alike_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearse = Rehearsals(nn.Sequential(*map(Strided, (1, 2, 1, 2))), monkeypatch)
    for length, shapes in ((8, (8, 4, 4, 2)), (20, (20, 10, 10, 5))):
        score = rehearse(torch.zeros(3, length, 4))
        assert [call.leaves[0].shape for call in score.calls] == [(3, long, 4) for long in shapes]


class Counting(nn.Module):
    """Gives one position less with every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.inner = 0, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x[:, self.calls % 2 :])


def test_what_changes_with_its_calls_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearse = Rehearsals(nn.Sequential(Counting(), Counting()), monkeypatch)
    for shapes in ((7, 6), (8, 8), (7, 6)):
        score = rehearse(torch.zeros(3, 8, 4))
        assert [call.leaves[0].shape for call in score.calls] == [(3, long, 4) for long in shapes]


def test_what_only_some_lengths_show_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearse = Rehearsals(nn.Sequential(Longest(16), Longest(6), Longest(6)), monkeypatch)
    for length, shapes in ((4, (4, 4, 4)), (20, (16, 6, 6)), (12, (12, 6, 6))):
        score = rehearse(torch.zeros(3, length, 4))
        assert [call.leaves[0].shape for call in score.calls] == [(3, long, 4) for long in shapes]
    assert rehearse.ran == ["0", "1"]


class Longest(nn.Module):
    """Keeps so many positions."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.inner = length, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[:, : self.length])
