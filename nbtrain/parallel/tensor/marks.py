"""Code written for whole tensors, run on a tensor-parallel rank's part of them.

The output of a column layer is marked: one of its dims is cut. Inside `Marks` the mark follows the tensor through the
operations between the column and the row layer, and sizes that the code writes for whole tensors are read as sizes of
the part::

    with Marks(degree=2):
        q = self.q_proj(x)                         # marked by the layer: 8 heads of 4, of which this rank has 4
        q = q.view(B, T, self.num_heads, 4)        # self.num_heads is 8; gives (B, T, 4, 4), cut at dim 2

Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from nbtrain.errors import ModelError
from nbtrain.parallel.tensor.sizes import Place, Shape

_NAME = "_nbtrain_mark"


@dataclass(frozen=True)
class Mark:
    """One dim of a tensor is cut; the tensor is a rank's part.

    Attributes:
        dim: Which, from 0.
        segments: Sizes in the whole tensor, each cut into as many pieces as there are ranks (`cuts.Cut`).
    """

    dim: int
    segments: Shape

    @property
    def place(self) -> Place:
        return self.dim, self.segments

    @property
    def size(self) -> int:
        """Of the whole dim."""
        return sum(self.segments)


def mark(tensor: Tensor, value: Mark | None) -> Tensor:
    """Marks this very tensor, or takes its mark away; returns it."""
    if value is not None:
        setattr(tensor, _NAME, value)
    elif mark_of(tensor):
        delattr(tensor, _NAME)
    return tensor


def mark_of(value: Any) -> Mark | None:
    """The mark of a tensor; None for whole ones and for what is no tensor."""
    found: Mark | None = getattr(value, _NAME, None) if isinstance(value, Tensor) else None
    return found


Random = Callable[[], AbstractContextManager[Any]]
Enter = Callable[[Tensor], Tensor]


class Marks(TorchFunctionMode):
    """Inside it, marks propagate and sizes are read as those of whole tensors.

    A mark is never lost in silence: an operation that would mix what other ranks hold raises.

    Args:
        degree: Of tp.
        part: This rank's coordinate. A whole tensor that meets a marked one (a bias of each head's scores) is then
            narrowed to this rank's part; without, that is an error.
        enter: Applied to a whole tensor before it is narrowed, unless it is a leaf: identity whose backward sums over
            tp. Leaves are in `TensorPlan.partial`.
        random: Makes a context for operations that draw random numbers for marked tensors: ranks must draw different
            ones.
    """

    def __init__(
        self, degree: int, *, part: int | None = None, enter: Enter | None = None, random: Random | None = None
    ) -> None:
        super().__init__()
        self.degree, self.part, self.enter, self.random = degree, part, enter, random

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(_marked(args)) and not any(_marked(kwargs.values())):
            return func(*args, **kwargs)
        from nbtrain.parallel.tensor.rules import rule_of  # the rules are of this class's methods

        return rule_of(func)(self, func, args, kwargs)

    def lost(self, func: Callable[..., Any], why: str = "mixes") -> ModelError:
        """The error of an operation that needs what other ranks hold."""
        name = getattr(func, "__qualname__", None) or getattr(func, "__name__", repr(func))
        return ModelError(
            f"{name} {why} features that tensor parallelism has cut over {self.degree} ranks, which it did not do when "
            "the model was looked at; leave this module whole: tp_plan={'NAME': 'replicate'}"
        )


def _marked(values: Any) -> Iterator[Mark]:
    """Marks of tensors among ``values``, and in lists and tuples of tensors among them."""
    for value in values:
        if isinstance(value, Tensor):
            found = getattr(value, _NAME, None)
            if found is not None:
                yield found
        elif isinstance(value, list | tuple):
            yield from _marked(value)
