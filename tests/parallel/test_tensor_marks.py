"""Code that is written for whole tensors gives, on a part, that part of what it gives for the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensor_parts import part_of
from torch import Tensor

from nbtrain.errors import ModelError
from nbtrain.parallel.tensor.cuts import Cut
from nbtrain.parallel.tensor.marks import Mark, Marks, mark, mark_of
from nbtrain.parallel.tensor.sizes import relocate, reshape

B, T, N, H, DEGREE = 2, 3, 4, 6, 2
C = N * H
MASK = torch.ones(T, T, dtype=torch.bool).triu(1)


def parts(whole: Tensor, dim: int, *segments: int, **options: Any) -> Iterator[tuple[int, Tensor, Marks]]:
    """Each part of ``whole``, marked, and the mode to run it in."""
    for part in range(DEGREE):
        piece = part_of(whole, Cut(dim, segments), DEGREE, part).detach().requires_grad_(whole.requires_grad)
        yield part, mark(piece, Mark(dim, segments)), Marks(DEGREE, part=part, **options)


def same(found: Any, expected: Any, part: int) -> None:
    """What is marked is the part that its mark says; what is not is equal."""
    if isinstance(expected, Tensor):
        have = mark_of(found)
        assert have is not None
        torch.testing.assert_close(found, part_of(expected, Cut(*have.place), DEGREE, part))
    else:
        for one, other in zip(found, expected, strict=True):
            same(one, other, part)


HEADS: dict[str, Callable[[Tensor], Any]] = {
    "transpose": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(2, 0, 3, 1),
    "movedim": lambda x: torch.movedim(x, 2, 0),
    "mT": lambda x: x.mT,
    "unsqueeze": lambda x: x.unsqueeze(0).squeeze(0),
    "none": lambda x: x[:, None],
    "ellipsis": lambda x: x[..., 2:4],
    "select": lambda x: x[:, -1],
    "int": lambda x: x[0, :, :, 1],
    "list": lambda x: x[:, [2, 0]],
    "mask": lambda x: x[:, torch.tensor([True, False, True])],
    "slice": lambda x: x[:, 1:, :, ::2],
    "unbind": lambda x: x.unbind(1),
    "split": lambda x: x.split([2, 4], -1),
    "chunk": lambda x: x.chunk(3, dim=-1),
    "merge": lambda x: x.view(B, T, C),
    "minus one": lambda x: x.reshape(B, T, -1),
    "flatten": lambda x: x.flatten(2),
    "flatten all": lambda x: x.flatten(0, 2),
    "batch": lambda x: x.transpose(1, 2).reshape(B * N, T, H),
    "batch and back": lambda x: x.transpose(1, 2).reshape(B * N, T, H).view(B, N, T, H),
    "expand": lambda x: x[:, :, :, None].expand(B, T, N, 5, H),
    "expand own": lambda x: x[:, :, :, None].expand(-1, -1, -1, 5, -1).reshape(B, T, N * 5, H),
    "expand_as": lambda x: x[:, :1].expand_as(x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, 3, dim=2),
    "repeat": lambda x: x.repeat(1, 1, 2, 1),
    "cat": lambda x: torch.cat((x, -x), -1),
    "cat heads": lambda x: torch.cat((x, -x), 2),
    "stack": lambda x: torch.stack((x, -x), 1),
    "softmax": lambda x: F.softmax(x, -1),
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean((1, 3), keepdim=True),
    "max": lambda x: x.max(-1).values,
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "layer_norm": lambda x: F.layer_norm(x, (H,), torch.arange(1.0, H + 1)),
    "rms_norm": lambda x: F.rms_norm(x, (H,)),
    "scale": lambda x: x * 2 + torch.arange(H),
    "whole bias": lambda x: x + torch.arange(C).view(N, H),
    "where": lambda x: torch.where(x > 0, x, torch.zeros(())),
    "in place": lambda x: x.clone().mul_(2),
    "rotate": lambda x: torch.cat((-x[..., H // 2 :], x[..., : H // 2]), dim=-1),
    "matmul": lambda x: x.transpose(1, 2) @ x.transpose(1, 2).transpose(-1, -2),
    "matmul whole": lambda x: x @ torch.ones(H, 5),
    "linear": lambda x: F.linear(x, torch.ones(5, H)),
    "einsum": lambda x: torch.einsum("btnh,bsnh->bnts", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(*(x.transpose(1, 2),) * 3, attn_mask=torch.zeros(N, T, T)),
    "masked_fill": lambda x: (x.transpose(1, 2) @ x.permute(0, 2, 3, 1)).masked_fill(MASK, -1.0).softmax(-1),
    "zeros_like": lambda x: torch.zeros_like(x) + x.type(torch.float64).to(x),
    "index_select": lambda x: x.index_select(1, torch.tensor([2, 0])),
}


@pytest.mark.parametrize("name", HEADS)
def test_by_heads(name: str) -> None:
    """(B, T, N, H), cut by heads."""
    whole = torch.randn(B, T, N, H)
    expected = HEADS[name](whole)
    for part, x, marks in parts(whole, 2, N):
        with marks:
            found = HEADS[name](x)
        same(found, expected, part)


FUSED: dict[str, Callable[[Tensor], Any]] = {
    "split": lambda x: x.split(C, dim=2),
    "split sizes": lambda x: torch.split(x, [C, C, C], -1),
    "split own": lambda x: x.split(x.shape[-1] // 3, dim=-1),
    "chunk": lambda x: x.chunk(3, -1),
    "tensor_split": lambda x: torch.tensor_split(x, 3, dim=-1),
    "narrow": lambda x: x.narrow(-1, C, C),
    "slices": lambda x: (x[..., :C], x[:, :, C : 2 * C], x[..., -C:]),
    "slices own": lambda x: (x[..., : x.shape[-1] // 3],),
    "three": lambda x: x.view(B, T, 3, N, H).permute(2, 0, 3, 1, 4),
    "three unbound": lambda x: x.view(B, T, 3, N, -1).unbind(2),
    "heads in three": lambda x: x.view(B, T, 3 * N, H),
    "unflatten": lambda x: x.unflatten(-1, (3, N, H)),
    "flatten tokens": lambda x: x.reshape(-1, 3 * C),
    "gelu": lambda x: F.gelu(x) * torch.arange(3 * C),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused(name: str) -> None:
    """(B, T, 3 C): queries, keys and values, one behind the other."""
    whole = torch.randn(B, T, 3 * C)
    expected = FUSED[name](whole)
    for part, x, marks in parts(whole, 2, C, C, C):
        with marks:
            found = FUSED[name](x)
        same(found, expected, part)


def test_grouped_queries_in_one_matrix() -> None:
    whole = torch.randn(B, T, C + 2 * 12)
    for part, x, marks in parts(whole, 2, C, 12, 12):
        with marks:
            found = x.split([C, 12, 12], dim=-1)
        same(found, whole.split([C, 12, 12], dim=-1), part)


def test_gates() -> None:
    whole = torch.randn(B, 2 * C)
    for part, x, marks in parts(whole, 1, C, C):
        with marks:
            found = F.glu(x)
        same(found, F.glu(whole), part)


LOST: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: x.softmax(2),
    "sum": lambda x: x.sum(),
    "layer_norm": lambda x: F.layer_norm(x, (N // 2, H)),
    "select": lambda x: x[:, :, 0],
    "step": lambda x: x[:, :, ::2],
    "some heads": lambda x: x[:, :, :1],
    "contract": lambda x: x.transpose(2, 3) @ torch.ones(N // 2, 3),
    "einsum": lambda x: torch.einsum("btnh->bth", x),
    "unknown": lambda x: torch.fft.fft(x),
    "group_norm": lambda x: F.group_norm(x, 1),
    "cat": lambda x: torch.cat((x, torch.ones(B, T, N, H)), 1),
    "meets": lambda x: x + x.transpose(1, 2)[:, :1],
    "view": lambda x: x.reshape(B, T, 5, -1),
}


@pytest.mark.parametrize("name", LOST)
def test_what_needs_other_ranks_is_an_error(name: str) -> None:
    whole = torch.randn(B, T, N, H)
    for _, x, marks in parts(whole, 2, N):
        with marks, pytest.raises((ModelError, RuntimeError)):
            LOST[name](x)


def test_the_error_says_what_to_type() -> None:
    (_, x, marks), *_ = parts(torch.randn(B, C), 1, C)
    with marks, pytest.raises(ModelError, match=r"softmax mixes features .* over 2 ranks.*tp_plan=\{"):
        x.softmax(-1)


def test_shapes_and_control_flow_are_the_parts() -> None:
    (_, x, marks), *_ = parts(torch.randn(B, C), 1, C)
    with marks:
        assert x.shape == (B, C // DEGREE)
        assert x.numel() == x.size(0) * x.shape[-1]
        assert not torch.isinf(x).any()


def test_whole_tensors_are_left_alone() -> None:
    x = torch.randn(B, T, C)
    with Marks(DEGREE):
        q = x.view(B, T, N, H).transpose(1, 2)
    assert mark_of(q) is None
    assert mark_of(mark(mark(x, Mark(2, (C,))), None)) is None


def test_random_operations_run_in_their_context() -> None:
    entered = []

    @contextmanager
    def random() -> Iterator[None]:
        entered.append(True)
        yield

    (_, x, marks), *_ = parts(torch.randn(B, N, T, H), 1, N, random=random)
    with marks:
        F.dropout(x, 0.5)
        torch.rand_like(x)
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        assert len(entered) == 3
        F.scaled_dot_product_attention(x, x, x)
        F.dropout(torch.ones(3), 0.5)
    assert len(entered) == 3


def test_gradients_of_whole_tensors_that_meet_parts_are_summed() -> None:
    """A bias of each head's scores, and one that all heads share: by `enter`, but for leaves."""
    leaf = torch.ones(N, 1, requires_grad=True)
    entered: list[Tensor] = []

    def enter(tensor: Tensor) -> Tensor:
        entered.append(tensor)
        return tensor

    for part, x, marks in parts(torch.ones(B, N, T, requires_grad=True), 1, N, enter=enter):
        with marks:
            out = x + leaf * 2 + (leaf[:1] * 3) + leaf
        same(out, torch.ones(B, N, T) * 7, part)
    assert len(entered) == 2 * DEGREE
    with Marks(DEGREE, part=0), pytest.raises(ModelError, match="enter"):
        mark(torch.ones(B, N // 2, T), Mark(1, (N,))) + leaf * 2


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_reshape_of_a_part_is_the_part_of_the_reshape(data: st.DataObject) -> None:
    degree = data.draw(st.sampled_from([2, 3]))
    count = data.draw(st.sampled_from([1, 1, 2, 3]))
    segment = degree * data.draw(st.integers(1, 4))
    before, after = (tuple(data.draw(st.lists(st.integers(1, 4), max_size=2))) for _ in range(2))
    shape, place = (*before, count * segment, *after), (len(before), (segment,) * count)
    sizes = data.draw(factors(prod(shape)))
    new = relocate(shape, place, sizes, degree)
    assume(new is not None)
    assert new is not None
    whole = torch.arange(prod(shape)).view(shape)
    for rank in range(degree):
        part = part_of(whole, Cut(*place), degree, rank)
        found = reshape(tuple(part.shape), place, sizes, degree)
        assert found == (tuple(part_of(whole.view(sizes), Cut(*new), degree, rank).shape), new)
        assert torch.equal(part.reshape(found[0]), part_of(whole.view(sizes), Cut(*new), degree, rank))


@st.composite
def factors(draw: st.DrawFn, number: int) -> tuple[int, ...]:
    """Sizes of that product."""
    sizes = []
    while number > 1 and len(sizes) < 4:
        size = draw(st.sampled_from([one for one in range(1, number + 1) if number % one == 0]))
        sizes.append(size)
        number //= size
    return (*sizes, number)
