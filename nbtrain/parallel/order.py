"""A guard of the order in which the sharded units run.

Each unit's forward starts an all-gather, and gloo and NCCL match collectives by their order alone. Where ranks take
different units, one unit's weights arrive in another: wrong numbers without a word, or a hang. So the first
forward agrees on every step of the order with the other ranks, and later ones compare with it before they gather.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.errors import ModelError
from nbtrain.parallel import mesh
from nbtrain.parallel.layout import Layout

_END = "the end of forward"


class UnitOrder:
    """Watches the units of one model, separately for training and evaluation.

    Args:
        root: The sharded model.
        units: The sharded modules inside it, by name.
        layout: Of the root; its data-parallel ranks must agree. It keeps the order.
    """

    def __init__(self, root: nn.Module, units: dict[str, nn.Module], layout: Layout) -> None:
        self._root = root
        self._names = [*units, _END]
        self._layout = layout
        self._seen: list[str] | None = None
        root.register_forward_pre_hook(self._start, prepend=True)
        root.register_forward_hook(self._finish)
        for name, unit in units.items():
            unit.register_forward_pre_hook(self._entry(name), prepend=True)

    def _start(self, root: nn.Module, args: Any) -> None:
        self._seen = []

    def _finish(self, root: nn.Module, args: Any, output: Any) -> None:
        self._enter(_END)
        self._layout.order.setdefault(root.training, self._seen or [])
        self._seen = None

    def _entry(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self._enter(name)

        return enter

    def _enter(self, name: str) -> None:
        if self._seen is None:  # a unit that is called by itself
            return
        agreed = self._layout.order.get(self._root.training)
        if agreed is None:
            self._agree(name)
        elif agreed[len(self._seen) : len(self._seen) + 1] != [name]:
            expected = agreed[len(self._seen)] if len(self._seen) < len(agreed) else _END
            raise ModelError(_deviation(name, expected, "this rank", "the first step"))
        self._seen.append(name)

    def _agree(self, name: str) -> None:
        index = self._names.index(name)
        # not where the parameters are: FSDP may keep them on the CPU
        span = torch.tensor([index, -index], device=mesh.device_of(self._layout.mesh))
        dist.all_reduce(span, op=dist.ReduceOp.MAX, group=self._layout.group)
        last, first = int(span[0]), -int(span[1])
        if first != last:
            raise ModelError(_deviation(self._names[last], self._names[first], "one rank", "another"))


def _deviation(name: str, expected: str, who: str, reference: str) -> str:
    return (
        f"{who} reached {_quoted(name)} where {reference} reached {_quoted(expected)}: sharded blocks must run in one "
        "order on all ranks and in all steps; type zero=0, whose ranks may take different branches"
    )


def _quoted(name: str) -> str:
    return name if name == _END else f"'{name}'"
