"""``nn.MultiheadAttention`` and torch's transformer layers, cut by heads, against whole ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cutting import CLOSE, B, D, T, assert_gradients, column, counted, pair, row
from ranks import run_ranks
from torch import nn

from nbtrain.errors import ModelError
from nbtrain.parallel.tensor.apply import lay_out
from nbtrain.parallel.tensor.cuts import Layer, TensorPlan

S, H = 5, 4
ATTENTION = Layer("attention")


def attend(model: nn.Module, inputs: list[torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor | None]:
    """Output, weights, and the gradients of the inputs."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    q, k, v = inputs * 3 if len(inputs) == 1 else (*inputs, inputs[-1]) if len(inputs) == 2 else inputs
    output, weights = model(q, k, v, **options)
    ((output * output.detach().sin()).sum() + (0 if weights is None else (weights * weights).sum())).backward()
    return [output, weights, *(x.grad for x in inputs)]


def masks(heads: bool, floating: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand((B * H if heads else 1, T, S), generator=generator) < 0.3
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[0, 3:] = True
    mask[..., 0] = False
    mask = mask if heads else mask[0]
    if floating:
        return {"attn_mask": mask * -3.0, "key_padding_mask": torch.zeros(B, S).masked_fill(padding, -9.0)}
    return {"attn_mask": mask, "key_padding_mask": padding}


CAUSAL = {"attn_mask": nn.Transformer.generate_square_subsequent_mask(T), "is_causal": True}
CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    # options of the module, number of distinct inputs, options of the call
    "self": ({}, 1, {}),
    "self without weights": ({"bias": False}, 1, {"need_weights": False}),
    "causal": ({}, 1, {"need_weights": False, **CAUSAL}),
    "causal with weights": ({}, 1, CAUSAL),
    "cross": ({}, 2, masks(heads=False, floating=False)),
    "cross of three": ({}, 3, {**masks(heads=True, floating=True), "need_weights": False}),
    "weights of heads": ({}, 2, {"average_attn_weights": False, **masks(heads=True, floating=False)}),
    "widths": ({"kdim": 6, "vdim": 10}, 3, masks(heads=False, floating=True)),
}


@pytest.mark.parametrize("degree", [2, 4])
def test_attention(degree: int) -> None:
    def on_rank(batch_first: bool) -> None:
        for name, (options, num, call) in CASES.items():
            make = lambda: nn.MultiheadAttention(D, H, batch_first=batch_first, **options)  # noqa: B023, E731
            whole, cut, plan = pair(make, {"": ATTENTION})
            widths = (D, options.get("kdim", D), options.get("vdim", D))
            lengths = (T, S, S) if num > 1 else (T,)
            inputs = [torch.randn(B, length, width) for length, width in zip(lengths[:num], widths, strict=False)]
            if num == 2:
                inputs = [inputs[0], inputs[1]]
            inputs = inputs if batch_first else [x.transpose(0, 1) for x in inputs]
            for model in (whole, cut):
                model.train(name != "cross")  # eval without masks would take another path of torch's
            expected, got = (attend(model, inputs, call) for model in (whole, cut))
            torch.testing.assert_close(got, expected, msg=lambda text: f"{name}: {text}", **CLOSE)  # noqa: B023
            assert_gradients(whole, cut, plan)

    run_ranks(lambda: [on_rank(batch_first) for batch_first in (True, False)], degree)


def test_without_a_batch_and_in_eval() -> None:
    def on_rank() -> None:
        whole, cut, _ = pair(lambda: nn.MultiheadAttention(D, H, batch_first=True), {"": ATTENTION})
        torch.testing.assert_close(*(attend(m, [torch.randn(T, D).fill_(0.1)], {}) for m in (cut, whole)), **CLOSE)
        whole.eval()
        cut.eval()
        x = torch.randn(B, T, D)
        with torch.no_grad():
            torch.testing.assert_close(cut(x, x, x), whole(x, x, x), **CLOSE)
        with counted() as calls:
            attend(cut, [x], {"need_weights": False})
        assert calls == {"all_reduce": 2}
        with pytest.raises(RuntimeError, match="give attn_mask too"):
            cut(x, x, x, is_causal=True)

    run_ranks(on_rank, 2)


def encoder_layers(prefix: str, attention: bool = True) -> dict[str, Layer]:
    cut = {f"{prefix}linear1": column(16), f"{prefix}linear2": row(16)}
    return cut | ({f"{prefix}self_attn": ATTENTION} if attention else {})


def make_encoder(norm_first: bool) -> nn.Module:
    # nested tensors need norm_first=False; torch warns when it cannot use them
    layer = nn.TransformerEncoderLayer(D, H, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)


