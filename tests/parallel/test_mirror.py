"""A mirror is at every moment what the rank before holds."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from parity import rank
from ranks import run_ranks
from torch import nn

import nbtrain as nt
from nbtrain.errors import OptimizerError, SessionError
from nbtrain.parallel import optimizer_state
from nbtrain.parallel.local import local
from nbtrain.parallel.mirror import Mirror
from nbtrain.parallel.optimizer import ELEMENTWISE
from nbtrain.parallel.snapshot import random_state
from nbtrain.parallel.update import ShardedUpdate


class Partly(nn.Module):
    """One layer is frozen, one is used by odd batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.a, self.b = nn.Linear(8, 9).requires_grad_(False), nn.Linear(9, 5), nn.Linear(9, 5)
        self.odd = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.dropout(self.frozen(x), 0.2, True)
        return self.b(hidden) if self.odd else self.a(hidden)


def trainer_of(optimizer: Any, zero: int = 3, **options: Any) -> nt.Trainer:
    torch.manual_seed(3)
    return nt.Trainer(
        Partly(), nt.Plan(zero=zero), optimizer=optimizer, loss_fn=nn.functional.mse_loss, redundancy=True, **options
    )


def step(trainer: nt.Trainer, number: int) -> None:
    trainer.model.odd = number % 2 == 1
    generator = torch.Generator().manual_seed(10 * number + rank())
    trainer.step(torch.randn(4, 8, generator=generator), torch.randn(4, 5, generator=generator))


def compare(trainer: nt.Trainer) -> None:
    """What each rank holds of itself with what the next one holds of it: bit by bit."""
    mirror = trainer._stepper.mirror
    model = trainer.model
    named = model.named_pieces() if isinstance(model, ShardedUpdate) else model.named_parameters()
    own = (
        [local(parameter).detach().clone() for _, parameter in named],
        optimizer_state.portable_state(trainer.optimizer),
        random_state(torch.device("cpu")),
    )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    parameters, state, random = everyone[rank() - 1]
    assert mirror.holder_of((rank() - 1) % dist.get_world_size()) == rank()
    for mine, theirs in ((mirror.parameters(), parameters), (mirror.optimizer_state(), state)):
        torch.testing.assert_close(_tensors(mine), _tensors(theirs), rtol=0, atol=0)
    assert torch.equal(mirror.random_state(trainer.num_steps), random)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_it_steps_as_its_ward_does(kind: type[torch.optim.Optimizer]) -> None:
    def on_rank() -> None:
        trainer = trainer_of(
            lambda params: kind([{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.1}], lr=0.05),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
            grad_clip=0.3,
        )
        compare(trainer)
        for number in range(5):
            step(trainer, number)
            compare(trainer)

    run_ranks(on_rank, 3)


@pytest.mark.parametrize("zero", [1, 3])
def test_what_is_set_outside_of_steps_is_copied_with_the_next_one(zero: int) -> None:
    def on_rank() -> None:
        trainer = trainer_of(lambda params: torch.optim.AdamW(params, lr=0.05), zero)
        mirror = trainer._stepper.mirror
        seeds = []
        seed = mirror._seed
        mirror._seed = lambda states: (seeds.append(trainer.num_steps), seed(states))
        step(trainer, 0)
        trainer.load_state_dict({name: value * 2 for name, value in trainer.state_dict().items()})
        with pytest.raises(SessionError, match="outside of steps"):
            mirror.parameters()
        step(trainer, 1)
        compare(trainer)
        step(trainer, 2)
        with torch.no_grad():
            local(trainer.model.a.weight).mul_(3)
        step(trainer, 3)
        compare(trainer)
        trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
        with pytest.raises(SessionError, match="outside of steps"):
            mirror.optimizer_state()
        step(trainer, 4)
        step(trainer, 5)
        compare(trainer)
        if zero == 1:
            trainer.model.a.weight.data = trainer.model.a.weight.data * 2
            step(trainer, 6)
            compare(trainer)
        assert seeds == ([1, 3, 4, 6] if zero == 1 else [1, 3, 4])

    run_ranks(on_rank, 2)


def test_a_step_that_is_dropped_leaves_it_as_it_was() -> None:
    def on_rank() -> None:
        trainer = trainer_of(lambda params: torch.optim.AdamW(params, lr=0.05), grad_clip=1.0)
        step(trainer, 0)
        loss_fn = trainer._stepper.loss_fn
        trainer._stepper.loss_fn = lambda *args: loss_fn(*args) * float("nan")
        with pytest.raises(ArithmeticError):
            step(trainer, 1)
        compare(trainer)  # the random state is that before the step
        trainer._stepper.loss_fn = loss_fn
        step(trainer, 1)
        compare(trainer)

    run_ranks(on_rank, 2)


def test_it_is_made_only_where_no_replica_has_the_shards() -> None:
    def on_rank(spec: str) -> bool:
        trainer = nt.Trainer(
            models.MLP(),
            nt.Plan.parse(spec),
            optimizer=torch.optim.SGD,
            loss_fn=nn.functional.mse_loss,
            redundancy=True,
        )
        return isinstance(trainer._stepper.mirror, Mirror)

    for spec, expected in {"zero=0": False, "zero=2": True, "zero=3": True, "dp_replicate=4": False}.items():
        assert run_ranks(on_rank, 4, spec) == [expected] * 4
    assert run_ranks(on_rank, 4, "dp_replicate=2") == [False] * 4


def test_an_optimizer_that_may_not_be_element_wise_is_refused() -> None:
    class Own(torch.optim.SGD):
        pass

    def on_rank() -> None:
        with pytest.raises(OptimizerError, match=r"Own may not allow; choose one of torch\.optim's ASGD, "):
            trainer_of(lambda params: Own(params, lr=0.1))
        # replicas need no mirror
        nt.Trainer(models.MLP(), nt.Plan(zero=0), optimizer=lambda params: Own(params, lr=0.1), redundancy=True)

    run_ranks(on_rank, 2)
