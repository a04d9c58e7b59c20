"""Code around a tensor-parallel model that would see a rank's part as if it were the whole: made right, or an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
import zoo
from models import D
from parity import rank
from ranks import run_ranks
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import nbtrain as nt
from nbtrain.errors import ModelError, OptimizerError, PlanError
from nbtrain.parallel.mesh import data_coordinate
from nbtrain.parallel.state import full_state_dict

EARLY = clip_grad_norm_  # bound before any model was laid out, as in a notebook's first cell


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


class Normed(nn.Module):
    """A norm of each head's queries: whole, and with a part of its gradient on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(models.V, D), nn.LayerNorm(4)
        self.qkv, self.out, self.head = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, models.V)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(self.norm(q), k, v, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[Any]) -> None:
    for ids, targets in parts:
        models.token_mean(model(ids), targets).backward()
        EARLY(model.parameters(), 0.3)  # after each microbatch, too
    with torch.no_grad():
        model(parts[0][0])
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    optimizer.step()


def closed(model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[Any]) -> None:
    def closure() -> torch.Tensor:
        loss = models.token_mean(model(parts[0][0]), parts[0][1])
        loss.backward()
        return loss

    optimizer.step(closure)


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[Any]) -> None:
    models.token_mean(model(parts[0][0]), parts[0][1]).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad


@pytest.mark.parametrize("loop", [clipped, closed, by_hand])
@pytest.mark.parametrize("spec", ["tp=2", "zero=0,tp=2", "zero=1,tp=2", "zero=3,tp=2"])
def test_a_loop_of_ones_own(spec: str, loop: Callable[..., None]) -> None:
    if loop is by_hand and spec.startswith("zero=3"):
        pytest.skip("shards are DTensors, which a loop by hand cannot subtract from")

    def on_rank() -> None:
        plan = nt.Plan.parse(spec).resolve(torch.distributed.get_world_size())
        one, own = made(Normed), nt.parallelize(made(Normed), plan)
        part = data_coordinate(plan, rank())
        first, second = sgd(one.parameters()), sgd(own.parameters())
        for step in range(2):
            batches = [models.CASES["gpt"].batch(torch.Generator().manual_seed(10 * step + i), 4) for i in range(2)]
            mine = [tuple(tensor.chunk(plan.dp)[part] for tensor in batch) for batch in batches]
            for model, optimizer, parts in ((one, first, batches), (own, second, mine)):
                optimizer.zero_grad()
                loop(model, optimizer, parts)
        layout = next(iter(vars(own)["_nbtrain_layout"] for _ in range(1)))
        torch.testing.assert_close(full_state_dict(own, layout), one.state_dict(), rtol=1e-4, atol=1e-6)

    run_ranks(on_rank, 2 if spec == "tp=2" else 4)


def test_a_scaler_of_ones_own_skips_on_all_peers_or_none() -> None:
    def on_rank() -> float:
        own = nt.parallelize(made(zoo.SplitGPT), nt.Plan(tp=2))
        optimizer, scaler = sgd(own.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)
        ids, targets = models.CASES["gpt"].batch(torch.Generator().manual_seed(0), 4)
        scaler.scale(models.token_mean(own(ids), targets)).backward()
        if rank() == 0:
            own.blocks[0].mlp.up.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    assert run_ranks(on_rank, 2) == [4.0, 4.0]


def test_optimizers_that_look_at_whole_parameters_are_refused() -> None:
    class Own(torch.optim.SGD):
        pass

    class Elementwise(torch.optim.SGD):
        elementwise = True

    def on_rank() -> None:
        ids, targets = models.CASES["gpt"].batch(torch.Generator().manual_seed(0), 4)
        for kind in (torch.optim.Adafactor, Own):
            options = {"optimizer": lambda params, kind=kind: kind(params, lr=0.1), "loss_fn": models.token_mean}
            with pytest.raises(OptimizerError, match="must treat each element by itself"):
                nt.Trainer(made(zoo.SplitGPT), nt.Plan(tp=2), **options)
            own = nt.parallelize(made(zoo.SplitGPT), nt.Plan(tp=2))
            models.token_mean(own(ids), targets).backward()
            with pytest.raises(OptimizerError, match="must treat each element by itself"):
                kind(own.parameters(), lr=0.1).step()
        options = {"optimizer": lambda params: Elementwise(params, lr=0.1), "loss_fn": models.token_mean}
        nt.Trainer(made(zoo.SplitGPT), nt.Plan(tp=2), **options).step(ids, targets)

    run_ranks(on_rank, 2)


