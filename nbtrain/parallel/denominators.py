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
        num_targets: That these got, with ignored ones.
        cure: A sum and what it divides by, in the place of the last mean.
        sums: What watched functions returned as sums, not divided by anything yet.
    """

    def __init__(self) -> None:
        self.num_means = self.num_targets = 0
        self.cure = ""
        self.shortfall: int | torch.Tensor = 0
        self.sums: list[torch.Tensor] = []

    def see(self, name: str, result: torch.Tensor, call: dict[str, Any]) -> None:
        target, weight = call["target"], call.get("weight")
        if call["reduction"] == "sum":
            self.sums.append(result)
        if call["reduction"] != "mean" or target.is_floating_point():
            return  # class probabilities count whole samples
        self.num_means += 1
        self.num_targets += target.numel()
        self.cure = _cure(name, call)
        self.shortfall = self.shortfall + _shortfall(target, call["ignore_index"], weight)


def _shortfall(target: torch.Tensor, ignore_index: int, weight: torch.Tensor | None) -> torch.Tensor:
    if weight is None:
        return (target == ignore_index).sum().double()
    return target.numel() - weight[target[target != ignore_index]].sum().detach().double()


@contextlib.contextmanager
def watched() -> Iterator[Denominators]:
    """Watch torch's losses inside. They are looked up in ``torch.nn.functional`` by modules and by most users."""
    seen = Denominators()
    originals = {name: getattr(F, name) for name in _WATCHED}
    for name, function in originals.items():
        setattr(F, name, _watching(name, function, seen))
    try:
        yield seen
    finally:
        for name, function in originals.items():
            setattr(F, name, function)


def _watching(name: str, function: Callable[..., torch.Tensor], seen: Denominators) -> Callable[..., torch.Tensor]:
    signature = _signature(function)

    @functools.wraps(function)
    def watching(*args: Any, **options: Any) -> torch.Tensor:
        result = function(*args, **options)
        call = signature.bind(*args, **options)
        call.apply_defaults()
        seen.see(name, result, call.arguments)
        return result

    return watching


@functools.cache  # losses are computed anew for each chunk, by the same two functions
def _signature(function: Callable[..., torch.Tensor]) -> inspect.Signature:
    return inspect.signature(function)


def _cure(name: str, call: dict[str, Any]) -> str:
    ignored, weighted = call["ignore_index"], call.get("weight") is not None
    options = {"weight": "weight" if weighted else None, "ignore_index": ignored if ignored != -100 else None}
    options["label_smoothing"] = call.get("label_smoothing") or None
    given = "".join(f"{option}={value}, " for option, value in options.items() if value is not None)
    counted = f"weight[target[target != {ignored}]]" if weighted else f"(target != {ignored})"
    return f"(F.{name}(output, target, {given}reduction='sum'), {counted}.sum())"
