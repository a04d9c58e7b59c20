"""What plain torch gets wrong without a word under tensor parallelism, and what a Trainer makes of it.

Each test shows both: were torch to mend one, its first half would fail. FACTS numbers them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from models import D, T, V
from parity import rank
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import nbtrain as nt
from nbtrain.errors import BatchError, ModelError, UsageError

Loss = Callable[[nn.Module], torch.Tensor]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def batch(step: int) -> tuple[torch.Tensor, ...]:
    return models.CASES["gpt"].batch(torch.Generator().manual_seed(step), 4)


def plain(model: nn.Module, steps: int = 3) -> list[float]:
    """Losses of a plain loop, on every tensor-parallel peer alike."""
    optimizer, losses = sgd(model.parameters()), []
    for step in range(steps):
        ids, targets = batch(step)
        optimizer.zero_grad()
        loss = models.token_mean(model(ids), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(make: Callable[[], nn.Module], plan: nt.Plan, steps: int = 3, **options: Any) -> list[float]:
    trainer = nt.Trainer(made(make), plan, optimizer=sgd, loss_fn=models.token_mean, **options)
    return [trainer.step(*batch(step)).item() for step in range(steps)]


def cut_by_torch(model: nn.Module, styles: dict[str, Any]) -> nn.Module:
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), styles)


def test_2_tied_weights_come_apart() -> None:
    """The two are sharded each by itself, and trained each by itself."""

    def on_rank() -> None:
        one = plain(made(models.Tied))
        styles = {
            "emb": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        torchs = cut_by_torch(made(models.Tied), styles)
        assert torchs.head.weight is not torchs.emb.weight
        assert max(abs(a - b) for a, b in zip(one, plain(torchs), strict=True)) > 1e-3
        assert trained(models.Tied, nt.Plan(tp=2)) == pytest.approx(one, rel=1e-5)

    run_ranks(on_rank, 2)


class Fused(nn.Module):
    """Attention whose one layer gives queries, keys and values; sizes are open, as torch's styles need it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        B, T = ids.shape
        q, k, v = (part.view(B, T, -1, 4).transpose(1, 2) for part in self.qkv(self.tokens(ids)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1)
        return self.head(self.out(y))


def test_3_a_fused_layer_is_cut_across_its_thirds() -> None:
    def on_rank() -> None:
        one = plain(made(Fused), steps=1)
        styles = {"qkv": ColwiseParallel(), "out": RowwiseParallel()}
        assert abs(plain(cut_by_torch(made(Fused), styles), steps=1)[0] - one[0]) > 1e-4
        assert trained(Fused, nt.Plan(tp=2), steps=1) == pytest.approx(one, rel=1e-6)
        # the same for styles that a person states
        stated = nt.Plan(tp=2, tp_plan={"qkv": "colwise", "out": "rowwise"})
        assert trained(Fused, stated, steps=1) == pytest.approx(one, rel=1e-6)

    run_ranks(on_rank, 2)


def test_12_the_norm_of_a_part_is_not_the_norm() -> None:
    """Over local parts; and over a mixture of DTensors and tensors torch raises, which is no answer either."""

    def on_rank() -> None:
        one = made(zoo.SplitGPT)
        ids, targets = batch(0)
        models.token_mean(one(ids), targets).backward()
        norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1).item()

        styles = {"blocks.*.mlp.up": ColwiseParallel(), "blocks.*.mlp.gate": ColwiseParallel()}
        torchs = cut_by_torch(made(zoo.SplitGPT), {**styles, "blocks.*.mlp.down": RowwiseParallel()})
        models.token_mean(torchs(ids), targets).backward()
        parts = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in torchs.parameters()]
        assert abs(torch.nn.utils.get_total_norm(parts).item() - norm) > 1e-3
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            torch.nn.utils.clip_grad_norm_(torchs.parameters(), 0.1)

        options = {"optimizer": sgd, "loss_fn": models.token_mean, "grad_clip": 0.1}
        trainer = nt.Trainer(made(zoo.SplitGPT), nt.Plan(tp=2), **options)
        trainer.step(ids, targets)
        assert trainer.grad_norm == pytest.approx(norm, rel=1e-5)
        # and in a loop of one's own
        own = nt.parallelize(made(zoo.SplitGPT), nt.Plan(tp=2))
        models.token_mean(own(ids), targets).backward()
        assert torch.nn.utils.clip_grad_norm_(own.parameters(), 0.1).item() == pytest.approx(norm, rel=1e-5)

    run_ranks(on_rank, 2)


