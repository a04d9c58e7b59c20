"""Follows the features of a model's linear layers through one forward: abstract interpretation on a probe batch.

Beside each tensor that depends on cut features goes a tensor of the same shape that names, for each element, the
feature (`features.Features`) on which it depends. What moves elements moves the names; what computes one number from
several joins them. Nothing goes by the names of classes or attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nbtrain.parallel.tensor import operations as known
from nbtrain.parallel.tensor.features import Features
from nbtrain.parallel.tensor.joining import rule_of
from nbtrain.parallel.tensor.names import nodes_of, shared, tensors

Func = Callable[..., Any]


@dataclass(frozen=True)
class Touch:
    """An operation on features.

    Attributes:
        node: One of the features.
        module: Names of the running modules, outermost first.
        op: What was called.
        joined: How many features it joined.
        written: It was given sizes, draws random numbers or takes whole tensors, so that `Marks` must be active.
    """

    node: int
    module: tuple[str, ...]
    op: str
    joined: int
    written: bool


@dataclass
class Record:
    """What a trace saw.

    Attributes:
        touches: Of features, in order.
        partial: Whole leaves that act on features: their id and one of the features.
        used: Ids of tensors that some operation outside of layers took, and in which modules.
    """

    touches: list[Touch] = field(default_factory=list)
    partial: list[tuple[int, int]] = field(default_factory=list)
    used: dict[int, set[str]] = field(default_factory=dict)


class Trace(TorchFunctionMode):
    """Carries the features' names along.

    Args:
        stack: Names of the running modules; `layers.Layers` keeps it.
    """

    def __init__(self, features: Features, stack: list[str]) -> None:
        super().__init__()
        self.features, self.stack, self.record = features, stack, Record()
        self.inside_layer = False
        self._alive: list[Tensor] = []  # ids must not be used again

    def __torch_function__(
        self, func: Func, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.inside_layer:
            return func(*args, **kwargs)
        operands = list(tensors((args, kwargs)))
        if not any(nodes_of(value) is not None for value in operands):
            result = func(*args, **kwargs)
            self._use(operands, result)
            return result
        before = len(self.features.edges)
        result = rule_of(func)(self.features, func, args, kwargs)
        self._use(operands, result)
        self._touch(func, args, kwargs, result, sum(pair.shape[1] for pair in self.features.edges[before:]))
        return result

    def _use(self, operands: list[Tensor], result: Any) -> None:
        if any(True for _ in tensors(result)):
            for value in operands:
                self.record.used.setdefault(id(value), set()).update(self.stack)
            self._alive += operands

    def _touch(self, func: Func, args: Any, kwargs: Any, result: Any, joined: int) -> None:
        nodes = next(nodes for value in tensors((args, kwargs)) if (nodes := nodes_of(value)) is not None)
        written = func in known.SIZED or known.draws(func, args, kwargs) or self._meets_whole(func, args, kwargs)
        if nodes.numel() and any(True for _ in tensors(result)):
            touch = Touch(int(nodes.reshape(-1)[0]), tuple(self.stack), known.name_of(func), joined, written)
            self.record.touches.append(touch)

    def _meets_whole(self, func: Func, args: Any, kwargs: Any) -> bool:
        """Whole operands that may want gradients, or that are as large as the features."""
        found = False
        nodes = next(nodes for value in tensors((args, kwargs)) if (nodes := nodes_of(value)) is not None)
        for value in tensors((args, kwargs)) if func not in known.MOVES else ():
            if nodes_of(value) is not None:
                continue
            if isinstance(value, nn.Parameter):
                self.record.partial.append((id(value), int(nodes.reshape(-1)[0])))
            found |= (value.is_floating_point() and not isinstance(value, nn.Parameter)) or bool(shared(value, nodes))
        return found

    def finish(self, outputs: list[Tensor]) -> None:
        """The model's outputs are wanted whole."""
        for value in outputs:
            if (nodes := nodes_of(value)) is not None:
                self.whole(nodes)
                self.record.touches.append(Touch(int(nodes.reshape(-1)[0]), (), "output", nodes.numel(), True))

    def whole(self, nodes: Tensor) -> None:
        """These features are wanted whole."""
        self.features.join(nodes, torch.zeros((), dtype=torch.long, device="cpu"))
