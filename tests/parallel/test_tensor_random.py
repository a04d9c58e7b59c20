"""Random numbers under tensor parallelism: equal where activations are whole, different where they are cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cutting import column, row
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from nbtrain.parallel.tensor.apply import lay_out
from nbtrain.parallel.tensor.cuts import Region, TensorPlan
from nbtrain.parallel.tensor.peers import Peers
from nbtrain.parallel.tensor.random import Draws, agreed_seed, seed_forwards, sharded

WIDTH, HIDDEN = 64, 128


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.drop = nn.Dropout(0.5)
        self.hidden: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.drop(self.up(x).square() + 1)
        return self.drop(self.down(self.hidden))


class Net(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.first, self.mlp, self.last = nn.Dropout(0.5), MLP(), nn.Dropout(0.5)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.first(x)
        x = x + (checkpoint(self.mlp, x, use_reentrant=False) if self.recompute else self.mlp(x))
        return self.last(x), x, self.mlp.hidden


def cut_net(recompute: bool = False, coordinate: int = 0) -> nn.Module:
    torch.manual_seed(0)
    net = Net(recompute)
    layers = {"mlp.up": column(HIDDEN), "mlp.down": row(HIDDEN)}
    plan = TensorPlan(dist.get_world_size(), layers, {"mlp": Region(written=True)})
    lay_out(net, plan, dist.group.WORLD, rank=dist.get_rank())
    torch.manual_seed(dist.get_rank())  # whatever a user did
    seed_forwards(net, Draws(agreed_seed(dist.group.WORLD), coordinate))
    return net


def test_masks_are_equal_where_whole_and_differ_where_cut() -> None:
    def on_rank() -> tuple[torch.Tensor, ...]:
        net = cut_net()
        x = torch.ones(8, WIDTH)
        return tuple(each.detach() for each in net(x) + net(x))

    first, second = run_ranks(on_rank, 2)
    for forward in (slice(0, 3), slice(3, 6)):
        (out, x, hidden), (other_out, other_x, other_hidden) = first[forward], second[forward]
        assert torch.equal(out, other_out)
        assert torch.equal(x, other_x)
        assert 0.4 < (hidden == 0).float().mean() < 0.6
        same = ((hidden == 0) == (other_hidden == 0)).float().mean()
        assert 0.4 < same < 0.6  # 512 fair coins
    assert not torch.equal(first[0], first[3])
    assert 0.4 < ((first[2] == 0) == (first[5] == 0)).float().mean() < 0.6


def test_recompute_draws_the_same_masks_again() -> None:
    def on_rank() -> None:
        nets = [cut_net(), cut_net(recompute=True)]
        for _ in range(2):
            x = [torch.ones(8, WIDTH, requires_grad=True) for _ in nets]
            outputs = [net(each)[0] for net, each in zip(nets, x, strict=True)]
            torch.rand(3)  # backward may find the generators anywhere
            for output in outputs:
                output.square().sum().backward()
            assert torch.equal(outputs[0], outputs[1])
            assert torch.equal(x[0].grad, x[1].grad)
            for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
                assert torch.equal(one.grad, other.grad)

    run_ranks(on_rank, 2)


def test_the_users_random_state_is_left_alone() -> None:
    def on_rank() -> tuple[float, int]:
        net = cut_net()
        torch.manual_seed(100 + dist.get_rank())
        expected = torch.rand(2)
        torch.manual_seed(100 + dist.get_rank())
        net(torch.ones(8, WIDTH))
        assert torch.rand(()) == expected[0]
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            net(torch.ones(8, 3))
        assert torch.rand(()) == expected[1]
        return float(torch.rand(())), agreed_seed(dist.group.WORLD)

    first, second = run_ranks(on_rank, 2)
    assert first[0] != second[0]
    assert first[1] == second[1]


def test_draws_depend_on_coordinate_step_and_forward_only() -> None:
    def drawn(draws: Draws) -> float:
        with draws.next():
            return float(torch.rand(()))

    draws = Draws(seed=1, coordinate=0)
    before = [drawn(draws) for _ in range(3)]
    draws.begin(1)
    assert len({*before, drawn(draws), drawn(Draws(1, 1)), drawn(Draws(2, 0))}) == 6
    twin = copy.deepcopy(draws)
    assert twin is not draws
    assert vars(twin) == vars(draws)
    draws.begin(0)
    assert [drawn(draws) for _ in range(3)] == before


def test_a_sharded_block_takes_one_number_whatever_is_drawn_inside() -> None:
    torch.manual_seed(5)
    after, inside = [], []
    for rank, amount in ((0, 3), (1, 7), (0, 3)):
        torch.manual_seed(5)
        with sharded(Peers(None, rank, 2)):
            inside.append(torch.rand(amount)[0])
        after.append(torch.rand(()))
    assert after[0] == after[1] == after[2]
    assert inside[0] == inside[2] != inside[1]
