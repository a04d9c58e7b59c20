"""What the mean losses inside a loss function divide by.

A mean over targets, some of which are ignored or weighted, does not divide by the number of samples: means of parts of
a batch then do not add up to the whole one's, unless the parts divide alike. torch's functions are watched while a loss
is computed, so that this is seen whatever class is ignored and however the loss is written.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

_WATCHED = ("cross_entropy", "nll_loss")


class Denominators:
    """What was seen. ``shortfall`` is by how much the denominators of means fell short of their targets' number.

    Attributes:
        num_means: Watched functions that took a mean.
        sums: What watched functions returned as sums, not divided by anything yet.
    """

    def __init__(self) -> None:
        self.num_means = 0
        self.shortfall: float | torch.Tensor = 0.0
        self.sums: list[torch.Tensor] = []

    def see(self, result: torch.Tensor, call: dict[str, Any]) -> None:
        target, weight = call["target"], call.get("weight")
        if call["reduction"] == "sum":
            self.sums.append(result)
        if call["reduction"] != "mean" or target.is_floating_point():
            return  # class probabilities count whole samples
        counted = target != call["ignore_index"]
        total = weight[target[counted]].sum() if weight is not None else counted.sum()
        self.num_means += 1
        self.shortfall = self.shortfall + (target.numel() - total.detach().double())


@contextlib.contextmanager
def watched() -> Iterator[Denominators]:
    """Watch torch's losses inside. They are looked up in ``torch.nn.functional`` by modules and by most users."""
    seen = Denominators()
    originals = {name: getattr(F, name) for name in _WATCHED}
    for name, function in originals.items():
        setattr(F, name, _watching(function, seen))
    try:
        yield seen
    finally:
        for name, function in originals.items():
            setattr(F, name, function)


def _watching(function: Callable[..., torch.Tensor], seen: Denominators) -> Callable[..., torch.Tensor]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def watching(*args: Any, **options: Any) -> torch.Tensor:
        result = function(*args, **options)
        call = signature.bind(*args, **options)
        call.apply_defaults()
        seen.see(result, call.arguments)
        return result

    return watching
