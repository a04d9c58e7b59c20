"""The operands of a torch function, and the marks of what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nbtrain.errors import ModelError
from nbtrain.parallel.tensor.marks import Mark, Marks, mark, mark_of
from nbtrain.parallel.tensor.names import tensors
from nbtrain.parallel.tensor.sizes import Place

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[Marks, Func, Args, Kwargs], Any]


def argument(args: Args, kwargs: Kwargs, at: int, name: str, default: Any) -> Any:
    return kwargs[name] if name in kwargs else args[at] if len(args) > at else default


def narrowed(marks: Marks, back: int, have: Mark, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Whole tensors among the operands are entered; those as large as the whole become this rank's part."""

    def narrow(value: Any) -> Any:
        if isinstance(value, Tensor) and mark_of(value) is None and meets(value, back, have):
            return take(marks, value, value.ndim - back, have)
        return entered(marks, value)

    return tuple(map(narrow, args)), {name: narrow(value) for name, value in kwargs.items()}


def entered(marks: Marks, value: Any) -> Any:
    """A whole tensor of which each rank will have a part of the gradient. Leaves are in `TensorPlan.partial`."""
    if (
        not isinstance(value, Tensor)
        or mark_of(value)
        or not value.requires_grad
        or value.is_leaf
        or not torch.is_grad_enabled()
    ):
        return value
    if marks.enter is None:
        raise ModelError("a whole tensor meets cut features; its gradient would be a rank's part: Marks needs `enter`")
    return marks.enter(value)


def meets(value: Tensor, back: int, have: Mark) -> bool:
    return value.ndim >= back and value.shape[value.ndim - back] == have.size


def take(marks: Marks, value: Tensor, dim: int, have: Mark) -> Tensor:
    """This rank's part of a whole tensor."""
    if marks.part is None:
        raise ModelError("a whole tensor meets cut features: Marks needs `part`")
    value = entered(marks, value)
    pieces = [segment.chunk(marks.degree, dim)[marks.part] for segment in torch.split(value, list(have.segments), dim)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def marked(marks: Marks, func: Func, result: Any, place: Callable[[Tensor], Place]) -> Any:
    """Marks the tensors of a result; one that does not have the cut dim any more is an error."""
    for out in tensors(result):
        dim, segments = place(out)
        if dim < 0 or out.shape[dim] * marks.degree != sum(segments):
            if out.dtype is torch.bool and out.ndim == 0:
                continue  # isinf(x).any(): a look at the numbers, not a value
            raise marks.lost(func)
        mark(out, Mark(dim, segments))
    return result
