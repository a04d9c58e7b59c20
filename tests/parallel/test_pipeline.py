"""Pipelines of unedited models: what crosses, what is held, what is refused. Parity by schedule is in the matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import rank
from ranks import run_ranks
from torch import nn

import nbtrain as nt
from nbtrain.errors import BatchError, ModelError, PlanError, UsageError

WIDTH, CLASSES = 8, 3


class Block(nn.Module):
    """Writes into its input, which is what a stage received."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.relu, self.linear, self.dropout = nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(self.relu(x)))


class Net(nn.Module):
    def __init__(self, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))
        self.outlet = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def batch(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(size, WIDTH, generator=g), torch.randint(CLASSES, (size,), generator=g)


def made(make: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return make()


def trainer_of(model: nn.Module, optimizer: Any = sgd, **plan: Any) -> nt.Trainer:
    plan = {"pp": 2, "num_microbatches": 4, **plan}
    return nt.Trainer(model, nt.Plan(**plan), optimizer=optimizer, loss_fn=F.cross_entropy)


def check(trainer: nt.Trainer, model: nn.Module, sizes: tuple[int, ...] = (8, 8, 8)) -> None:
    """Steps of the trainer beside those of ``model`` on one device."""
    optimizer = sgd(parameter for parameter in model.parameters() if parameter.requires_grad)
    for seed, size in enumerate(sizes):
        x, y = batch(size, seed)
        optimizer.zero_grad()
        expected = F.cross_entropy(model(x), y)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.step(x, y), expected.detach())
    torch.testing.assert_close(trainer.state_dict(), dict(model.state_dict()))


SHAPES = (8, 3, 12, 1, 8)
"""Of batches: fewer samples than microbatches too."""


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_batches_of_any_size_and_evaluation(schedule: str) -> None:
    def on_rank() -> None:
        trainer, model = trainer_of(made(), schedule=schedule), made()
        check(trainer, model, SHAPES)
        batches = [batch(size, seed) for seed, size in enumerate(SHAPES)]
        with torch.no_grad():
            losses = [F.cross_entropy(model(x), y, reduction="sum") for x, y in batches]
        torch.testing.assert_close(trainer.evaluate(batches), sum(losses) / sum(SHAPES))
        check(trainer, model)  # evaluation has left nothing behind

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
def test_frozen_stages(schedule: str) -> None:
    """Also a rank on which nothing trains: optimizers refuse to have no parameters."""

    def frozen() -> nn.Module:
        model = Net()
        for part in (model.inlet, *model.blocks[:3]):
            part.requires_grad_(False)
        return model

    def on_rank() -> int:
        trainer = trainer_of(made(frozen), schedule=schedule)
        check(trainer, made(frozen))
        return sum(parameter.requires_grad for parameter in trainer.model.parameters())

    counts = run_ranks(on_rank, 2)
    assert schedule != "1f1b" or counts[0] == 0


def test_a_rank_holds_its_stages_and_no_more() -> None:
    def on_rank() -> tuple[list[str], str, int]:
        trainer = trainer_of(made(), optimizer=torch.optim.AdamW)
        trainer.step(*batch(8, 0))
        return list(dict(trainer.model.named_parameters())), trainer.describe(), trainer.memory()["optimizer"]

    (first, told, state), (second, _, _) = run_ranks(on_rank, 2)
    assert not set(first) & set(second)
    assert set(first) | set(second) == set(dict(Net().named_parameters()))
    assert "stage 0, pp rank 0: inlet, blocks.0-1" in told
    whole = sum(parameter.numel() for parameter in Net().parameters())
    assert f"of {whole}" in told.replace(",", "") or str(whole) in told.replace(",", "")
    assert state < 2 * 4 * whole


def test_an_optimizer_built_before_keeps_what_this_rank_holds() -> None:
    def on_rank() -> None:
        model = made()
        trainer = trainer_of(model, optimizer=sgd(model.parameters()))
        check(trainer, made())

    run_ranks(on_rank, 2)


class Shared(nn.Module):
    """One block that is called again in every stage, and a parameter that code outside of modules reads in two."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.blocks = nn.ModuleList([block, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), block])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.outlet = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x * self.scale)
        return self.outlet(x)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_what_several_stages_use_stays_one(zero: int) -> None:
    def on_rank() -> dict[str, torch.Tensor]:
        plan = {"zero": zero, "split": ["blocks.1"], "schedule": "1f1b"}
        trainer = trainer_of(made(Shared), **plan)
        model, optimizer = made(Shared), None
        optimizer = sgd(model.parameters())
        for seed in range(3):
            x, y = batch(8, seed)
            optimizer.zero_grad()
            expected = F.cross_entropy(model(x), y)
            expected.backward()
            optimizer.step()
            part = slice(None) if trainer.plan.dp == 1 else slice(4 * (rank() % 2), 4 * (rank() % 2) + 4)
            torch.testing.assert_close(trainer.step(x[part], y[part]), expected.detach())
        torch.testing.assert_close(trainer.state_dict(), dict(model.state_dict()))
        return {
            name: value.detach().full_tensor() if hasattr(value, "full_tensor") else value.detach()
            for name, value in trainer.model.named_parameters()
        }

    held = run_ranks(on_rank, 2 if zero == 0 else 4)
    names = [set(own) for own in held]
    assert "scale" in names[0] & names[-1]
    # copies take the same step bit for bit
    assert torch.equal(held[0]["scale"], held[-1]["scale"])


class Tuples(nn.Module):
    """Blocks that give tuples of which the second part is no activation but grows along."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, *, seen: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
            y = self.linear(x).tanh()
            mask = y.detach() > 0
            return y * seen["mask"], {"mask": mask, "first": seen.get("first", y), "name": "block"}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Tuples.Block() for _ in range(4))
        self.outlet = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: dict[str, Any] = {"mask": torch.ones_like(x, dtype=torch.bool)}
        for block in self.blocks:
            x, seen = block(x, seen=seen)
        assert seen["name"] == "block"
        return self.outlet(torch.cat([x, seen["first"]], 1))


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_several_tensors_cross_also_truth_values(schedule: str) -> None:
    run_ranks(lambda: check(trainer_of(made(Tuples), schedule=schedule), made(Tuples)), 2)


