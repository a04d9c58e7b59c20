"""Exchanges that do not end: what they leave on a connection does not stop those that come behind."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any

import models
import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import nbtrain as nt
from nbtrain.parallel.exchange import Finish, all_reduce, begin_all_gather, begin_reduce_scatter
from nbtrain.parallel.messages import num_left
from nbtrain.parallel.pipeline import runtime, stage


class Fault(Exception):
    pass


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


@pytest.mark.parametrize("begin", [begin_reduce_scatter, begin_all_gather])
def test_what_one_rank_no_longer_waits_for_may_arrive(begin: Callable[..., Finish]) -> None:
    """It arrives when its receiver has let it go, which nothing but chance decides otherwise."""

    def on_rank() -> tuple[int, int, float]:
        rank, numbers = dist.get_rank(), torch.ones(4)
        if rank == 0:
            begin(torch.zeros(2000), world())
        dist.barrier()
        if rank == 1:
            begin(torch.zeros(2000), world())
        dist.barrier()
        left = num_left(world())
        all_reduce(numbers, world())
        return left, num_left(world()), float(numbers.sum())

    assert run_ranks(on_rank, 2, timeout=20) == [(1, 0, 8.0)] * 2


def test_an_exchange_that_ends_lets_go_of_those_before_it_only() -> None:
    def on_rank() -> tuple[int, int, float]:
        mine = torch.ones(4)
        earlier = begin_all_gather(torch.zeros(4), world())
        begin_all_gather(torch.zeros(4), world())
        earlier()  # began before: a message of the other may still be on its way
        left = num_left(world())
        all_reduce(mine, world())
        return left, num_left(world()), float(mine[0])

    assert run_ranks(on_rank, 2, timeout=20) == [(1, 0, 2.0)] * 2


def test_gradients_may_arrive_at_a_stage_whose_schedule_broke() -> None:
    def on_rank() -> None:
        def trainer_of() -> nt.Trainer:
            torch.manual_seed(0)
            plan = nt.Plan(pp=2, num_microbatches=2)
            return nt.Trainer(models.Noisy(), plan, optimizer=sgd, loss_fn=models.token_mean)

        ids = torch.randint(models.V, (4, models.T), generator=torch.Generator().manual_seed(0))
        trainer, undisturbed = trainer_of(), trainer_of()
        group = trainer._stepper.layout.pipeline._group
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 0:
                patch.setattr(runtime._Waited, "pop", _raising)
            else:
                patch.setattr(stage.Stage, "get_bwd_send_ops", _late(stage.Stage.get_bwd_send_ops))
            with pytest.raises(Fault):
                trainer.step(ids, ids)
        if dist.get_rank() == 0:
            gc.collect()  # frames of the exception
            dist.barrier()  # now the other stage sends
        dist.barrier()
        assert num_left(group) == 1
        assert trainer.step(ids, ids) == undisturbed.step(ids, ids)
        assert num_left(group) == 0

    run_ranks(on_rank, 2, timeout=20)


@pytest.mark.parametrize(("schedule", "num_ranks", "most"), [("1f1b", 2, 2), ("1f1b", 4, 4), ("zbv", 2, 4)])
def test_what_was_sent_is_kept_until_it_is_taken(schedule: str, num_ranks: int, most: int) -> None:
    """And not to the end of the schedule: its promise is a memory that does not grow with the microbatches."""

    def on_rank() -> tuple[int, int]:
        torch.manual_seed(0)
        count = 16
        plan = nt.Plan(pp=num_ranks, num_microbatches=count, schedule=schedule)
        trainer = nt.Trainer(models.Noisy(depth=4), plan, optimizer=sgd, loss_fn=models.token_mean)
        ids = torch.randint(models.V, (count, models.T), generator=torch.Generator().manual_seed(0))
        sent, kept, send, wait = [0], [0], stage.Stage._send, stage.Stage.wait
        held: list[Any] = []

        def sending(self: stage.Stage, *args: Any) -> Any:
            if self not in held:
                held.append(self)
            found = send(self, *args)
            sent[0] = max(sent[0], sum(len(one._sent) for one in held))
            return found

        def waiting(self: stage.Stage, *args: Any) -> None:
            wait(self, *args)
            assert self._messages is not None
            kept[0] = max(kept[0], len(self._messages._handles))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage.Stage, "_send", sending)
            patch.setattr(stage.Stage, "wait", waiting)
            trainer.step(ids, ids)
        return sent[0], kept[0]

    for sent, kept in run_ranks(on_rank, num_ranks):
        assert 0 < sent <= most
        assert kept <= 2 * most


@pytest.mark.parametrize("other", [16, 12])
def test_what_a_backward_left_is_taken_by_no_other_models_gradients(other: int) -> None:
    """Ranks raise in different layers, so that one has begun to reduce and one has not."""

    def on_rank() -> None:
        fails = [-1]

        class Layer(nn.Module):
            def __init__(self, number: int, width: int) -> None:
                super().__init__()
                self.number, self.linear = number, nn.Linear(width, width)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                def check(gradient: torch.Tensor) -> None:
                    if fails[0] == self.number:
                        raise Fault

                y = self.linear(x).tanh()
                if y.requires_grad:
                    y.register_hook(check)
                return y

        def trainer_of(width: int) -> nt.Trainer:
            torch.manual_seed(0)
            model = nn.Sequential(*(Layer(number, width) for number in range(4)))
            plan = nt.Plan(zero=1, bucket_mb=0.0005)
            return nt.Trainer(model, plan, optimizer=sgd, loss_fn=nn.functional.mse_loss)

        def step(trainer: nt.Trainer, width: int) -> torch.Tensor:
            return trainer.step(torch.ones(4, width), torch.zeros(4, width))

        broken, undisturbed, second = trainer_of(16), trainer_of(16), trainer_of(other)
        for _ in range(3):
            fails[0] = 0 if dist.get_rank() == 0 else 3
            with pytest.raises(Fault):
                step(broken, 16)
            fails[0] = -1
            step(second, other)
            assert step(broken, 16) == step(undisturbed, 16)

    run_ranks(on_rank, 2, timeout=30)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_memory_does_not_grow_with_the_microbatches(schedule: str) -> None:
    """All of it, measured: activations and gradients of a microbatch are 2 MiB each here, and weights 2 MiB a stage."""

    def on_rank() -> list[float]:
        ctypes.CDLL(None).mallopt(-3, 2**18)  # M_MMAP_THRESHOLD: what is freed is the system's at once
        process, peaks = psutil.Process(), []
        for count in (4, 16):
            torch.manual_seed(0)
            plan = nt.Plan(pp=2, num_microbatches=count, schedule=schedule)
            model = nn.Sequential(*(Wide() for _ in range(4)))
            trainer = nt.Trainer(model, plan, optimizer=sgd, loss_fn=nn.functional.mse_loss)
            x = torch.ones(1024 * count, 512)
            trainer.step(x[:count], x[:count])
            seen = [base := process.memory_info().rss]
            with pytest.MonkeyPatch.context() as patch:
                for name in ("forward_one_chunk", "backward_one_chunk"):
                    patch.setattr(stage.Stage, name, _then(getattr(stage.Stage, name), process, seen))
                trainer.step(x, x)
            peaks.append((max(seen) - base) / 2**20)
        return peaks

    for few, many in run_ranks(on_rank, 2):
        assert few > 2
        assert many < 1.5 * few


def _then(function: Callable[..., Any], process: psutil.Process, seen: list[int]) -> Callable[..., Any]:
    def observed(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        seen.append(process.memory_info().rss)
        return result

    return observed


def _raising(*_: Any) -> Any:
    raise Fault


def _late(send: Callable[..., Any]) -> Callable[..., Any]:
    def late(*args: Any) -> Any:
        dist.barrier()
        send(*args)
        raise Fault

    return late
