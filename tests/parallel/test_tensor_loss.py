"""Losses of logits that are cut along the vocabulary, against whole logits.

Shapes: B samples, T tokens, N = B T, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cutting import B, D, T, V, assert_gradients, counted, told
from ranks import run_ranks
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from nbtrain.errors import ModelError
from nbtrain.parallel.denominators import watched
from nbtrain.parallel.tensor.apply import lay_out
from nbtrain.parallel.tensor.cuts import Cut, Layer, TensorPlan
from nbtrain.parallel.tensor.logits import CutLogits, as_logits, local_part
from nbtrain.parallel.tensor.peers import Peers

# fp32 exps and sums in another order
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
LossFn = Callable[..., torch.Tensor]


def cut_logits(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf with this rank's part, and the logits made of it."""
    peers = Peers(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    leaf = whole.detach().chunk(peers.degree, -1)[peers.rank].clone().requires_grad_()
    return leaf, as_logits(leaf * 1, peers)


def assert_equal(loss_fn: LossFn, whole: torch.Tensor, *targets: Any, **close: float) -> None:
    """Loss and gradient."""
    whole = whole.detach().requires_grad_()
    leaf, logits = cut_logits(whole)
    expected, got = loss_fn(whole, *targets), loss_fn(logits, *targets)
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, expected, **(close or CLOSE))
    weights = torch.linspace(0.5, 1.5, expected.numel()).view(expected.shape).to(expected.dtype)
    for value in (expected, got):
        (value * weights).sum().backward()
    part = whole.grad.chunk(dist.get_world_size(), -1)[dist.get_rank()]
    torch.testing.assert_close(leaf.grad, part, **(close or CLOSE))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    targets = torch.randint(V, (B, T))
    targets[0, 1] = targets[1, 3] = -100
    return torch.randn(B, T, V) * 4, targets


@pytest.mark.parametrize("degree", [2, 4])
def test_every_option_of_cross_entropy(degree: int) -> None:
    def on_rank() -> None:
        logits, targets = batch()
        for reduction, smoothing in itertools.product(("mean", "sum", "none"), (0.0, 0.1)):
            options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
            assert_equal(lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten(), **options), logits, targets)  # noqa: B023
            assert_equal(lambda x, t: F.cross_entropy(x.transpose(1, 2), t, **options), logits, targets)  # noqa: B023
        assert_equal(lambda x, t: F.cross_entropy(x, t, ignore_index=3), logits[0], targets[0].clamp_min(3))
        assert_equal(F.cross_entropy, logits[0, 0], targets[0, 0])
        weight = torch.rand(V)
        for reduction in ("mean", "sum", "none"):
            assert_equal(
                lambda x, t: F.cross_entropy(x, t, weight, reduction=reduction),  # noqa: B023
                logits.flatten(0, 1),
                targets.flatten(),
            )
        assert_equal(lambda x, t: nn.CrossEntropyLoss()(x, t), logits[1], targets[1])
        assert_equal(
            lambda x, t: F.cross_entropy(x, t).reshape(1), logits[0].bfloat16(), targets[0], rtol=2e-2, atol=1e-3
        )

    run_ranks(on_rank, degree)


