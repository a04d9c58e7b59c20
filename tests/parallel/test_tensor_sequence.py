"""Sequence parallelism against whole models.

Shapes: B samples, T tokens, D features, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cutting import CLOSE, B, D, T, assert_gradients, column, counted, pair, row
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from nbtrain.errors import BatchError, ModelError
from nbtrain.parallel.tensor.apply import lay_out
from nbtrain.parallel.tensor.cuts import Layer, Region, TensorPlan
from nbtrain.parallel.tensor.random import Draws, seed_forwards
from nbtrain.parallel.tensor.sequence import sequence_partial

H = 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.q_norm = nn.RMSNorm(D // H)
        self.table = nn.Embedding(2, H)  # a whole bias of each head's scores
        # as LoRA has it: a whole layer before one that is cut
        self.down, self.up = nn.Linear(D, 3, bias=False), nn.Linear(3, D, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        B, T, _ = x.shape
        q = (self.q(x) + self.up(self.down(x))).view(B, T, H, D // H)
        k, v = (each.view(B, T, H, -1) for each in self.kv(x).chunk(2, -1))
        q, k, v = (each.transpose(1, 2) for each in (self.q_norm(q), k, v))
        bias = self.table((torch.arange(T)[:, None] > torch.arange(T)).long()).permute(2, 0, 1)[None]
        bias = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
        y = F.scaled_dot_product_attention(q, k.repeat(1, 1, 1, 2), v.repeat(1, 1, 1, 2), bias)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(D, 12), nn.GELU(), nn.Linear(12, D), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), mask=mask)
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, recompute: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.recompute = recompute

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False) if self.recompute else block(x, mask)
        return self.last(self.norm(x))


LAYERS = {
    "attn.q": column(D),
    "attn.kv": column(D // 2, D // 2),
    "attn.up": column(D, bias=False),
    "attn.out": row(D),
    "mlp.0": column(12),
    "mlp.2": row(12),
}
REGIONS = {"attn": Region(True, (0,)), "mlp": Region(False, (0,))}
TORCHS = {"self_attn": Layer("attention"), "linear1": column(16), "linear2": row(16)}


def plan_of(layers: dict[str, Layer], regions: dict[str, Region], **options: Any) -> dict[str, Any]:
    """For both blocks."""
    blocks = ("blocks.0", "blocks.1")
    return {
        "layers": {f"{block}.{name}": layer for block in blocks for name, layer in layers.items()},
        "regions": {f"{block}.{name}".rstrip("."): region for block in blocks for name, region in regions.items()},
        "trunk": blocks,
        **options,
    }


def summed(model: nn.Module, plan: TensorPlan) -> None:
    """What the trainer does before a step."""
    parameters = dict(model.named_parameters())
    for name in sequence_partial(model, plan):
        dist.all_reduce(parameters[name].grad)


def assert_trains_like_one(
    make: Callable[[], nn.Module], of: dict[str, Any], *args: Any, calls: dict[str, int] | None = None
) -> None:
    whole, cut, plan = pair(make, **of)
    x = torch.randn(B, T, D)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    expected = whole(inputs[0], *args)
    with counted() as seen:
        got = cut(inputs[1], *args)
        torch.testing.assert_close(got, expected, **CLOSE)
        for output in (got, expected):
            (output * output.detach().cos()).sum().backward()
    assert calls is None or seen == calls
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=2e-5, atol=3e-5)
    summed(cut, plan)
    assert_gradients(whole, cut, plan, rtol=2e-5, atol=3e-5)
    whole.eval()
    cut.eval()
    with torch.no_grad():
        torch.testing.assert_close(cut(x, *args), whole(x, *args), **CLOSE)


@pytest.mark.parametrize("degree", [2, 4])
def test_a_trunk_of_blocks(degree: int) -> None:
    def on_rank(recompute: bool) -> None:
        # each of 2 blocks has 2 regions: a gather and a scatter forward, a scatter and a gather backward; the trunk
        # has a gather at its end, and at its beginning one backward
        calls = None if recompute else {"all_gather": 2 * 2 * 2 + 2, "reduce_scatter": 2 * 2 * 2}
        mask = torch.ones(T, T).tril().bool()
        make = lambda: Net(recompute=recompute)  # noqa: E731
        assert_trains_like_one(make, plan_of(LAYERS, REGIONS), mask, calls=calls)

    run_ranks(lambda: [on_rank(recompute) for recompute in (False, True)], degree)


def test_the_same_blocks_without_it() -> None:
    """The norm of each head's queries is whole and acts on cut heads: each rank has a part of its gradient."""

    def on_rank() -> None:
        of = plan_of(LAYERS, REGIONS, trunk=())
        partial = [f"blocks.{block}.attn.q_norm.weight" for block in range(2)]
        whole, cut, plan = pair(Net, partial=partial, **of)
        x = torch.randn(B, T, D)
        for model in (cut, whole):
            model(x).square().sum().backward()
        for name in plan.partial:
            dist.all_reduce(cut.get_parameter(name).grad)
        assert_gradients(whole, cut, plan, rtol=2e-5, atol=1e-4)

    run_ranks(on_rank, 2)


