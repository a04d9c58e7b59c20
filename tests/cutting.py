"""Cut models held against whole ones, elementwise, on every rank.

Shapes: B samples, T tokens, D features, V vocabulary.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.parallel.tensor import collectives
from nbtrain.parallel.tensor.apply import lay_out
from nbtrain.parallel.tensor.cuts import Cut, Layer, TensorPlan
from nbtrain.parallel.tensor.state import cuts_by_name, gather_whole

B, T, D, V = 2, 4, 8, 32
# fp32 sums in another order: some units in the last place of the largest terms, which are below 10
CLOSE = {"rtol": 2e-5, "atol": 1e-5}


def column(*segments: int, bias: bool = True, dim: int = 0) -> Layer:
    cuts = {"weight": Cut(dim, segments)} | ({"bias": Cut(0, segments)} if bias else {})
    return Layer("colwise", cuts)


def row(size: int, dim: int = 1) -> Layer:
    return Layer("rowwise", {"weight": Cut(dim, (size,))})


@contextmanager
def told(case: str) -> Iterator[None]:
    """Says which case an error comes from."""
    try:
        yield
    except Exception as error:
        error.add_note(case)
        raise


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Which collectives are called inside."""
    calls: Counter[str] = Counter()
    originals = [
        (where, name, getattr(where, name))
        for where, name in ((dist, "all_reduce"), (collectives, "_all_gather"), (collectives, "_reduce_scatter"))
    ]

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[name.strip("_")] += 1
            return original(*args, **options)

        return call

    for where, name, original in originals:
        setattr(where, name, counting(name, original))
    try:
        yield calls
    finally:
        for where, name, original in originals:
            setattr(where, name, original)


def assert_same(whole: nn.Module, cut: nn.Module, plan: TensorPlan, x: torch.Tensor, **close: Any) -> None:
    """Output and all gradients, the input's too, of two models that differ in their layout only."""
    close = close or CLOSE
    floating = x.is_floating_point()
    xs = [x.clone().requires_grad_() if floating else x for _ in range(2)]
    expected, output = whole(xs[0]), cut(xs[1])
    torch.testing.assert_close(output, expected, **close)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    (expected * weights).sum().backward()
    (output * weights).sum().backward()
    if floating:
        torch.testing.assert_close(xs[1].grad, xs[0].grad, **close)
    assert_gradients(whole, cut, plan, **close)


def assert_gradients(whole: nn.Module, cut: nn.Module, plan: TensorPlan, **close: Any) -> None:
    parts = {name: parameter.grad for name, parameter in cut.named_parameters() if parameter.grad is not None}
    gradients = gather_whole(parts, cuts_by_name(cut, plan), dist.group.WORLD)
    expected = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    torch.testing.assert_close(gradients, expected, **(close or CLOSE))


def pair(
    make: Callable[[], nn.Module], layers: Mapping[str, Layer], **options: Any
) -> tuple[nn.Module, nn.Module, TensorPlan]:
    """A model, its twin cut over all ranks, and the plan."""
    torch.manual_seed(0)
    whole = make()
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.5)
    plan = TensorPlan(dist.get_world_size(), layers, **options)
    cut = copy.deepcopy(whole)
    lay_out(cut, plan, dist.group.WORLD, rank=dist.get_rank())
    return whole, cut, plan