WAYS: dict[str, LossFn] = {
    "view": lambda x, t: F.cross_entropy(x.view(-1, x.size(-1)), t.view(-1)),
    "shape": lambda x, t: F.cross_entropy(x.view(x.shape[0] * x.shape[1], x.shape[-1]), t.view(-1)),
    "unpacked": lambda x, t: (lambda b, t_, v: F.cross_entropy(x.reshape(b * t_, v), t.reshape(-1)))(*x.shape),
    "size": lambda x, t: F.cross_entropy(x.view((-1, V)), t.view(-1)),
    "flatten": lambda x, t: F.cross_entropy(x.flatten(end_dim=-2), t.flatten()),
    "shifted": lambda x, t: F.cross_entropy(x[:, :-1].reshape(-1, V), t[:, 1:].reshape(-1)),
    "shifted with ...": lambda x, t: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, V), t[..., 1:].flatten()),
    "masked": lambda x, t: F.cross_entropy(x[t != -100], t[t != -100]),
    "float": lambda x, t: F.cross_entropy(x.float().flatten(0, -2), t.flatten()),
    "tempered": lambda x, t: F.cross_entropy((x / 0.7).mul(2).flatten(0, 1), t.flatten()),
    "capped": lambda x, t: F.cross_entropy((30 * torch.tanh(x / 30)).flatten(0, 1), t.flatten()),
    "permuted": lambda x, t: F.cross_entropy(x.permute(0, 2, 1), t),
    "rows": lambda x, t: sum(F.cross_entropy(row, target) for row, target in zip([x[0], x[1]], t, strict=True)) * 1,
    "last": lambda x, t: F.cross_entropy(x[:, -1], t[:, 0]),
    "summed": lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten(), reduction="sum") / (t != -100).sum(),
}


def test_ways_to_write_a_loss_communicate_two_numbers_a_token() -> None:
    def on_rank() -> None:
        logits, targets = batch()
        for way, loss_fn in WAYS.items():
            with told(way), counted() as calls:
                assert_equal(loss_fn, logits, targets)
            assert calls == {"all_reduce": 4 if way == "rows" else 2}, way
        with watched() as seen:
            WAYS["view"](cut_logits(logits)[1], targets)
        assert (seen.num_means, seen.shortfall) == (1, 2)

    run_ranks(on_rank, 2)


GATHERING: dict[str, LossFn] = {
    "log_softmax": lambda x, t: F.nll_loss(F.log_softmax(x, -1).flatten(0, 1), t.flatten()),
    "softmax": lambda x, t: (x.softmax(-1) * torch.arange(V)).sum(),
    "cross_entropy": lambda x, t: F.cross_entropy(x.flatten(0, 1), F.one_hot(t.flatten().clamp_min(0), V).float()),
    "logsumexp": lambda x, t: torch.logsumexp(x, -1).square().mean(),
    "__getitem__": lambda x, t: x[..., : V // 2 + 3].sum(),
    "view": lambda x, t: x.view(B, T, 2, V // 2)[:, :, 1].square().sum(),
    "flatten": lambda x, t: (x.flatten() * torch.arange(B * T * V)).sum(),
    "add": lambda x, t: (x + torch.arange(V)).square().sum(),
    "max": lambda x, t: x.max(-1).values.sum(),
    "cat": lambda x, t: torch.cat([x, x.detach()], 1).sum(),
}


def test_what_needs_whole_logits_is_right_too_and_says_what_it_costs() -> None:
    def on_rank() -> None:
        logits, targets = batch()
        for name, loss_fn in GATHERING.items():
            with pytest.warns(UserWarning, match=f"^{name} needs whole logits.*loss_parallel=False"):
                assert_equal(loss_fn, logits, targets, rtol=1e-5, atol=1e-4)
            assert_equal(loss_fn, logits, targets, rtol=1e-5, atol=1e-4)  # said once
        with pytest.warns(UserWarning, match="argmax needs whole logits"):
            assert torch.equal(cut_logits(logits)[1].argmax(-1), logits.argmax(-1))

    run_ranks(on_rank, 2)


def test_what_is_neither_is_an_error() -> None:
    def on_rank() -> None:
        logits, _ = batch()
        _, cut = cut_logits(logits)
        with pytest.raises(ModelError, match=r"mul_ would change cut logits.*type mul"):
            cut.mul_(2)
        with pytest.raises(ModelError, match="__setitem__ would change"):
            cut[0] = 0
        with pytest.raises(ModelError, match="__set__ would change"):
            cut.data = logits
        with pytest.raises(ModelError, match="out= would change"):
            torch.add(logits, 1, out=cut)
        for wrong in (-1, V):
            with pytest.raises(IndexError, match=f"outside {V} classes"):
                F.cross_entropy(cut[0], torch.full((T,), wrong))

    run_ranks(on_rank, 2)


def test_under_autocast_it_is_fp32() -> None:
    def on_rank() -> None:
        logits, targets = batch()
        with torch.autocast("cpu", torch.bfloat16):
            loss = WAYS["view"](cut_logits(logits.bfloat16())[1], targets)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, WAYS["view"](logits.bfloat16().float(), targets))

    run_ranks(on_rank, 2)


def test_hooks_see_the_gradient_of_the_part() -> None:
    def on_rank() -> None:
        logits, targets = batch()
        leaf, cut = cut_logits(logits)
        seen: list[torch.Tensor] = []
        cut.register_hook(seen.append)
        cut.retain_grad()
        WAYS["view"](cut, targets).backward()
        torch.testing.assert_close([*seen, cut.grad], [leaf.grad, leaf.grad])

    run_ranks(on_rank, 2)


def test_cut_logits_look_whole() -> None:
    part = torch.randn(B, T, V // 2, requires_grad=True) * 1
    logits = as_logits(part, Peers(None, 1, 2))
    assert logits.shape == logits.size() == (B, T, V)
    assert (logits.size(-1), logits.size(dim=0), logits.numel(), len(logits)) == (V, B, B * T * V, B)
    assert (logits.ndim, logits.dim(), logits.dtype, logits.requires_grad) == (3, 3, torch.float32, True)
    assert (logits.device, logits.is_leaf, logits.is_floating_point()) == (part.device, False, True)
    assert repr(logits) == f"CutLogits(shape=({B}, {T}, {V}), dtype=torch.float32, cut over 2 ranks)"
    assert f"{logits}" == str(logits) == repr(logits)
    assert {logits: 1}[logits] == 1
    assert type(local_part(logits)) is torch.Tensor
    assert local_part(logits).data_ptr() == part.data_ptr()
    assert local_part(part) is part


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(ids).tanh())


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=V, n_positions=T, n_embd=D, n_layer=1, n_head=2, pad_token_id=0)
    ).eval()


