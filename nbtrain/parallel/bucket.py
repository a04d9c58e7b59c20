"""`Bucket`: parameters of one dtype that lie in one flat buffer, and their gradients in another.

::

    parameters   [    a    |       b       |  c  | pad ]     views: the model's own nn.Parameters
    parts        [      rank 0      |      rank 1      ]     what each rank's optimizer updates
    pieces       [    a    |   b'   |  b"  |  c  |           nn.Parameters: parameter cut by part

    dealt        [    a    |   c   |pad|       b       ]     each parameter lies in one part: for optimizers that need
                                                             it whole
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

DEFAULT_MB = 25.0
"""torch's own."""

_ALIGNED = 16  # elements: no part begins in the middle of a vector register or a cache line


@dataclass(frozen=True)
class Placement:
    """Where things of some sizes lie in a buffer of equal parts, in elements.

    Attributes:
        starts: Of each.
        part: Size of a part.
        whole: Whether none lies in two parts.
    """

    starts: tuple[int, ...]
    part: int
    whole: bool


def side_by_side(sizes: Sequence[int], num_parts: int) -> Placement:
    """One behind the other, cut wherever a part ends."""
    *starts, end = itertools.accumulate(sizes, initial=0)
    return Placement(tuple(starts), _aligned(math.ceil(end / num_parts)), whole=False)


def dealt(sizes: Sequence[int], num_parts: int) -> Placement:
    """The largest first, each into the part that has least: the greedy partition of ZeroRedundancyOptimizer."""
    filled, places = [0] * num_parts, [(0, 0)] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        part = filled.index(min(filled))
        places[index] = part, filled[part]
        filled[part] += sizes[index]
    size = _aligned(max(filled))
    return Placement(tuple(part * size + offset for part, offset in places), size, whole=True)


def _aligned(size: int) -> int:
    return _ALIGNED * math.ceil(size / _ALIGNED)


class Bucket:
    """Takes the parameters over: their data become views of `weights`.

    Args:
        parameters: Of one dtype and device.
        placement: Of them, in that order.
        num_parts: As many as ranks share the update.
        own: Which part is this rank's.

    Attributes:
        parameters: In the order of the buffers.
        pieces: For each parameter, what of it lies in this rank's part: of one dim, or, where parameters are whole, of
            the parameter's shape. Of 0 elements where nothing does.
        weights: (num_parts x part) elements.
        num_adopted: How often a parameter was taken back.
        waiting: Indices of parameters whose final gradient has not arrived yet.
    """

    def __init__(self, parameters: list[nn.Parameter], placement: Placement, num_parts: int, own: int) -> None:
        self.parameters = parameters
        self._placement = placement
        self._start = own * placement.part
        self.weights = parameters[0].detach().new_zeros(num_parts * placement.part)
        self._gradients: torch.Tensor | None = None
        self._gradient_views: list[torch.Tensor] = []
        self._views = self._cut(self.weights)
        self.num_adopted = 0
        self.adopt()
        self.pieces = [nn.Parameter(piece) for piece in self._own(self.weights)]
        self.waiting: set[int] = set()
        self.expect()

    def expect(self) -> None:
        """A backward begins."""
        self.waiting = set(range(len(self.parameters)))

    def adopt(self) -> None:
        """Takes back parameters whose ``.data`` somebody has set: the update would not reach them."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.data_ptr() != view.data_ptr() and parameter.numel():
                view.copy_(parameter.detach())
                parameter.data = view
                self.num_adopted += 1

    @property
    def gradients(self) -> torch.Tensor:
        """As `weights`. It is there from the first gradient on, and arbitrary where none has arrived."""
        if self._gradients is None:
            self._gradients = torch.zeros_like(self.weights)
            self._gradient_views = self._cut(self._gradients)
        return self._gradients

    @property
    def gradient_bytes(self) -> int:
        return 0 if self._gradients is None else self._gradients.nbytes

    def take(self, index: int) -> None:
        """The gradient of a parameter has arrived: it becomes a view of the buffer."""
        parameter, view = self.parameters[index], self._gradient_view(index)
        gradient = parameter.grad
        assert gradient is not None, "its hook runs when there is one"
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            parameter.grad = view

    def complete(self) -> None:
        """What has no gradient counts as zeros."""
        for index, parameter in enumerate(self.parameters):
            view = self._gradient_view(index)
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():  # of an earlier backward, set by hand
                view.copy_(parameter.grad)
        self.waiting.clear()

    def deal(self) -> None:
        """The reduced gradient of each piece to the piece; the parameters' own are no longer whole."""
        for parameter, piece, gradient in zip(self.parameters, self.pieces, self._own(self.gradients), strict=True):
            piece.grad = gradient if piece.numel() else None
            parameter.grad = None

    def show(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter with its view of the gradient buffer."""
        for index, parameter in enumerate(self.parameters):
            yield parameter, self._gradient_view(index)

    def _gradient_view(self, index: int) -> torch.Tensor:
        _ = self.gradients
        return self._gradient_views[index]

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """For each parameter its view."""
        # of the strides that the parameter has, e.g. channels last: its kernels want them
        return [
            flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride(), start)
            for parameter, start in zip(self.parameters, self._placement.starts, strict=True)
        ]

    def _own(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """For each parameter what lies in this rank's part."""
        if not self._placement.whole:
            return [flat[start:end] for start, end in map(self._owned, range(len(self.parameters)))]
        owned = [self._owned(index) != (0, 0) for index in range(len(self.parameters))]
        return [view if mine else flat[:0] for view, mine in zip(self._cut(flat), owned, strict=True)]

    def _owned(self, index: int) -> tuple[int, int]:
        """From where to where a parameter lies in this rank's part; (0, 0) where it does not."""
        first = self._placement.starts[index]
        start = max(first, self._start)
        end = min(first + self.parameters[index].numel(), self._start + self._placement.part)
        return (start, end) if start < end else (0, 0)


def in_buckets(parameters: Iterable[nn.Parameter], bucket_mb: float | None) -> list[list[nn.Parameter]]:
    """Parameters in the order in which gradients arrive, roughly, cut where a bucket of one dtype is full.

    Args:
        parameters: In the order of the model.
        bucket_mb: In MiB; None takes `DEFAULT_MB`.
    """
    limit = (bucket_mb or DEFAULT_MB) * 2**20
    full: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in reversed(list(parameters)):
        bucket = filling.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(held.nbytes for held in bucket) >= limit:
            full.append(filling.pop(parameter.dtype))
    return [*full, *filling.values()]
