"""Cut layers against whole ones: outputs, gradients of inputs and of every parameter, and what they communicate.

Shapes: B samples, T tokens, D features, V vocabulary, t ranks.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cutting import CLOSE, B, D, T, V, assert_gradients, assert_same, column, counted, pair, row, told
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from nbtrain.errors import ModelError
from nbtrain.parallel.tensor import collectives
from nbtrain.parallel.tensor.apply import lay_out
from nbtrain.parallel.tensor.cuts import Cut, Layer, Region, TensorPlan
from nbtrain.parallel.tensor.parts import join_parts, take_part
from nbtrain.parallel.tensor.peers import Peers
from nbtrain.parallel.tensor.random import Draws, agreed_seed, seed_forwards
from nbtrain.parallel.tensor.state import cuts_by_name, gather_whole


class QKV(nn.Module):
    """Separate or fused projections of one input, heads that never see their own number, and the row behind."""

    def __init__(self, fused: bool, kv: int = D, layer: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.sizes = (2 * D, kv, kv)
        self.fused = fused
        if fused:
            self.qkv = layer(D, 2 * D + 2 * kv)
        else:
            self.q, self.k, self.v = (layer(D, size) for size in self.sizes)
        self.out = layer(2 * D, D)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        if self.fused:
            fused = self.qkv(x_BTD)
            q, k, v = fused.split([size * fused.shape[-1] // sum(self.sizes) for size in self.sizes], -1)
        else:
            q, k, v = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
        return self.out(q.tanh() * (k * v).repeat_interleave(q.shape[-1] // k.shape[-1], -1))


MLP = (lambda: nn.Sequential(nn.Linear(D, 12), nn.GELU(), nn.Linear(12, D)), {"0": column(12), "2": row(12)})


CASES = {
    "mlp": MLP,
    "no bias": (
        lambda: nn.Sequential(nn.Linear(D, 12, bias=False), nn.Linear(12, D, bias=False)),
        {"0": column(12, bias=False), "1": row(12)},
    ),
    "conv1d": (
        lambda: nn.Sequential(conv(D, 12), nn.Tanh(), conv(12, D)),
        {"0": column(12, dim=1), "2": row(12, dim=0)},
    ),
    "qkv": (lambda: QKV(fused=False), {"q": column(2 * D), "k": column(D), "v": column(D), "out": row(2 * D)}),
    "fused qkv": (lambda: QKV(fused=True, kv=4), {"qkv": column(2 * D, 4, 4), "out": row(2 * D)}),
    "gathered": (
        lambda: nn.Sequential(nn.Tanh(), nn.Linear(D, 12)),
        {"1": Layer("colwise_gather_output", column(8, 4).cuts)},
    ),
}


@pytest.mark.parametrize("degree", [2, 4])
def test_layers_compute_what_whole_ones_do(degree: int) -> None:
    def on_rank() -> None:
        for name, of in CASES.items():
            with told(name):
                whole, cut, plan = pair(*of)
                assert_same(whole, cut, plan, torch.randn(B, T, D))

    run_ranks(on_rank, degree)


def conv(inputs: int, outputs: int) -> nn.Module:
    return Conv1D(outputs, inputs)


class Tied(nn.Module):
    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.emb = nn.Embedding(V, D, padding_idx=padding)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(ids_BT))


TIED = {
    "emb": Layer("vocab", {"weight": Cut(0, (V,))}),
    "head": Layer("colwise_gather_output", {"weight": Cut(0, (V,))}),
}


def test_a_tied_vocabulary() -> None:
    def on_rank(padding: int | None) -> None:
        whole, cut, plan = pair(lambda: Tied(padding), TIED)
        assert cut.emb.weight is cut.head.weight
        assert set(cuts_by_name(cut, plan)) == {"emb.weight", "head.weight"}
        ids = torch.tensor([[0, V - 1, 5, 5], [V // 2, V // 2 - 1, 0, 9]])
        assert_same(whole, cut, plan, ids)
        for wrong in (-1, V):
            with pytest.raises(IndexError, match=f"give ids from 0 to {V - 1}"):
                cut(torch.tensor([[wrong]]))

    run_ranks(lambda: [on_rank(padding) for padding in (None, 0, V - 1)], 2)


def test_an_embedding_alone_gets_whole_gradients_of_its_rows() -> None:
    def on_rank() -> None:
        make = lambda: nn.Sequential(nn.Embedding(V, D, padding_idx=3))  # noqa: E731
        whole, cut, plan = pair(make, {"0": TIED["emb"]})
        assert_same(whole, cut, plan, torch.tensor([[3, 4, 31], [3, 0, 4]]))

    run_ranks(on_rank, 4)


def test_embeddings_that_share_a_weight_are_cut_alike() -> None:
    class Twice(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Embedding(V, D)
            self.shared.weight = self.emb.weight

        def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
            return super().forward(ids_BT) * self.shared(ids_BT).sum(-1, keepdim=True)

    def on_rank() -> None:
        whole, cut, plan = pair(Twice, TIED)
        assert set(cuts_by_name(cut, plan)) == {"emb.weight", "head.weight", "shared.weight"}
        assert_same(whole, cut, plan, torch.arange(V))

    run_ranks(on_rank, 2)


class Scaled(nn.Embedding):
    """As Hugging Face's models have it."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 3


