"""Ranks with datasets of different lengths: the numbers of one device that gets all samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import parity
import pytest
import torch
import torch.nn.functional as F
from parity import FP32, Tolerance, rank, world_size
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import Dataset, TensorDataset

import nbtrain as nt
from nbtrain.errors import BatchError, ModelError, UsageError

LENGTHS = (7, 3, 0, 12)  # the third rank never has a sample
EACH = 3  # samples a rank and batch


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def samples(case: models.Case, part: int, lengths: tuple[int, ...] = LENGTHS) -> tuple[torch.Tensor, ...]:
    batch = case.batch(torch.Generator().manual_seed(part), 40)
    return tuple(tensor[-lengths[part] :][: lengths[part]] for tensor in batch)


def global_batches(case: models.Case, lengths: tuple[int, ...]) -> list[tuple[torch.Tensor, ...]]:
    """What one device would get."""
    parts = [[tensor.split(EACH) for tensor in samples(case, part, lengths)] for part in range(len(lengths))]
    longest = max(-(-length // EACH) for length in lengths)
    return [
        tuple(
            torch.cat([column[step] for column in columns if step < len(column)])
            for columns in zip(*parts, strict=True)
        )
        for step in range(longest)
    ]


class Guarded(models.ConvNet):
    """Cannot run on no samples, uses a layer that a stand-in reaches and real samples do not, divides by zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(5, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = images.view(images.size(0), 3, -1).view_as(images)
        if not images.any():  # zeros stand in
            return self.idle(super().forward(images)) / images.sum()
        return super().forward(images)


CASES = {
    "mlp": models.CASES["mlp"],
    "guarded": models.Case(Guarded, models.CASES["conv"].batch, F.cross_entropy),
    "gpt_ragged": models.CASES["gpt_ragged"],
}


def check(name: str, spec: str, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> None:
    case = CASES[name]
    # the last batch has 3 samples: batch statistics over so few magnify rounding from step to step
    tolerance = Tolerance(atol=2e-4, rtol=1e-4) if name == "guarded" else FP32
    torch.manual_seed(parity.SEED)
    plain = case.make()
    torch.manual_seed(parity.SEED + rank())
    trainer = nt.Trainer(case.make(), nt.Plan.parse(spec), optimizer=sgd, loss_fn=case.loss_fn, **options)
    optimizer = sgd(plain.parameters())
    own = TensorDataset(*samples(case, rank(), lengths))
    loader = trainer.loader(own, batch_size=EACH * world_size(), uneven=True, shuffle=False)
    whole = global_batches(case, lengths)
    assert len(loader) == len(whole)
    for _ in range(2 if name == "mlp" else 1):
        for step, (batch, expected) in enumerate(zip(loader, whole, strict=True)):
            assert len(batch[0]) == len(samples(case, rank(), lengths)[0][step * EACH : (step + 1) * EACH])
            optimizer.zero_grad()
            value, weight = parity._plain_loss(plain, case, expected)
            (value / weight).backward()
            if "grad_clip" in options:
                nn.utils.clip_grad_norm_(plain.parameters(), options["grad_clip"])
            loss = trainer.step(*batch)
            parity._compare(f"loss {step}", value / weight, loss, tolerance)
            parity.show_gradients(trainer)
            parity._compare_gradients(plain, trainer, step, tolerance)
            optimizer.step()
    parity._compare_states(dict(plain.state_dict()), trainer.state_dict(), tolerance)
    plain.eval()
    with torch.no_grad():
        losses = [parity._plain_loss(plain, case, batch) for batch in whole]
    expected_loss = sum(value for value, _ in losses) / sum(weight for _, weight in losses)
    parity._compare("evaluation", expected_loss, trainer.evaluate(loader), tolerance)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("zero=0", list(CASES)),
        ("zero=1", list(CASES)),
        ("zero=2", ["guarded"]),
        ("zero=3", ["mlp", "guarded"]),
        ("zero=3,dp_replicate=2", ["mlp", "guarded"]),
        ("zero=1,dp_replicate=2", list(CASES)),
    ],
)
def test_ranks_that_have_run_out_join_the_steps_of_the_others(spec: str, names: list[str]) -> None:
    def on_rank() -> None:
        for name in names:
            check(name, spec, **({"grad_clip": 0.2} if name == "mlp" else {}))

    run_ranks(on_rank, 4)


@pytest.mark.parametrize("spec", ["zero=0", "zero=1", "zero=3"])
def test_accumulating_with_fewer_samples_than_chunks(spec: str) -> None:
    def on_rank() -> None:
        check("mlp", spec, (7, 1), accumulate=2)
        check("gpt_ragged", spec, (1, 4), accumulate=3)

    run_ranks(on_rank, 2)


def test_a_chunk_without_samples_on_any_rank_changes_no_statistics() -> None:
    def on_rank() -> None:
        trainer = nt.Trainer(models.ConvNet(), nt.Plan(zero=0), optimizer=sgd, loss_fn=F.cross_entropy, accumulate=2)
        images, labels = models.CASES["conv"].batch(torch.Generator().manual_seed(0), 1)
        trainer.step(images, labels)
        state = trainer.state_dict()
        assert all(value.isfinite().all() for value in state.values())
        assert state["stem.1.num_batches_tracked"] == 1

    run_ranks(on_rank, 2)


