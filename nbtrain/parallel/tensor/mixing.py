"""Marks of what computes one number from several: fine along every dim but the cut one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from nbtrain.parallel.tensor import operations as known
from nbtrain.parallel.tensor.marks import Mark, Marks, mark, mark_of
from nbtrain.parallel.tensor.names import tensors
from nbtrain.parallel.tensor.operands import Args, Func, Kwargs, Rule, argument, entered, marked, narrowed


def elementwise(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Inputs align from the right, as broadcasting does."""
    found = {value.ndim - have.dim: have for value in tensors((args, kwargs)) if (have := mark_of(value))}
    if len(found) > 1:
        raise marks.lost(func, "meets")
    ((back, have),) = found.items()
    args, kwargs = narrowed(marks, back, have, args, kwargs)
    return marked(marks, func, func(*args, **kwargs), lambda out: (out.ndim - back, have.segments))


def along(at: int, *names: str, default: Any = None) -> Rule:
    """A function whose ``dim`` is its argument number ``at``: fine for every other dim than the cut one."""

    def rule(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
        tensor, have = args[0], mark_of(args[0])
        dims = next((kwargs[name] for name in names if name in kwargs), args[at] if len(args) > at else default)
        if have is None or dims is None or isinstance(dims, torch.dtype):
            return elementwise(marks, func, args, kwargs)
        mixed = {dim % tensor.ndim for dim in ([dims] if isinstance(dims, int) else dims)}
        if have.dim in mixed:
            raise marks.lost(func)
        result = func(*args, **kwargs)
        first = next(iter(tensors(result)))
        gone = sum(dim < have.dim for dim in mixed) if first.ndim < tensor.ndim else 0
        return marked(marks, func, result, lambda out: (have.dim - gone, have.segments))

    return rule


def glu(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tensor, have = args[0], cast(Mark, mark_of(args[0]))
    dim = argument(args, kwargs, 1, "dim", -1) % tensor.ndim
    half = len(have.segments) // 2
    if dim == have.dim and have.segments[:half] != have.segments[half:]:
        raise marks.lost(func)
    segments = have.segments[:half] if dim == have.dim else have.segments
    return mark(func(*args, **kwargs), Mark(have.dim, segments))


def norm(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Over the last dims."""
    tensor, have = args[0], mark_of(args[0])
    shape = argument(args, kwargs, 1, "normalized_shape", ())
    if have is None or have.dim >= tensor.ndim - len(shape):
        raise marks.lost(func, "normalises over")
    args = (args[0], *(entered(marks, each) for each in args[1:]))
    return mark(func(*args, **kwargs), have)


def linear(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Over cut features it gives a partial sum, which a row layer adds up: only a cut weight fits them."""
    tensor, have = args[0], mark_of(args[0])
    out = func(*args, **kwargs)
    if have is None:
        raise marks.lost(func, "has a weight made of")
    return out if have.dim == tensor.ndim - 1 else mark(out, have)


def matmul(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Cut in a batch dim, in rows of the first or in columns of the second; never in what is summed."""
    operands = list(tensors((args, kwargs)))[-2:]
    backs = {back for value, own in zip(operands, (1, 2), strict=True) if (back := _back(marks, func, value, own))}
    if len(backs) != 1:
        raise marks.lost(func)
    (back,) = backs
    have = next(found for value in operands if (found := mark_of(value)))
    if func in known.ADDED:
        args = (*narrowed(marks, back, have, args[:1], {})[0], *args[1:])
    args, kwargs = tuple(entered(marks, each) for each in args), {key: entered(marks, kwargs[key]) for key in kwargs}
    return marked(marks, func, func(*args, **kwargs), lambda out: (out.ndim - back, have.segments))


def _back(marks: Marks, func: Func, value: Tensor, summed: int) -> int | None:
    """The cut dim counted from the back."""
    have = mark_of(value)
    if have is None:
        return None
    if value.ndim - have.dim == summed or value.ndim < 2:
        raise marks.lost(func, "sums over")
    return value.ndim - have.dim


def einsum(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    equation, operands = args[0].replace(" ", ""), list(tensors(args[1:]))
    inputs, _, output = equation.partition("->")
    cut = {
        (letters[have.dim], have)
        for letters, value in zip(inputs.split(","), operands, strict=True)
        if (have := mark_of(value)) and "." not in letters
    }
    letters = {letter for letter, _ in cut}
    if "." in equation or len(letters) != 1 or not (letters & set(output)):
        raise marks.lost(func)
    ((letter, have), *_) = sorted(cut, key=lambda pair: pair[1].segments)
    args = (args[0], *(entered(marks, value) for value in operands))
    return mark(func(*args, **kwargs), Mark(output.index(letter), have.segments))


def attention(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`F.scaled_dot_product_attention`, cut by heads."""
    query = args[0] if args else kwargs["query"]
    have = mark_of(query)
    if have is None or have.dim >= query.ndim - 2:
        raise marks.lost(func)
    args, kwargs = narrowed(marks, query.ndim - have.dim, have, args, kwargs)
    draws = argument(args, kwargs, 4, "dropout_p", 0.0) > 0
    with marks.random() if marks.random and draws else nullcontext():
        return mark(func(*args, **kwargs), have)