class Looking(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]


def test_an_embedding_with_a_forward_around_the_lookup() -> None:
    def on_rank() -> None:
        whole, cut, plan = pair(lambda: nn.Sequential(Scaled(V, D)), {"0": TIED["emb"]})
        assert isinstance(cut[0], Scaled)
        assert_same(whole, cut, plan, torch.arange(V))

    run_ranks(on_rank, 2)


def test_inputs_of_any_shape() -> None:
    def on_rank() -> None:
        torch.manual_seed(1)
        shapes = torch.randn(D), torch.randn(3, D), torch.randn(D, 3).t(), torch.randn(0, D), torch.randn(2, 2, 1, D)
        transposed = (lambda: nn.Sequential(conv(D, 4), conv(4, D)), {"0": column(4, dim=1), "1": row(4, 0)})
        for x, of in itertools.product(shapes, (MLP, transposed)):
            whole, cut, plan = pair(*of)
            assert_same(whole, cut, plan, x)

    run_ranks(on_rank, 2)


def test_gradients_of_gradients_are_an_error() -> None:
    def on_rank() -> None:
        _, cut, _ = pair(*MLP)
        x = torch.randn(B, D, requires_grad=True)
        (gradient,) = torch.autograd.grad(cut(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.square().sum().backward()

    run_ranks(on_rank, 2)


def test_layers_that_take_one_tensor_sum_its_gradient_once() -> None:
    layers = {"q": column(2 * D), "k": column(D), "v": column(D), "out": row(2 * D)}

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
            self.attn, self.mlp = QKV(fused=False), MLP[0]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    plan = {f"attn.{name}": layer for name, layer in layers.items()}
    plan |= {f"mlp.{name}": layer for name, layer in MLP[1].items()}

    def on_rank() -> None:
        whole, cut, of = pair(Block, plan)
        x = torch.randn(B, T, D, requires_grad=True)
        with counted() as calls:
            cut(x).sum().backward()
        assert calls == {"all_reduce": 4}  # Megatron-LM: two forward, two backward
        with counted() as calls, torch.no_grad():
            cut(x)
        assert calls == {"all_reduce": 2}
        with counted() as calls, torch.inference_mode():
            torch.testing.assert_close(cut(x.detach()), whole(x.detach()), **CLOSE)
        assert calls == {"all_reduce": 2}
        cut.zero_grad()
        assert_same(nn.Sequential(whole), nn.Sequential(cut), nested(of), x.detach())

    run_ranks(on_rank, 2)


def nested(plan: TensorPlan) -> TensorPlan:
    """The plan of a Sequential that holds the model."""
    return TensorPlan(plan.degree, {f"0.{name}": layer for name, layer in plan.layers.items()})


def test_recompute_gives_equal_gradients() -> None:
    class Recomputed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=self[0].out.bias is None)

    layers = {"q": column(2 * D), "k": column(D), "v": column(D), "out": row(2 * D)}

    def on_rank() -> None:
        whole, cut, plan = pair(lambda: nn.Sequential(QKV(fused=False)), {f"0.{n}": la for n, la in layers.items()})
        cut.__class__ = Recomputed
        assert_same(whole, cut, plan, torch.randn(B, T, D))
        whole.zero_grad()
        cut.zero_grad()
        outer = [nn.Sequential(nn.Tanh(), model) for model in (whole, cut)]
        assert_same(*outer, TensorPlan(2, {f"1.{n}": la for n, la in plan.layers.items()}), torch.randn(B, T, D))

    run_ranks(on_rank, 2)


def test_what_layers_share_goes_with_the_tensor_and_follows_its_changes() -> None:
    def on_rank() -> None:
        peers = Peers(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
        leaf = torch.randn(B, T, D, requires_grad=True)
        x = leaf * 1
        first = collectives.enter(x, peers)
        assert collectives.enter(x, peers) is first
        x.mul_(2)
        second = collectives.enter(x, peers)
        assert second is not first
        second.sum().backward()
        torch.testing.assert_close(leaf.grad, torch.full((B, T, D), 2.0 * dist.get_world_size()))
        del first, second, x
        for make in (torch.tanh, torch.exp, lambda leaf: leaf.softmax(-1), lambda leaf: leaf * 2):
            x = make(leaf)
            kept = [collectives.enter(x, peers) * 2, collectives.enter(x, peers) * x]
            memory = StorageWeakRef(x.untyped_storage())
            del x, kept
            assert memory.expired()  # no cycle holds it

    run_ranks(on_rank, 2)


def test_collectives_take_any_dtype_and_strides() -> None:
    def on_rank(dtype: torch.dtype) -> None:
        rank, degree = dist.get_rank(), dist.get_world_size()
        peers = Peers(dist.group.WORLD, rank, degree)
        whole = torch.arange(B * T * D, dtype=dtype).view(D, T, B).transpose(0, 2)
        x = [
            part.detach().requires_grad_()
            for part in (whole, whole.chunk(degree, 2)[rank], whole.chunk(degree, 1)[rank])
        ]
        cases = [
            (collectives.enter, x[0], whole, whole * 2 * degree),
            (lambda x, peers: collectives.leave(x.mul(1), peers), x[0], whole * degree, x[0].detach() * 2 * degree),
            (collectives.gather_last, x[1], whole, 2 * x[1].detach()),
            (collectives.split_last, x[0], x[1], 2 * whole),
            (collectives.gather_sequence, x[2], whole, 2 * degree * x[2].detach()),
            (collectives.scatter_sequence, x[0], degree * x[2].detach(), 2 * degree * whole),
            (collectives.cut_sequence, x[0], x[2], 2 * whole),
            (collectives.join_sequence, x[2], whole, 2 * x[2].detach()),
        ]
        for function, given_, expected, gradient in cases:
            given_.grad = None
            output = function(given_, peers)
            torch.testing.assert_close(output, expected, check_stride=False)
            output.backward(2 * output.detach())
            torch.testing.assert_close(given_.grad, gradient, check_stride=False)

    run_ranks(lambda: [on_rank(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)], 2)


def test_autocast() -> None:
    def on_rank() -> None:
        whole, cut, plan = pair(*MLP)

        def autocast(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
            def compute(x: torch.Tensor) -> torch.Tensor:
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(x)
                assert output.dtype == torch.bfloat16
                return output.float()

            return compute

        x = torch.randn(B, T, D)
        expected, output = (autocast(model)(x) for model in (whole, cut))
        # bf16 has 8 bits, and each rank rounds its part of the sum
        torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
        output.sum().backward()
        expected.sum().backward()
        assert_gradients(whole, cut, plan, rtol=2e-2, atol=5e-2)

    run_ranks(on_rank, 2)


def test_modules_stay_what_they_were() -> None:
    model = nn.Sequential(nn.Linear(D, 12), nn.Sequential(conv(12, D)), nn.Embedding(V, D))
    model[0].weight.requires_grad_(False)
    model[0].weight.note = "kept"
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("hook"))
    whole = copy.deepcopy(model)
    layers = {"0": column(12), "1.0": row(12, dim=0), "2": TIED["emb"]}
    lay_out(model, TensorPlan(2, layers), None, rank=1)
    assert [type(part) for part in whole.modules()] != [type(part) for part in model.modules()]
    assert all(isinstance(new, type(old)) for new, old in zip(model.modules(), whole.modules(), strict=True))
    assert list(model.state_dict()) == list(whole.state_dict())
    assert not model[0].weight.requires_grad
    assert model[0].weight.note == "kept"
    assert "in_features=8, out_features=6" in repr(model[0])
    assert (model[1][0].nx, model[1][0].nf, model[2].num_embeddings) == (6, D, V // 2)
    torch.testing.assert_close(model[0].weight.detach(), whole[0].weight.detach()[6:])
    twin = copy.deepcopy(model)
    assert twin[0].weight is not model[0].weight
    assert twin[0].peers is model[0].peers is model[2].peers
    model[0].regroup_tensor("formed again")  # type: ignore[arg-type]
    assert model[2].peers.group == "formed again"
    twin[0](torch.randn(D))
    assert calls == ["hook"]


def test_on_meta() -> None:
    with torch.device("meta"):
        model = Tied()
    lay_out(model, TensorPlan(4, TIED), None, rank=3)
    assert model.emb.weight is model.head.weight
    assert (model.emb.weight.device.type, tuple(model.emb.weight.shape)) == ("meta", (V // 4, D))


@pytest.mark.parametrize(
    ("make", "layers", "message"),
    [
        (Tied, {"emb": TIED["emb"]}, r"'emb.weight' and 'head.weight' are one parameter.*left whole.*'replicate'"),
        (MLP[0], {"0": column(12), "2": row(13)}, r"'2.weight': a cut of dim 1 .* needs 13 .* \(8, 12\)"),
        (MLP[0], {"0": column(7, 5)}, r"'0.weight': tp=2 does not divide a segment of 7 elements; choose tp from 1, 7"),
        (MLP[0], {"7": column(12)}, r"no module '7'"),
        (lambda: nn.Sequential(nn.Embedding(V, D, max_norm=1.0)), {"0": TIED["emb"]}, r"'0' has max_norm=1.0"),
        (lambda: nn.Sequential(nn.Embedding(V, D, sparse=True)), {"0": TIED["emb"]}, r"'0' has sparse=True"),
        (lambda: nn.Sequential(Looking(V, D)), {"0": TIED["emb"]}, r"call super\(\).forward\(ids\) in Looking"),
        (MLP[0], {"0": TIED["emb"]}, r"'0' is a Linear; the style 'vocab' needs nn.Embedding"),
        (MLP[0], {"0": Layer("attention")}, r"needs nn.MultiheadAttention"),
        (MLP[0], {"0": Layer("rowwise")}, r"'0' is rowwise and has no cut of its weight"),
        (lambda: nn.Sequential(nn.Linear(D, 12, bias=False)), {"0": column(12)}, r"no parameter '0.bias' to cut"),
        (
            lambda: nn.Sequential(nn.Embedding(V, D, scale_grad_by_freq=True)),
            {"0": TIED["emb"]},
            r"scale_grad_by_freq=False",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_and_left_as_it_was(make: Any, layers: Any, message: str) -> None:
    model = make()
    before = state(model)
    with pytest.raises(ModelError, match=message):
        lay_out(model, TensorPlan(2, layers), None, rank=0)
    assert state(model) == before


def state(model: nn.Module) -> list[tuple[type, list[int]]]:
    return [(type(module), [id(parameter) for parameter in module._parameters.values()]) for module in model.modules()]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 2))
def test_parts_join_to_the_whole(sizes: list[int], degree: int, dim: int) -> None:
    cut = Cut(dim, tuple(size * degree for size in sizes))
    shape = [2, 3, 2]
    shape[dim] = cut.size
    whole = torch.arange(cut.size * 12 // [2, 3, 2][dim]).view(shape)
    parts = [take_part(whole, cut, rank, degree) for rank in range(degree)]
    assert torch.equal(join_parts(parts, cut), whole)
    assert len({part.shape for part in parts}) == 1
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)


class NanoAttention(nn.Module):
    """Writes sizes of whole tensors."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.heads, self.width = heads, D

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.width, dim=2)
        q, k, v = (each.view(B, T, self.heads, C // self.heads).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


@pytest.mark.parametrize("degree", [2, 4])
def test_regions_read_written_sizes_as_those_of_whole_tensors(degree: int) -> None:
    layers = {"1.c_attn": column(D, D, D), "1.c_proj": row(D)}

    def on_rank() -> None:
        make = lambda: nn.Sequential(nn.Linear(D, D), NanoAttention())  # noqa: E731
        regions = {"1": Region(written=True, layers=("c_attn", "c_proj")), "": Region(written=True)}
        whole, cut, plan = pair(make, layers, regions=regions)
        assert_same(whole, cut, plan, torch.randn(B, T, D))
        assert isinstance(cut[1], NanoAttention)
        assert type(cut[1]).__name__ == "NanoAttention"
        assert "_nbtrain_mark" not in vars(cut(torch.randn(B, T, D)))

    run_ranks(on_rank, degree)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), NanoAttention()) for _ in range(2))
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids_BT)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("sharded", [False, True])
def test_beside_data_parallelism(sharded: bool) -> None:
    """Parameters are plain tensors, which DDP reduces and FSDP2 shards over the other axis."""
    attention = {"c_attn": column(D, D, D), "c_proj": row(D)}
    layers = {f"blocks.{index}.1.{name}": layer for index in range(2) for name, layer in attention.items()}
    regions = {f"blocks.{i}.1": Region(written=True) for i in range(2)}

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        whole = Stack()
        cut = copy.deepcopy(whole)
        tp = mesh["tp"].get_group()
        plan = TensorPlan(2, layers | TIED, regions)
        lay_out(cut, plan, tp, rank=tp.rank(), loss_parallel=True)
        seed_forwards(cut, Draws(agreed_seed(tp), mesh["dp"].get_local_rank()))
        if sharded:
            for block in cut.blocks:
                fully_shard(block, mesh=mesh["dp"])
            model = fully_shard(cut, mesh=mesh["dp"])
        else:
            model = DistributedDataParallel(cut, process_group=mesh["dp"].get_group(), init_sync=False)
        ids = torch.randint(V, (4, T))
        F.cross_entropy(whole(ids).flatten(0, 1), ids.flatten()).backward()
        own = ids.chunk(2)[mesh["dp"].get_local_rank()]
        F.cross_entropy(model(own).flatten(0, 1), own.flatten()).backward()
        gradients = {name: parity.whole(parameter.grad) for name, parameter in cut.named_parameters()}
        expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
        torch.testing.assert_close(gather_whole(gradients, cuts_by_name(cut, plan), tp), expected, **CLOSE)

    run_ranks(on_rank, 4)
