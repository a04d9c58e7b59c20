"""Which parameters got a gradient on any rank.

On one device a parameter that a step doesn't use has the gradient None, and optimizers skip it: no momentum, no
weight decay. FSDP gives it zeros instead, so that ranks which use it and ranks which don't reduce alike. Here
each rank marks what its own backward reached; where no rank did, the zeros are taken away again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


class Usage:
    """Marks of one rank, in the same order on every rank.

    Args:
        model: Sharded by FSDP.
    """

    def __init__(self, model: nn.Module) -> None:
        self._records = list(_records(model))
        self._waiting = dict(enumerate(self._records))
        self._marks = [0.0] * len(self._records)

    def watch(self) -> None:
        """Call after each forward: a parameter can be watched once it was gathered for the first time."""
        for index, record in list(self._waiting.items()):
            if hasattr(record, "_unsharded_param"):
                record._unsharded_param.register_post_accumulate_grad_hook(self._marker(index))
                del self._waiting[index]

    def take(self) -> list[float]:
        """1.0 for each parameter that got a gradient since the last call, else 0.0."""
        marks, self._marks = self._marks, [0.0] * len(self._records)
        return marks

    def clear_unused(self, totals: list[float]) -> None:
        """Sets the gradient to None where the marks of all ranks sum to 0."""
        for record, total in zip(self._records, totals, strict=True):
            if total == 0:
                record.sharded_param.grad = None

    def _marker(self, index: int) -> Any:
        def mark(parameter: torch.Tensor) -> None:
            self._marks[index] = 1.0

        return mark


def _records(model: nn.Module) -> Iterator[Any]:
    """FSDP's own record of each trained parameter."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in cast(Any, module)._get_fsdp_state()._fsdp_param_groups:
                yield from (record for record in group.fsdp_params if record.sharded_param.requires_grad)