def bert() -> nn.Module:
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": 16, "max_position_embeddings": T}
    config = BertConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    return BertForMaskedLM(config).eval()


HEADS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "tied": (Tied, "emb", "head"),
    "gpt2": (gpt2, "transformer.wte", "lm_head"),
    "bert": (bert, "bert.embeddings.word_embeddings", "cls.predictions.decoder"),
}


def test_models_with_their_own_loss() -> None:
    def on_rank(name: str) -> None:
        make, embedding, head = HEADS[name]
        torch.manual_seed(0)
        whole = make()
        torch.manual_seed(0)
        cut = make()
        cuts = {own: Cut(0, (V,)) for own, _ in whole.get_submodule(head).named_parameters()}
        layers = {
            embedding: Layer("vocab", {"weight": Cut(0, (V,))}),
            head: Layer("colwise_gather_output", cuts),
        }
        plan = TensorPlan(2, layers)
        lay_out(cut, plan, dist.group.WORLD, rank=dist.get_rank(), loss_parallel=True)
        ids, targets = torch.randint(V, (B, T)), batch()[1]
        for model in (whole, cut):
            if name == "tied":
                F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
            else:
                output = model(input_ids=ids, labels=targets)
                assert isinstance(output.logits, CutLogits) == (model is cut)
                output.loss.backward()
        assert_gradients(whole, cut, plan)

    run_ranks(lambda: [on_rank(name) for name in HEADS], 2)


def test_peak_memory_is_of_a_part() -> None:
    """No tensor of the whole vocabulary is made, forward or backward."""

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        greatest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, tuple | list) else (out,):
                if isinstance(each, torch.Tensor):
                    Sizes.greatest = max(Sizes.greatest, each.numel())
            return out

    def on_rank() -> None:
        logits, targets = batch()
        leaf, cut = cut_logits(logits)
        with Sizes():
            WAYS["view"](cut, targets).backward()
        assert Sizes.greatest == leaf.numel() == B * T * V // 2

    run_ranks(on_rank, 2)