def test_torchs_encoder_layers() -> None:
    def on_rank(batch_first: bool) -> None:
        make = lambda: nn.TransformerEncoderLayer(D, H, 16, dropout=0.0, batch_first=batch_first)  # noqa: E731
        assert_trains_like_one(
            lambda: Net(make), plan_of(TORCHS, {"": Region(False, ()), "self_attn": Region(False, (0, 1, 2))})
        )

    run_ranks(lambda: [on_rank(batch_first) for batch_first in (True, False)], 2)


class Inline(nn.Module):
    """Norm, cut layers and residual in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 12), nn.Linear(D, 12), nn.Linear(12, D)

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        normal = self.norm(x)
        return x + self.down(self.up(normal) * self.gate(normal).sigmoid())


def test_layers_among_others_gather_and_scatter_by_themselves() -> None:
    def on_rank() -> None:
        of = plan_of({"gate": column(12), "up": column(12), "down": row(12)}, {"": Region(False, ())})
        # gate and up share what is gathered
        assert_trains_like_one(lambda: Net(Inline), of, calls={"all_gather": 2 * 2 + 2, "reduce_scatter": 2 * 2})

    run_ranks(on_rank, 2)


class Parted(nn.Module):
    """As Hugging Face's BERT has it: the row, a residual and a norm in a module beside the columns."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.out, self.norm = Heads(), nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return self.norm(x + self.out(self.heads(x)))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).view(*x.shape[:2], H, D // H).transpose(1, 2) for each in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


def test_columns_in_another_module_than_the_row() -> None:
    layers = {"heads.q": column(D), "heads.k": column(D), "heads.v": column(D), "out": row(D)}
    of = plan_of(layers, {"": Region(True, (), tuple(layers))})

    def on_rank() -> None:
        calls = {"all_gather": 2 * 2 + 2, "reduce_scatter": 2 * 2}
        assert_trains_like_one(lambda: Net(Parted), of, calls=calls)
        _, cut, _ = pair(lambda: Net(Parted), **of)
        with pytest.raises(
            ModelError, match=r"gathers argument 0 of .*Heads, and it was called with 0 positions and x;"
        ):
            cut.blocks[0].heads(x=torch.zeros(B, 2, D))

    run_ranks(on_rank, 2)


def test_a_residual_around_blocks_is_an_error_even_where_it_broadcasts() -> None:
    class Around(Net):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x

    def on_rank() -> None:
        _, cut, _ = pair(Around, **plan_of(LAYERS, REGIONS))
        with pytest.raises(ModelError, match=r"'blocks.1' was given 2 positions, and a part of the sequence has 1; wh"):
            cut(torch.randn(B, 2, D))

    run_ranks(on_rank, 2)


