"""Recomputation: the gradients of a run that keeps everything, bit for bit, in less memory."""

import collections
import copy
import gc
import pickle
import weakref
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from parity import FP32, Run, check, rank, whole
from ranks import run_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nbtrain as nt
from nbtrain.errors import ModelError
from nbtrain.parallel.blocks import repeated_blocks

KINDS = ["full", "selective", 1, 2]
PLANS = [("zero=0", 1), ("zero=0", 2), ("zero=2", 2), ("zero=3", 2)]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


class Block(models.Block):
    """With dropout, of which the last is given by name."""

    def forward(self, x_BTD: torch.Tensor, *, residual: torch.Tensor) -> torch.Tensor:
        x_BTD = F.dropout(super().forward(x_BTD), 0.3, self.training)
        return x_BTD + F.dropout(F.gelu(residual), 0.3, self.training)


class GPT(models.GPT):
    def __init__(self, depth: int = 3, width: int = models.D, block: type[nn.Module] = Block) -> None:
        super().__init__(depth=depth, width=width)
        self.blocks = nn.ModuleList(block(width, 4) for _ in range(depth))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x_BTD = residual = F.dropout(self.tokens(ids), 0.1, self.training)
        for block in self.blocks:
            x_BTD = block(x_BTD, residual=residual)
        return self.head(self.norm(x_BTD))


def trained(make: Any, batch: Any, loss_fn: Any, spec: str, kind: str | int, **options: Any) -> dict[str, torch.Tensor]:
    """Losses, gradients, weights and buffers of three steps with one seed."""
    torch.manual_seed(5)
    plan = nt.Plan.parse(f"{spec},recompute={kind}")
    trainer = nt.Trainer(make(), plan, optimizer=sgd, loss_fn=loss_fn, **options)
    torch.manual_seed(rank())
    losses = [trainer.step(*batch) for _ in range(3)]
    gradients = {f"gradient of {name}": whole(p.grad) for name, p in trainer.model.named_parameters()}
    return {"losses": torch.stack(losses), **gradients, **trainer.state_dict()}


@pytest.mark.parametrize(("spec", "ranks"), [*PLANS, ("zero=3,precision=bf16", 2), ("precision=fp16", 1)])
def test_11_dropout_falls_as_without_recomputation(spec: str, ranks: int) -> None:
    def on_rank() -> None:
        ids = torch.randint(models.V, (4, models.T), generator=torch.Generator().manual_seed(rank()))
        expected = trained(GPT, (ids, ids), models.token_mean, spec, "none", accumulate=2)
        for kind in KINDS if ranks == 1 else ("full", "selective"):
            got = trained(GPT, (ids, ids), models.token_mean, spec, kind, accumulate=2)
            torch.testing.assert_close(got, expected, rtol=0, atol=0)

    run_ranks(on_rank, ranks)


@pytest.mark.parametrize(("spec", "ranks"), [("zero=0", 1), ("zero=0", 2), ("zero=3", 2)])
def test_batch_statistics_are_counted_once(spec: str, ranks: int) -> None:
    def on_rank() -> None:
        images, classes = torch.randn(4, 3, 8, 8), torch.randint(5, (4,))
        expected = trained(models.ConvNet, (images, classes), F.cross_entropy, spec, "none")
        assert expected["blocks.1.norm.num_batches_tracked"] == 3
        for kind in ("full", "selective"):
            got = trained(models.ConvNet, (images, classes), F.cross_entropy, spec, kind)
            torch.testing.assert_close(got, expected, rtol=0, atol=0)

    run_ranks(on_rank, ranks)


class Remembering(nn.Module):
    """A layer whose output depends on buffers that it changes: in place, and by a new tensor."""

    mean: torch.Tensor
    calls: torch.Tensor

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.layer, self.late, self.num_calls = nn.Linear(8, 8), late, 0
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = torch.tanh(self.layer(x - self.mean)) * (1 + self.calls)
        self.num_calls += 1
        if not self.late or self.num_calls > 1:
            self.mean.lerp_(x.detach().mean(0), 0.5)
            self.calls = self.calls + 1
        return output


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_block_runs_again_from_the_buffers_that_it_had(kind: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(Remembering(), Remembering())

    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 8)
    expected = trained(make, batch, F.mse_loss, "zero=0", "none", accumulate=2)
    got = trained(make, batch, F.mse_loss, "zero=0", kind, accumulate=2)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert got["0.calls"] == 6


class Numbered(nn.Module):
    """A layer whose output depends on attributes that it changes, of which one is there from the first forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.num_calls, self.is_odd = nn.Linear(8, 8), 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = getattr(self, "scale", 2.0) * 0.5
        self.num_calls += 1
        self.is_odd = not self.is_odd
        return torch.tanh(self.layer(x)) * self.num_calls * self.scale + self.is_odd * x


@pytest.mark.parametrize(("spec", "ranks"), [("zero=0", 1), ("zero=3", 2)])
def test_a_block_runs_again_from_the_counters_that_it_had(spec: str, ranks: int) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Sequential(Numbered()), nn.Sequential(Numbered()))

    def on_rank() -> None:
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 8)
        expected = trained(make, batch, F.mse_loss, spec, "none", accumulate=2)
        got = trained(make, batch, F.mse_loss, spec, "full", accumulate=2)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)

    run_ranks(on_rank, ranks)


def test_a_buffer_that_begins_to_change_is_an_error_once() -> None:
    net = nn.Sequential(Remembering(late=True), nn.Identity())
    trainer = nt.Trainer(
        nn.Sequential(nn.Sequential(net), nn.Sequential(nn.Linear(8, 8))),
        nt.Plan(recompute="full"),
        optimizer=sgd,
        loss_fn=F.mse_loss,
    )
    batch = torch.randn(4, 8), torch.zeros(4, 8)
    trainer.step(*batch)
    with pytest.raises(ModelError, match="changed its buffer 'mean' for the first time in a later step"):
        trainer.step(*batch)
    trainer.step(*batch)
    assert trainer.num_steps == 2


class Living(TorchDispatchMode):
    """Knows the memory of everything that was computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        return output

    def num_bytes(self) -> int:
        gc.collect()
        return sum(storage.nbytes() for ref in self._storages.values() if (storage := ref()) is not None)