class Inline(nn.Module):
    """Dropout outside of modules: every stage draws it, and it must be one mask."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noisy = F.dropout(x, 0.5, training=self.training)
        kept = noisy != 0
        for block in self.blocks:
            x = block(x * kept)
        return x[:, :CLASSES]


def test_what_is_drawn_outside_of_modules_is_one_draw() -> None:
    def on_rank() -> list[bytes]:
        trainer = trainer_of(made(Inline))
        seen: list[bytes] = []
        for block in trainer.model.blocks:
            if any(True for _ in block.parameters()):
                block.register_forward_pre_hook(lambda module, args: seen.append((args[0] == 0).numpy().tobytes()))
        x, y = torch.ones(8, WIDTH), torch.zeros(8, dtype=torch.long)
        torch.manual_seed(rank())
        trainer.step(x, y)
        return seen

    first, second = run_ranks(on_rank, 2)
    assert len(first) == len(second) == 8
    assert {*first} == {*second}
    assert len({*first}) > 1  # by microbatch


class Counting(Net):
    """Code outside of modules that counts its calls, in a buffer and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.calls += 1
        return super().forward(x)


class Remembering(Net):
    """It keeps a mean of activations that no module computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def test_what_code_outside_of_modules_counts_it_counts_once_a_microbatch() -> None:
    def on_rank() -> tuple[int, int, int]:
        trainer = trainer_of(made(Counting), schedule="interleaved_1f1b")
        trainer.step(*batch(8, 0))
        state = int(trainer.state_dict()["seen"])
        with pytest.raises(ModelError, match="module of its own"):
            trainer_of(made(Remembering))
        return state, int(trainer.model.seen), trainer.model.calls

    assert run_ranks(on_rank, 2) == [(4, 4, 4)] * 2


def test_errors_say_what_to_type() -> None:
    def refused(kind: type[Exception], cure: str, function: Callable[[], Any]) -> None:
        with pytest.raises(kind) as caught:
            function()
        assert cure in str(caught.value), str(caught.value)

    class Opaque:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    class Giving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            return Opaque(self.linear(x.x if isinstance(x, Opaque) else x))

    def on_rank() -> None:
        x, y = batch(8, 0)
        refused(PlanError, "did you mean 'blocks.3'", lambda: trainer_of(made(), split=["blocks.9"]))
        refused(PlanError, "it is inside of 'blocks.1'", lambda: trainer_of(made(), split=["blocks.1.linear"]))
        refused(PlanError, "name the 1 that begin", lambda: trainer_of(made(), split=["blocks.1", "blocks.2"]))
        refused(ModelError, "take fewer", lambda: trainer_of(nn.Sequential(nn.Linear(WIDTH, CLASSES))))
        refused(PlanError, "needs no name; name the 1", lambda: trainer_of(made(), split=["inlet"]))
        wrong = {"optimizer": sgd, "loss_fn": F.mse_loss, "probe": torch.zeros(2, 3)}
        refused(ModelError, "the probe does not run through Net", lambda: nt.Trainer(made(), nt.Plan(pp=2), **wrong))
        refused(ModelError, "probe=inputs", lambda: trainer_of(nn.Sequential(nn.Bilinear(3, 4, 5), nn.Linear(5, 3))))
        refused(ModelError, "tuples, lists or dicts", lambda: trainer_of(nn.Sequential(Giving(), Giving())))
        trainer = trainer_of(made())
        refused(ModelError, "trainer.step", lambda: trainer.model(x))
        refused(BatchError, "pipeline-parallel ranks 0, 1", lambda: trainer.step(x * rank(), y))
        first = rank() == 0
        apart = lambda: trainer.step(x, y) if first else trainer.evaluate([(x, y)])  # noqa: E731
        where = "step" if first else "evaluate"
        refused(
            UsageError, f"do not all do the same with it: rank {rank()} is in Trainer.{where} of Net (trainer", apart
        )
        check(trainer, made())  # errors have changed nothing

    run_ranks(on_rank, 2)


class Nested(nn.Module):
    """Containers in containers, and a layer that no forward calls."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner)
        self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def test_containers_are_opened_where_stages_begin_inside() -> None:
    def on_rank() -> list[str]:
        told = []
        for plan in ({}, {"split": ["body.1.2"]}):
            trainer = trainer_of(made(Nested), **plan)
            check(trainer, made(Nested))
            told.append(trainer.describe())
        return told

    told, _ = run_ranks(on_rank, 2)
    assert "stage 1, pp rank 1: body.1" in told[0]
    assert "stage 1, pp rank 1: body.1.2" in told[1]


