"""A backward in two parts leaves the gradients of one in a piece, however weights and inputs meet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from nbtrain.parallel.pipeline.graph import eager

Weights = dict[str, nn.Parameter]
Inputs = list[torch.Tensor]


def chain(w: Weights, inputs: Inputs) -> list[torch.Tensor]:
    return [torch.tanh(inputs[0] @ w["a"]) @ w["b"] + w["c"]]


def used_twice(w: Weights, inputs: Inputs) -> list[torch.Tensor]:
    return [torch.tanh(inputs[0] @ w["a"]) @ w["a"] @ w["b"]]


def meets_twice(w: Weights, inputs: Inputs) -> list[torch.Tensor]:
    """A decoder's first block behind an encoder: what comes of 'a' attends to the input, and is added to the result."""
    x = torch.tanh(w["a"] * 2)
    return [x + torch.softmax((x @ w["b"]) @ inputs[0].T, -1) @ inputs[0] @ w["c"]]


def beside(w: Weights, inputs: Inputs) -> list[torch.Tensor]:
    """One output depends on no input, and shares a weight with the other."""
    return [torch.tanh(inputs[0] @ w["a"]) @ w["b"], torch.tanh(w["b"] @ w["c"])]


def two_inputs(w: Weights, inputs: Inputs) -> list[torch.Tensor]:
    return [torch.tanh(inputs[0] @ w["a"]) @ w["b"], inputs[1] @ w["b"] + inputs[0] @ w["c"]]


EAGER = {chain: "", used_twice: "a", meets_twice: "a", beside: "bc", two_inputs: "b"}


@pytest.mark.parametrize("compute", EAGER, ids=lambda compute: compute.__name__)
def test_two_parts_are_one(compute: Callable[[Weights, Inputs], list[torch.Tensor]]) -> None:
    def made() -> tuple[Weights, Inputs, list[torch.Tensor]]:
        generator = torch.Generator().manual_seed(1)
        weights = {name: nn.Parameter(torch.randn(4, 4, generator=generator)) for name in "abc"}
        inputs = [torch.randn(4, 4, generator=generator).requires_grad_() for _ in range(2)]
        return weights, inputs, compute(weights, inputs)

    weights, inputs, outputs = made()
    gradients = [torch.full_like(output, index + 0.5) for index, output in enumerate(outputs)]
    torch.autograd.backward(outputs, gradients)
    expected = [tensor.grad for tensor in (*inputs, *weights.values())]

    weights, inputs, outputs = made()
    early = eager(outputs, inputs, list(weights.values()))
    assert [name for name, weight in weights.items() if any(weight is one for one in early)] == list(EAGER[compute])
    late = [weight for weight in weights.values() if all(weight is not one for one in early)]
    _, groups = stage_backward_input(outputs, gradients, [*inputs, *early], iter(late))
    assert all(weight.grad is None for weight in late)
    stage_backward_weight(iter(late), groups)
    for before, tensor in zip(expected, (*inputs, *weights.values()), strict=True):
        torch.testing.assert_close(tensor.grad, before, rtol=1e-6, atol=1e-6)
