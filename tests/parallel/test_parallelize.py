"""Laying out: what is wrapped, what is refused, and that a model still looks like itself."""

import copy
from typing import Any

import models
import pytest
import torch
from parity import rank, whole
from ranks import run_ranks
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import nbtrain as nt
from nbtrain.errors import ModelError, PlanError, UsageError
from nbtrain.parallel.blocks import repeated_blocks, self_contained
from nbtrain.parallel.layout import layout_of
from nbtrain.parallel.mesh import build_mesh, data_coordinate


def test_trunks_are_found_by_structure() -> None:
    assert list(repeated_blocks(models.GPT())) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(repeated_blocks(models.llama())) == ["model.layers.0", "model.layers.1"]
    assert list(repeated_blocks(models.gpt2())) == ["transformer.h.0", "transformer.h.1"]
    assert list(repeated_blocks(models.ConvNet())) == ["blocks.0", "blocks.1"]
    # layers of one kind, and a choice of branches, are no trunks
    assert not repeated_blocks(models.MLP())
    assert not repeated_blocks(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    assert list(repeated_blocks(nn.ModuleDict({"a": models.MLP(), "b": models.MLP()}))) == ["a", "b"]


def test_blocks_that_share_weights_with_others_are_no_units() -> None:
    net = models.Tied()
    assert list(self_contained(net, repeated_blocks(net))) == [f"blocks.{index}" for index in range(4)]
    net.blocks[1][1].weight = net.blocks[2][1].weight
    assert list(self_contained(net, repeated_blocks(net))) == ["blocks.0", "blocks.3"]


def test_the_mesh_has_all_axes_and_is_made_once() -> None:
    def on_rank() -> None:
        mesh = build_mesh(nt.Plan(dp_replicate=2))
        assert mesh is not None
        assert mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "tp")
        assert tuple(mesh.shape) == (1, 2, 2, 1)
        groups = len(distributed_c10d._world.pg_map)
        assert build_mesh(nt.Plan(dp_replicate=2, zero=2)) is mesh
        assert len(distributed_c10d._world.pg_map) == groups
        with pytest.raises(PlanError, match="dp_shard=3 is not the 4 ranks"):
            build_mesh(nt.Plan(dp_shard=3))
        plan = nt.Plan(dp_replicate=2).resolve(4)
        assert data_coordinate(plan, rank()) == rank()

    run_ranks(on_rank, 4)


def test_peers_along_other_axes_take_the_same_share() -> None:
    plan = nt.Plan(pp=2, tp=2).resolve(8)
    assert [data_coordinate(plan, of_rank) for of_rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_without_a_process_group_there_is_one_device() -> None:
    assert build_mesh(nt.Plan()) is None
    net = nn.Linear(2, 2)
    assert nt.parallelize(net, nt.Plan()) is net
    with pytest.raises(PlanError, match="dp_shard=2 is not the 1 ranks"):
        nt.parallelize(nn.Linear(2, 2), nt.Plan(dp_shard=2))


def test_weights_and_buffers_are_those_of_rank_0() -> None:
    def on_rank() -> list[torch.Tensor]:
        for spec in ("zero=0", "zero=3", "zero=3,dp_replicate=2"):
            torch.manual_seed(rank())
            net = models.ConvNet()
            net.stem[1].running_mean.fill_(rank())
            net = nt.parallelize(net, nt.Plan.parse(spec))
            torch.manual_seed(0)
            for name, expected in models.ConvNet().named_parameters():
                torch.testing.assert_close(whole(dict(net.named_parameters())[name].detach()), expected.detach())
            assert torch.equal(net.stem[1].running_mean, torch.zeros(6))

    run_ranks(on_rank, 4)


def test_a_replica_looks_like_its_model() -> None:
    def on_rank() -> None:
        inner = models.GPT()
        net = nt.parallelize(inner, nt.Plan(zero=0))
        assert list(net.state_dict()) == list(inner.state_dict())
        assert [name for name, _ in net.named_parameters()] == [name for name, _ in inner.named_parameters()]
        assert net.head.weight is inner.tokens.weight
        assert net.blocks[0].attend.__func__ is models.Block.attend
        net.load_state_dict(inner.state_dict())
        with pytest.raises(AttributeError, match="'GPT' object has no attribute 'nonsense'"):
            net.nonsense  # noqa: B018
        net(torch.zeros(1, 4, dtype=torch.long))
        assert isinstance(vars(net)["_ddp"], DistributedDataParallel)

    run_ranks(on_rank, 2)


def test_a_replica_is_copied_as_a_plain_model() -> None:
    """As an average of weights is kept."""

    def on_rank() -> None:
        inner = models.ConvNet()
        net = nt.parallelize(inner, nt.Plan(zero=0, precision="bf16"))
        twin = copy.deepcopy(net)
        assert layout_of(twin) is None
        net.head[0].weight.data.zero_()
        assert twin.head[0].weight.abs().sum() > 0
        twin.eval()(torch.ones(2, 3, 8, 8))
        trainer = nt.Trainer(
            twin,
            nt.Plan(zero=0),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            loss_fn=nn.functional.cross_entropy,
        )
        trainer.step(torch.ones(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))
        assert type(twin) is models.ConvNet  # bf16 was the other plan's

    run_ranks(on_rank, 2)


def test_a_sharded_model_is_the_model_itself() -> None:
    def on_rank() -> None:
        inner = models.GPT()
        net = nt.parallelize(inner, nt.Plan())
        assert net is inner
        assert isinstance(net, models.GPT)
        assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
        layout = layout_of(net)
        assert layout is not None
        assert layout.units == ("blocks.0", "blocks.1", "blocks.2")

    run_ranks(on_rank, 2)


def test_laying_out_twice_is_once() -> None:
    """A cell that is run again, with the model or with what `parallelize` gave."""

    def on_rank() -> None:
        for spec in ("zero=0", "zero=3"):
            plan, inner = nt.Plan.parse(spec), models.MLP()
            net = nt.parallelize(inner, plan)
            assert nt.parallelize(inner, plan) is net
            assert nt.parallelize(net, plan) is net
            with pytest.raises(PlanError, match="build it again"):
                nt.parallelize(inner, nt.Plan(zero=2))

    run_ranks(on_rank, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nn.ReLU, "ReLU has no parameters"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), r"type model.requires_grad_\(True\)"),
        (lambda: nn.Linear(2, 2, device="meta"), "'weight', 'bias' are on the meta device"),
        (lambda: nn.LazyLinear(2), "run the model once"),
        (lambda: [nn.Linear(2, 2)], "not an nn.Module"),
    ],
)
def test_a_model_that_cannot_train_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        nt.parallelize(make(), nt.Plan())


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.half = nn.Linear(2, 2).half()