def test_what_is_partial() -> None:
    net = Net()
    plan = TensorPlan(2, **plan_of(LAYERS, REGIONS))
    net.blocks[1].requires_grad_(False)
    norms = {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "attn.q_norm.weight"}
    others = {"attn.down.weight", "attn.table.weight", "attn.out.bias", "mlp.2.bias"}
    assert set(sequence_partial(net, plan)) == {f"blocks.0.{name}" for name in norms | others}
    assert sequence_partial(net, TensorPlan(2, plan.layers, plan.regions)) == []


def test_masks_differ_between_parts_and_are_drawn_again_by_recompute() -> None:
    def on_rank() -> torch.Tensor:
        outputs = []
        for recompute in (False, True):
            torch.manual_seed(0)
            _, cut, _ = pair(lambda: Net(lambda: Block(0.5), recompute), **plan_of(LAYERS, REGIONS))  # noqa: B023
            masks: list[torch.Tensor] = []
            cut.blocks[0].mlp[3].register_forward_hook(lambda _, __, output: masks.append(output.detach() == 0))  # noqa: B023
            seed_forwards(cut, Draws(1, 0))
            x = torch.ones(B, 32, D, requires_grad=True)
            cut(x).square().sum().backward()
            outputs.append(x.grad)
        assert torch.equal(outputs[0], outputs[1])
        return masks[0]

    first, second = run_ranks(on_rank, 2)
    assert first.shape == (B, 16, D)
    assert 0.35 < (first == second).float().mean() < 0.65  # 256 fair coins


def test_what_does_not_fit_is_said() -> None:
    layers = {"gate": column(12), "up": column(12), "down": row(12)}
    of = plan_of(layers, {"": Region(True, (), tuple(layers))})
    with pytest.raises(ModelError, match=r"of 'blocks.0' holds cut layers \(gate, up, down\), the sizes .*=False"):
        lay_out(Net(Inline), TensorPlan(2, **of), None, rank=0)
    of = plan_of({name: layer for name, layer in LAYERS.items() if "attn" not in name}, {"mlp": Region(False, (0,))})
    whole = {"blocks.0.attn": "tp=2 does not divide 3 heads"}
    with pytest.raises(ModelError, match=r"'blocks.0.attn.q.weight' is left whole \(tp=2 does .* heads\), and might"):
        lay_out(Net(), TensorPlan(2, whole=whole, **of), None, rank=0)
    net = Net()
    lay_out(net, TensorPlan(2, **plan_of(LAYERS, REGIONS)), None, rank=0)
    with pytest.raises(BatchError, match=r"tp=2 does not divide the 7 positions that enter 'blocks.0'; pad .* to 8"):
        net(torch.randn(B, 7, D))
    with pytest.raises(BatchError, match=r"shape \(4, 8\), and sequence_parallel needs \(batch, sequence, ...\)"):
        net(torch.randn(T, D))
    with pytest.raises(ModelError, match=r"'blocks.0' takes another as argument 1, \(2, 5, 8\); type sequence_par"):
        net(torch.randn(B, T, D), torch.randn(B, 5, D))
    with pytest.raises(ModelError, match=r"'blocks.0' was given no activations"):
        net.blocks[0](torch.zeros(B, T, dtype=torch.long))


def test_a_residual_around_gathered_inputs_is_an_error_even_where_it_broadcasts() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    class Outer(nn.Sequential):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x)

    def on_rank() -> None:
        make = lambda: Net(lambda: Outer(Residual(nn.Linear(D, 12), nn.Linear(12, D))))  # noqa: E731
        _, cut, _ = pair(make, **plan_of({"0.0": column(12), "0.1": row(12)}, {"0": Region(False, (0,))}))
        with pytest.raises(ModelError, match=r"'blocks.0' was given a part \(2, 1, 8\) .* gave \(2, 2, 8\)"):
            cut(torch.randn(B, 2, D))

    run_ranks(on_rank, 2)