def test_a_loss_that_reads_parts_is_refused() -> None:
    def on_rank() -> None:
        model = made(zoo.SplitGPT)
        ids, targets = models.CASES["gpt"].batch(torch.Generator().manual_seed(0), 4)

        def decayed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            weights = trainer.model.parameters()
            return models.token_mean(logits, targets) + 0.1 * sum(weight.square().sum() for weight in weights)

        trainer = nt.Trainer(model, nt.Plan(tp=2), optimizer=sgd, loss_fn=decayed)
        with pytest.raises(ModelError, match=r"loss_fn reads the parameter 'tokens\.weight'.*weight_decay"):
            trainer.step(ids, targets)

        model = made(zoo.SplitGPT)
        kept: list[torch.Tensor] = []
        model.blocks[0].mlp.gate.register_forward_hook(lambda module, args, output: kept.append(output))

        def peeking(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return models.token_mean(logits, targets) + kept[-1].square().mean()

        trainer = nt.Trainer(model, nt.Plan(tp=2), optimizer=sgd, loss_fn=peeking)
        with pytest.raises(ModelError, match="loss_fn reads an activation"):
            trainer.step(ids, targets)

    run_ranks(on_rank, 2)


class Shifting(zoo.SplitGPT):
    """Code between blocks mixes positions."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
            x = x - x.mean(1, keepdim=True)
        return self.head(self.norm(x))


class TrainingOnly(nn.Module):
    """Normalises what tensor parallelism would cut, but not in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        if self.training:
            h = h / h.norm(dim=-1, keepdim=True)
        return self.down(h)


def test_what_the_probe_alone_would_not_show() -> None:
    def on_rank() -> None:
        with pytest.raises(ModelError, match="the model would not compute what one device does"):
            nt.parallelize(made(Shifting), nt.Plan(tp=2, sequence_parallel=True))
        with pytest.raises(ModelError, match="nothing in TrainingOnly can be cut"):
            nt.parallelize(made(TrainingOnly), nt.Plan(tp=2))
        nt.parallelize(made(Shifting), nt.Plan(tp=2))

    run_ranks(on_rank, 2)


def test_hooks_on_gradients_and_compilers_are_refused() -> None:
    def on_rank() -> None:
        model = made(zoo.SplitGPT)
        model.blocks[0].mlp.up.register_full_backward_hook(lambda *args: None)
        with pytest.raises(ModelError, match=r"'blocks\.0\.mlp\.up' has a hook on gradients"):
            nt.parallelize(model, nt.Plan(tp=2))
        with pytest.raises(PlanError, match="torch cannot compile layers that are cut"):
            nt.parallelize(made(zoo.SplitGPT), nt.Plan(tp=2), compile="eager")

    run_ranks(on_rank, 2)


@pytest.mark.parametrize(
    ("model", "least"),
    [
        *((name, 0.9) for name in ("MLP", "GPT tied, fused QKV", "GPT untied, separate QKV", "GQA", "encoder-decoder")),
        *((name, 0.9) for name in ("LoRA, frozen base", "HF Llama", "HF GPT-2")),
        *((name, 0.7) for name in ("ViT", "HF BERT", "HF T5")),
    ],
)
def test_most_of_a_model_is_cut(model: str, least: float) -> None:
    """What stays whole is right too, so that only this tells that attention and MLPs were understood."""

    def on_rank() -> tuple[int, int]:
        whole = made(zoo.CASES[model].make)
        size = sum(parameter.numel() for parameter in whole.parameters())
        cut = nt.parallelize(copy.deepcopy(whole), nt.Plan(tp=2))
        return size, sum(parameter.numel() for parameter in cut.parameters())

    (size, part), _ = run_ranks(on_rank, 2)
    assert 2 * (size - part) >= least * size


def test_the_norm_is_found_under_all_its_names() -> None:
    def on_rank() -> None:
        one, own = made(zoo.SplitGPT), nt.parallelize(made(zoo.SplitGPT), nt.Plan(tp=2))
        ids, targets = models.CASES["gpt"].batch(torch.Generator().manual_seed(0), 4)
        for model in (one, own):
            models.token_mean(model(ids), targets).backward()
        norm = get_total_norm([parameter.grad for parameter in one.parameters()]).item()
        gradients = [parameter.grad for parameter in own.parameters()]
        assert torch.nn.utils.get_total_norm(gradients).item() == pytest.approx(norm, rel=1e-5)
        assert EARLY(own.parameters(), 0.1).item() == pytest.approx(norm, rel=1e-5)

    run_ranks(on_rank, 2)


def test_logits_that_stay_cut_under_fsdp_are_never_whole() -> None:
    """Outputs of blocks are looked at whether they are views: a warning would tell that this gathered them."""

    def on_rank() -> None:
        plan = nt.Plan(tp=2, zero=3, loss_parallel=True)
        trainer = nt.Trainer(made(zoo.SplitGPT), plan, optimizer=sgd, loss_fn=models.token_mean)
        trainer.step(*models.CASES["gpt"].batch(torch.Generator().manual_seed(0), 2))

    run_ranks(on_rank, 4)