def test_a_position_is_taken_up_again_in_the_middle() -> None:
    def on_rank() -> None:
        def numbers() -> torch.Tensor:
            return torch.arange(10 * rank(), 10 * rank() + (9 if rank() else 3))

        def loader() -> Any:
            return nt.loader(TensorDataset(numbers()), nt.Plan(zero=0), batch_size=4, uneven=True, seed=3)

        first = loader()
        everything = [batch[0].tolist() for _ in range(2) for batch in first]
        second = loader()
        iterator = iter(second)
        got = [next(iterator)[0].tolist() for _ in range(3)]
        third = loader()
        third.load_state_dict(second.state_dict())
        got += [batch[0].tolist() for batch in third]
        got += [batch[0].tolist() for batch in third]
        assert got == everything
        assert len(everything) == 10
        assert sorted(number for batch in everything[:5] for number in batch) == list(
            range(10 * rank(), 10 * rank() + (9 if rank() else 3))
        )
        assert repr(third) == "<Loader: 4 samples a batch over 2 ranks, 5 batches an epoch>"

    run_ranks(on_rank, 2)


class Dicts(Dataset[Any]):
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((8,), float(index)), "target": torch.ones(3), "name": "a"}


def test_batches_of_dicts_keep_their_kind() -> None:
    def on_rank() -> None:
        loader = nt.loader(Dicts(4 * rank()), nt.Plan(zero=0), batch_size=4, uneven=True)
        for batch in loader:
            assert list(batch) == ["x", "target", "name"]
            assert batch["x"].shape == (2 * rank(), 8)

    run_ranks(on_rank, 2)


def test_what_ranks_cannot_go_through_together_is_an_error_on_all() -> None:
    def on_rank() -> None:
        def make(length: int, plan: nt.Plan, **options: Any) -> nt.parallel.loader.Loader:
            return nt.loader(TensorDataset(torch.ones(length)), plan, batch_size=4, uneven=True, **options)

        with pytest.raises(BatchError, match="no rank has a batch"):
            make(1, nt.Plan(), drop_last=True)
        with pytest.raises(BatchError, match=r"ranks 0 and 1 take the same share .* 2 and 3 samples"):
            make(2 + rank(), nt.Plan(tp=2))
        loader = make(5, nt.Plan())
        if rank():
            loader.set_epoch(1)
        with pytest.raises(BatchError, match="rank 1 at epoch 1, batch 0; load the same position"):
            list(loader)
        trainer = nt.Trainer(models.MLP(), nt.Plan(), optimizer=sgd, loss_fn=F.mse_loss)
        with pytest.raises(BatchError, match="its weight is 0"):
            trainer.step(torch.ones(0, 8), torch.ones(0, 3))

    run_ranks(on_rank, 2)


def own_loop(model: nn.Module, inputs: list[torch.Tensor], context: Callable[[], Any]) -> None:
    optimizer = sgd(model.parameters())
    with context():
        for x in inputs:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("spec", ["zero=0", "zero=1"])
def test_torchs_join_around_an_own_loop_is_that_of_torchs_ddp(spec: str) -> None:
    def on_rank() -> None:
        generator = torch.Generator().manual_seed(rank())
        inputs = [torch.randn(2, 8, generator=generator) for _ in range(2 + 2 * rank())]
        torch.manual_seed(0)
        plain = nn.parallel.DistributedDataParallel(models.MLP())
        torch.manual_seed(0)
        model = nt.parallelize(models.MLP(), nt.Plan.parse(spec))
        own_loop(plain, inputs, lambda: Join([plain]))
        own_loop(model, inputs, lambda: Join([model]))
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.module.state_dict()))

    run_ranks(on_rank, 2)


def test_torchs_own_join_is_not_one_device_and_a_joined_step_is() -> None:
    """It divides by all ranks, also those that have run out, and weights ranks alike, however few samples they have."""
    lengths = (4, 1)

    def on_rank() -> None:
        case = models.CASES["mlp"]
        torch.manual_seed(0)
        plain, single = nn.parallel.DistributedDataParallel(models.MLP()), models.MLP()
        single.load_state_dict(plain.module.state_dict())
        optimizers = [sgd(plain.parameters()), sgd(single.parameters())]
        with Join([plain]):
            for x, y in zip(*(tensor.split(EACH) for tensor in samples(case, rank(), lengths)), strict=True):
                optimizers[0].zero_grad()
                F.mse_loss(plain(x), y).backward()
                optimizers[0].step()
        for x, y in global_batches(case, lengths):
            optimizers[1].zero_grad()
            F.mse_loss(single(x), y).backward()
            optimizers[1].step()
        with pytest.raises(AssertionError, match="not close"):
            torch.testing.assert_close(dict(plain.module.state_dict()), dict(single.state_dict()), rtol=1e-2, atol=1e-3)
        check("mlp", "zero=0", lengths)
        check("mlp", "zero=1", lengths)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("spec", ["zero=0", "zero=1"])
def test_torchs_join_where_it_cannot_shadow_everything_is_an_error(spec: str) -> None:
    def on_rank() -> None:
        plan = nt.Plan.parse(spec)
        with pytest.raises(ModelError, match=r"'stem\.1' takes its statistics over all ranks"):
            Join([nt.parallelize(models.ConvNet(), plan)])
        trainer = nt.Trainer(models.MLP(), plan, optimizer=sgd, loss_fn=F.mse_loss)
        x, y = torch.ones(2, 8), torch.ones(2, 3)
        trainer.step(x, y)
        with pytest.raises(UsageError, match="uneven=True"), Join([trainer.model], throw_on_early_termination=True):
            trainer.step(x, y)

    run_ranks(on_rank, 2)