def test_meta_init_makes_each_stage_its_own() -> None:
    def on_rank() -> tuple[dict[str, Any], dict[str, Any]]:
        with nt.meta_init(seed=3):
            one, two = Net(), Net()
        alone = nt.Trainer(one, nt.Plan(zero=0), optimizer=sgd, loss_fn=F.cross_entropy)
        return alone.state_dict(), trainer_of(two).state_dict()

    for alone, split in run_ranks(on_rank, 2):
        torch.testing.assert_close(split, alone, rtol=0, atol=0)


def test_the_timeline_has_every_action_of_the_schedule() -> None:
    def on_rank() -> Any:
        trainer = trainer_of(made(), schedule="interleaved_zero_bubble")
        trainer.step(*batch(8, 0))
        trainer.timeline()
        for seed in range(3):
            trainer.step(*batch(8, seed))
        trainer.evaluate([batch(8, 9)])
        timeline = trainer.timeline(record=False)
        trainer.step(*batch(8, 0))
        assert trainer.timeline(record=False).events == timeline.events
        return timeline

    timeline, other = run_ranks(on_rank, 2)
    assert timeline.events == other.events
    assert len(timeline.measured.steps) == 3
    for index, events in enumerate(timeline.events):
        kinds = [event.kind.value for event in events]
        per_step = 2 * 4 * 3
        assert {kind: kinds.count(kind) for kind in ("forward", "backward_input", "backward_weight", "optimizer")} == {
            "forward": per_step,
            "backward_input": per_step,
            "backward_weight": per_step,
            "optimizer": 3,
        }, index
        assert {"receive", "send", "collective"} <= set(kinds)
        assert all(0 <= event.busy_s <= event.wall_s * 1.5 + 0.01 for event in events)
    assert timeline.replayed is not None
    assert timeline.replayed.makespan_s > 0