class Dropping(nn.Module):
    """Dropout where activations are cut, and where they are whole. It keeps which elements survived."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.up(x).square() + 1, 0.5, self.training)
        y = F.dropout(self.down(hidden).square() + 1, 0.5, self.training)
        self.inside, self.outside = (hidden != 0).flatten(), (y != 0).flatten()
        return y


def test_13_dropout_masks_are_equal_where_they_must_differ_and_differ_where_they_must_be_equal() -> None:
    def agree(mask: torch.Tensor) -> bool:
        theirs = [torch.empty_like(mask) for _ in range(2)]
        dist.all_gather(theirs, mask)
        return torch.equal(*theirs)

    def on_rank() -> None:
        x = torch.randn(2, T, D, generator=torch.Generator().manual_seed(0))
        torchs = cut_by_torch(made(Dropping), {"up": ColwiseParallel(), "down": RowwiseParallel()})
        torch.manual_seed(rank())
        torchs(x)
        assert not agree(torchs.outside)  # peers go on with different numbers
        torch.manual_seed(0)
        torchs(x)
        assert agree(torchs.inside)  # two halves of a layer drop the same
        ours = nt.parallelize(made(Dropping), nt.Plan(tp=2), probe=x)
        torch.manual_seed(rank())
        for _ in range(3):
            ours(x)
            assert agree(ours.outside)
            assert not agree(ours.inside)

    run_ranks(on_rank, 2)


def test_15_peers_that_are_fed_different_data() -> None:
    def on_rank() -> None:
        styles = {"blocks.*.mlp.up": ColwiseParallel(), "blocks.*.mlp.gate": ColwiseParallel()}
        torchs = cut_by_torch(made(zoo.SplitGPT), {**styles, "blocks.*.mlp.down": RowwiseParallel()})
        ids, targets = batch(rank())
        models.token_mean(torchs(ids), targets).backward()  # trains on halves of two batches
        options = {"optimizer": sgd, "loss_fn": models.token_mean}
        trainer = nt.Trainer(made(zoo.SplitGPT), nt.Plan(tp=2), **options)
        before = trainer.state_dict()
        with pytest.raises(BatchError, match="ranks 0, 1 compute one batch together, and some got another batch"):
            trainer.step(ids, targets)
        with pytest.raises(BatchError, match="a batch of another shape"):
            trainer.step(*(tensor[: 2 + rank()] for tensor in batch(0)))
        torch.testing.assert_close(trainer.state_dict(), before, rtol=0, atol=0)
        with pytest.raises(UsageError, match=r"tensor-parallel ranks 0, 1 .* do not all do the same with it"):
            _ = trainer.step(*batch(0)) if rank() else trainer.evaluate([batch(0)])
        trainer.step(*batch(0))  # nothing is stuck

    run_ranks(on_rank, 2)


def test_16_a_pattern_that_matches_nothing() -> None:
    def on_rank() -> None:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            cut_by_torch(made(zoo.SplitGPT), {"blocks.*.mlp.upp": ColwiseParallel()})
        assert seen  # and that is all: nothing is cut
        plan = nt.Plan(tp=2, tp_plan={"blocks.*.mlp.upp": "colwise", "blocks.*.mlp.down": "rowwise"})
        with pytest.raises((ModelError, ValueError), match=r"blocks\.\*\.mlp\.upp"):
            nt.parallelize(made(zoo.SplitGPT), plan)

    run_ranks(on_rank, 2)


def test_a_copy_of_a_cut_model_is_refused() -> None:
    """Its layers are parts already, and would be cut again."""

    def on_rank() -> None:
        import copy

        cut = nt.parallelize(made(zoo.SplitGPT), nt.Plan(tp=2))
        with pytest.raises(ModelError, match="is a copy of a model that was cut"):
            nt.parallelize(copy.deepcopy(cut), nt.Plan(tp=2))

    run_ranks(on_rank, 2)


def test_with_replicas_of_shards() -> None:
    """HSDP and tensor parallelism: three axes on eight ranks."""

    def on_rank() -> None:
        plan = nt.Plan(tp=2, dp_replicate=2, zero=3)
        trainer = nt.Trainer(made(zoo.SplitGPT), plan, optimizer=sgd, loss_fn=models.token_mean, grad_clip=0.5)
        one = made(zoo.SplitGPT)
        optimizer = sgd(one.parameters())
        for step in range(2):
            ids, targets = batch(step)
            part = rank() // 2
            loss = trainer.step(ids[part : part + 1], targets[part : part + 1])
            optimizer.zero_grad()
            expected = models.token_mean(one(ids), targets)
            expected.backward()
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            optimizer.step()
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(trainer.state_dict(), one.state_dict(), rtol=1e-4, atol=1e-6)

    run_ranks(on_rank, 8)
