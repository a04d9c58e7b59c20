"""A schedule that ends in the middle: nothing of it is left, and the next step gives an undisturbed one's numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import nbtrain as nt
from nbtrain.parallel import waits
from nbtrain.parallel.mesh import data_coordinate, rank
from nbtrain.parallel.phase import Phase, Stage
from nbtrain.parallel.pipeline import reduction, runtime, stage

PLANS = [
    "zero=0,pp=2,num_microbatches=4",
    "zero=1,pp=2,num_microbatches=4",
    "zero=3,pp=2,num_microbatches=4,schedule=zbv",
]


class Fault(Exception):
    pass


def trainer_of(spec: str) -> nt.Trainer:
    torch.manual_seed(0)
    return nt.Trainer(
        models.Noisy(),
        nt.Plan.parse(spec),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        loss_fn=models.token_mean,
    )


def batch(trainer: nt.Trainer, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(models.V, (8, models.T), generator=torch.Generator().manual_seed(step))
    share = ids.chunk(trainer.plan.dp)[data_coordinate(trainer.plan, rank())]
    return share, share.flip(1)


@contextmanager
def fault(owner: Any, name: str, call: int, *, behind: bool = False) -> Iterator[None]:
    """``owner.name`` raises in its ``call``-th call, before it runs, or ``behind`` it."""
    function, calls = getattr(owner, name), itertools.count(1)

    def failing(*args: Any, **options: Any) -> Any:
        if next(calls) != call:
            return function(*args, **options)
        if behind:
            function(*args, **options)
        dist.barrier()  # what a rank has sent is gone with the schedule: others may need it to come as far as here
        raise Fault

    setattr(owner, name, failing)
    try:
        yield
    finally:
        setattr(owner, name, function)


PLACES: list[Callable[[int, bool], tuple[Any, str, int, bool]]] = [
    # what the first stage has sent is received by none
    lambda pp, is_last: (stage.Stage, "forward_one_chunk", 2 - pp, False),
    lambda pp, is_last: (stage.Stage, "backward_one_chunk", 1 + is_last, False),
    lambda pp, is_last: (
        (stage.Stage, "get_fwd_send_ops", 2 - pp, True) if not is_last else (stage.Stage, "get_bwd_send_ops", 1, True)
    ),
    lambda pp, is_last: (runtime._Waited, "pop", 1, False),
    lambda pp, is_last: (reduction, "reduce", 1, True),
]
"""Where a pipeline rank raises, by its number and whether it has the last stage: all do by themselves, in the middle of
what the others send and receive, and the groups stay."""


@pytest.mark.parametrize("spec", PLANS)
def test_nothing_is_left_of_a_broken_schedule(spec: str) -> None:
    def on_rank() -> None:
        undisturbed, trainer = trainer_of(spec), trainer_of(spec)
        pp = rank() // trainer.plan.dp
        partition = trainer._stepper.layout.pipeline.partition
        is_last = partition.rank_of[-1] == pp
        for step, place in enumerate(PLACES):
            owner, name, call, behind = place(pp, is_last)
            with pytest.raises(Fault), fault(owner, name, call, behind=behind):
                trainer.step(*batch(trainer, 99))
            assert trainer.phase == Phase(Stage.STEPPED, step)
            assert all(parameter.grad is None for parameter in trainer.model.parameters())
            assert waits.waiting() == []
            assert trainer.step(*batch(trainer, step)) == undisturbed.step(*batch(trainer, step))
        with pytest.raises(Fault), fault(stage.Stage, "forward_one_chunk", 2 - pp):
            trainer.evaluate([batch(trainer, 99)])
        assert trainer.evaluate([batch(trainer, 0)]) == undisturbed.evaluate([batch(trainer, 0)])
        torch.testing.assert_close(trainer.state_dict(), undisturbed.state_dict(), rtol=0, atol=0)

    run_ranks(on_rank, 2 if spec.startswith("zero=0") else 4, timeout=100)
