"""Which parameters got a gradient on any rank.

On one device a parameter that a step doesn't use has the gradient None, and optimizers skip it: no momentum, no
weight decay. DDP and FSDP give it zeros, so that ranks which use it and ranks which don't reduce alike. Here each
rank marks what its own backward reached; where no rank did, the zeros are taken away again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nbtrain.parallel.shard import param_groups


class Usage:
    """The marks of one rank, in the same order on every rank.

    Args:
        parameters: Whose gradients are taken away where no rank used them.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self._marks = [0.0] * len(parameters)
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What backward reaches inside is not marked."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def watch(self) -> None:
        """Call after each forward, before its backward."""

    def take(self) -> list[float]:
        """1.0 for each parameter that got a gradient since the last call, else 0.0."""
        marks, self._marks = self._marks, [0.0] * len(self.parameters)
        return marks

    def clear_unused(self, totals: list[float]) -> None:
        """Sets the gradient to None where the marks of all ranks sum to 0."""
        for parameter, total in zip(self.parameters, totals, strict=True):
            if total == 0:
                parameter.grad = None

    def mark(self, index: int) -> None:
        """Parameter ``index`` got a gradient."""
        if not self._is_paused:
            self._marks[index] = 1.0


class ShardUsage(Usage):
    """Marks under FSDP, where gradients arrive at the gathered parameters.

    Args:
        model: Sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        records = list(sharded_records(model))
        super().__init__([record.sharded_param for record in records])
        self._waiting = dict(enumerate(records))

    def watch(self) -> None:
        # a gathered parameter exists from its first gathering on, and is the same tensor ever after
        for index, record in list(self._waiting.items()):
            if hasattr(record, "_unsharded_param"):
                record._unsharded_param.register_post_accumulate_grad_hook(self._marker(index))
                del self._waiting[index]

    def _marker(self, index: int) -> Callable[[torch.Tensor], None]:
        return lambda parameter: self.mark(index)


def leaves(model: nn.Module) -> list[torch.Tensor]:
    """What trains, as backward meets it: behind a forward, FSDP's gathered parameters."""
    gathered = [record._unsharded_param for record in sharded_records(model) if hasattr(record, "_unsharded_param")]
    return gathered or [parameter for parameter in model.parameters() if parameter.requires_grad]


def sharded_records(model: nn.Module) -> Iterator[Any]:
    """FSDP's own record of each trained parameter."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in param_groups(module):
                yield from (record for record in group.fsdp_params if record.sharded_param.requires_grad)