def test_memory_from_forward_to_backward_falls() -> None:
    def kept_bytes(kind: str | int) -> int:
        net = nt.parallelize(GPT(depth=8, block=Block), nt.Plan(recompute=kind))
        ids = torch.randint(models.V, (8, models.T))
        with Living() as living:
            loss = models.token_mean(net(ids), ids)
            kept = living.num_bytes()
        loss.backward()
        return kept

    full, half, selective, none = (kept_bytes(kind) for kind in ("full", 2, "selective", "none"))
    assert full < 0.25 * none
    assert full < selective < 0.8 * none
    assert 0.4 * none < half < 0.7 * none


class Counting(TorchDispatchMode):
    """How often each operation ran."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def test_selective_repeats_neither_matrix_products_nor_attention() -> None:
    def counts(kind: str) -> collections.Counter[str]:
        net = nt.parallelize(GPT(depth=2), nt.Plan(recompute=kind))
        ids = torch.randint(models.V, (2, models.T))
        with Counting() as counting:
            models.token_mean(net(ids), ids).backward()
        return counting.counts

    none, selective, full = counts("none"), counts("selective"), counts("full")
    for name in ("addmm", "_scaled_dot_product_flash_attention_for_cpu"):
        assert 0 < none[name] == selective[name] < full[name]
    for name in ("gelu", "native_layer_norm"):
        assert 0 < none[name] < selective[name] == full[name]


def test_every_nth_block_runs_twice() -> None:
    net = nt.parallelize(GPT(depth=5), nt.Plan(recompute=2))
    counts = [0] * 5
    for index, block in enumerate(net.blocks):
        block.norm1.register_forward_hook(lambda *_, index=index: counts.__setitem__(index, counts[index] + 1))
    ids = torch.zeros(1, 4, dtype=torch.long)
    models.token_mean(net(ids), ids).backward()
    assert counts == [2, 1, 2, 1, 2]
    with torch.no_grad():
        net(ids)
    assert counts == [3, 2, 3, 2, 3]


def test_the_model_looks_as_before_and_copies_are_plain() -> None:
    net = models.GPT()
    names = list(net.state_dict())
    assert nt.parallelize(net, nt.Plan(recompute=2, precision="bf16", offload="activations")) is net
    assert list(net.state_dict()) == names
    assert all(isinstance(block, models.Block) for block in net.blocks)
    assert {type(block).__name__ for block in net.blocks} == {"Block"}
    assert list(repeated_blocks(net)) == ["blocks.0", "blocks.1", "blocks.2"]
    twin = copy.deepcopy(net)
    assert type(twin) is models.GPT
    for blocks in (twin.blocks, pickle.loads(pickle.dumps(net.blocks))):
        assert {type(block) for block in blocks} == {models.Block}
        torch.testing.assert_close(dict(blocks.state_dict()), dict(net.blocks.state_dict()))
    nt.parallelize(twin, nt.Plan())


def test_models_without_repeated_blocks_are_refused() -> None:
    with pytest.raises(ModelError, match=r"MLP has no repeated blocks to recompute.*type recompute=none"):
        nt.parallelize(models.MLP(), nt.Plan(recompute="full"))


def test_a_forward_on_the_instance_is_refused() -> None:
    net = models.GPT()
    net.blocks[1].forward = net.blocks[1].forward
    with pytest.raises(ModelError, match="the forward of Block was set on the instance"):
        nt.parallelize(net, nt.Plan(recompute="full"))


def test_a_change_in_place_of_what_is_kept_is_refused_with_its_cure() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).relu_()

    def trainer(kind: str) -> nt.Trainer:
        net = nn.Sequential(InPlace(), InPlace())
        return nt.Trainer(net, nt.Plan(recompute=kind), optimizer=sgd, loss_fn=F.mse_loss)

    batch = torch.randn(4, 8), torch.zeros(4, 8)
    with pytest.raises(ModelError, match="type recompute=full"):
        trainer("selective").step(*batch)
    trainer("full").step(*batch)


@pytest.mark.parametrize(("spec", "ranks"), [("zero=0", 2), ("zero=3", 2)])
def test_equals_one_device(spec: str, ranks: int) -> None:
    def on_rank() -> None:
        for model, kind in (("gpt", "full"), ("llama", "full"), ("gpt2", "selective"), ("conv", "selective")):
            check(model, f"{spec},recompute={kind}", Run(steps=2, accumulate=2, grad_clip=0.5), FP32)

    run_ranks(on_rank, ranks)