def test_what_cannot_be_sharded_is_listed_with_its_cure() -> None:
    def on_rank() -> None:
        with pytest.raises(ModelError) as raised:
            nt.parallelize(Odd(), nt.Plan())
        assert "'temperature' is of shape ()" in str(raised.value)
        assert "type zero=0" in str(raised.value)
        assert "type model.float()" in str(raised.value)

    run_ranks(on_rank, 2)


def test_a_model_that_differs_between_ranks_is_refused_on_all() -> None:
    def on_rank() -> None:
        with pytest.raises(ModelError, match=r"rank 0 has 'weight' \(3, 2\) float32, rank 1 has 'weight' \(4, 2\)"):
            nt.parallelize(nn.Linear(2, 3 + rank()), nt.Plan())
        with pytest.raises(ModelError, match="rank 0 has 2 parameters and buffers, rank 1 has 1"):
            nt.parallelize(nn.Linear(2, 3, bias=rank() == 0), nt.Plan(zero=0))
        frozen = nn.Linear(2, 3)
        frozen.weight.requires_grad_(rank() == 0)
        with pytest.raises(ModelError, match=r"rank 1 has 'weight' \(3, 2\) float32 not trained"):
            nt.parallelize(frozen, nt.Plan(zero=0))

    run_ranks(on_rank, 2)


def test_what_this_release_lacks_is_said_before_anything_is_done() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(NotImplementedError, match="hierarchical=True"):
        nt.parallelize(net, nt.Plan(hierarchical=True))
    with pytest.raises(PlanError, match="pp=2 does not divide the 1 ranks"):
        nt.parallelize(net, nt.Plan(pp=2))
    assert layout_of(net) is None


class Listed(nn.Module):
    """Its blocks have no forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        pair = {"a": (8, 16), "b": (16, 8)}
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*size) for name, size in pair.items()}) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block["b"](block["a"](x).relu())
        return x


def test_blocks_that_nothing_calls_are_left_to_the_root() -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        net, plain = Listed(), Listed()
        plain.load_state_dict(net.state_dict())
        sharded, x = nt.parallelize(net, nt.Plan(zero=3)), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(sharded(x), plain(x))
        with pytest.raises(ModelError, match="no repeated blocks"):
            nt.parallelize(Listed(), nt.Plan(zero=3, recompute="full"))

    run_ranks(on_rank, 2)


def test_ranks_with_other_plans_or_options_are_told() -> None:
    def on_rank() -> None:
        with pytest.raises(UsageError, match=r"plan differs between ranks: .* on rank 0 and .*zero=1.* on rank 1"):
            nt.parallelize(nn.Linear(2, 2), nt.Plan(zero=rank()))
        with pytest.raises(UsageError, match="accumulate differs between ranks: 1 on rank 0 and 2 on rank 1"):
            nt.Trainer(nn.Linear(2, 2), nt.Plan(zero=3), optimizer=torch.optim.SGD, accumulate=1 + rank())

    run_ranks(on_rank, 2)