def test_torchs_encoder() -> None:
    def on_rank(norm_first: bool, attention: bool) -> None:
        layers = encoder_layers("layers.0.", attention) | encoder_layers("layers.1.", attention)
        whole, cut, plan = pair(lambda: make_encoder(norm_first), layers)
        x = torch.randn(B, T, D)
        padding = torch.zeros(B, T, dtype=torch.bool)
        padding[1, 2:] = True
        for options in ({}, {"mask": CAUSAL["attn_mask"], "is_causal": True}, {"src_key_padding_mask": padding}):
            inputs = [x.clone().requires_grad_() for _ in range(2)]
            expected, got = (model(each, **options) for model, each in zip((whole, cut), inputs, strict=True))
            torch.testing.assert_close(got, expected, **CLOSE)
            for output in (expected, got):
                (output * output.detach().cos()).sum().backward()
            torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **CLOSE)
            assert_gradients(whole, cut, plan)
        whole.eval()
        cut.eval()
        with torch.no_grad():
            torch.testing.assert_close(cut(x), whole(x), **CLOSE)
            got = cut(x, src_key_padding_mask=padding)
            # torch's fast path gives zeros behind a sequence's end, and warns of nested tensors
            torch.backends.mha.set_fastpath_enabled(False)
            torch.testing.assert_close(got, whole(x, src_key_padding_mask=padding), **CLOSE)
            torch.backends.mha.set_fastpath_enabled(True)

    cases = itertools.product((True, False), (True, False))
    run_ranks(lambda: [on_rank(*case) for case in cases], 2)


def test_torchs_decoder() -> None:
    def on_rank() -> None:
        layers = encoder_layers("") | {"multihead_attn": ATTENTION}
        whole, cut, plan = pair(lambda: nn.TransformerDecoderLayer(D, H, 16, dropout=0.0, batch_first=True), layers)
        x, memory = torch.randn(B, T, D), torch.randn(B, S, D)
        for training in (True, False):
            inputs = [[each.clone().requires_grad_() for each in (x, memory)] for _ in range(2)]
            models = (whole.train(training), cut.train(training))
            expected, got = (model(*each) for model, each in zip(models, inputs, strict=True))
            torch.testing.assert_close(got, expected, **CLOSE)
            for output in (expected, got):
                (output * output.detach().cos()).sum().backward()
            torch.testing.assert_close([each.grad for each in inputs[1]], [each.grad for each in inputs[0]], **CLOSE)
            assert_gradients(whole, cut, plan)
            with torch.no_grad():
                torch.testing.assert_close(cut(x, memory), whole(x, memory), **CLOSE)

    run_ranks(on_rank, 2)


def test_autocast() -> None:
    def on_rank() -> None:
        whole, cut, _ = pair(lambda: nn.MultiheadAttention(D, H, batch_first=True, dropout=0.0), {"": ATTENTION})
        x = torch.randn(B, T, D)
        with torch.autocast("cpu", torch.bfloat16):
            expected, got = (model(x, x, x)[0] for model in (whole, cut))
        assert got.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(got, expected, rtol=3e-2, atol=5e-2)  # bf16 has 8 bits

    run_ranks(on_rank, 2)


def test_dropout_of_weights_differs_between_heads_and_is_whole_where_weights_are() -> None:
    def on_rank() -> torch.Tensor:
        make = lambda: nn.MultiheadAttention(D, H, batch_first=True, dropout=0.5)  # noqa: E731
        _, cut, _ = pair(make, {"": ATTENTION})
        torch.manual_seed(3)  # as a model's root does
        x = torch.randn(B, 16, D)
        weights = cut(x, x, x, average_attn_weights=False)[1]
        return (weights == 0).detach()

    first, second = run_ranks(on_rank, 2)
    assert torch.equal(first, second)
    masks_of_heads = first.transpose(0, 1)
    assert len({tuple(mask.flatten().tolist()) for mask in masks_of_heads}) == H
    # 512 fair coins a head
    assert all(0.4 < mask.float().mean() < 0.6 for mask in masks_of_heads)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"add_bias_kv": True}, "'0' has add_bias_kv=True.*add_bias_kv=False"),
        ({"add_zero_attn": True}, "'0' has add_zero_attn=True"),
        ({"num_heads": 1}, r"tp=2 does not divide num_heads=1 of '0'; choose tp from 1"),
    ],
)
def test_what_cannot_be_cut_by_heads_is_refused(options: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.MultiheadAttention(D, **{"num_heads": H, **options}))
    with pytest.raises(ModelError, match=message):
        lay_out(model, TensorPlan(2, {"0": ATTENTION}), None, rank=0)
    assert type(model[0]) is nn.MultiheadAttention
