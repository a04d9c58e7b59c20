"""The one reduction of a step: small, after backward and before the optimizer.

Who passes it knows that every rank holds its final gradients. It carries all that ranks must agree on:

::

    [ sum of losses | weight | square sum of gradients | a mark for each parameter that got a gradient ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Totals:
    """Sums over ranks and chunks.

    Attributes:
        loss_sum: Of losses times their weights.
        weight: What the global mean divides by.
        square_sum: Of the gradients on all ranks.
        marks: For each parameter, how many ranks reached it.
    """

    loss_sum: float
    weight: float
    square_sum: float
    marks: list[float]

    @property
    def mean(self) -> float:
        return self.loss_sum / self.weight if self.weight else float("nan")


def reduce_totals(
    loss_sum: torch.Tensor,
    weight: torch.Tensor | float,
    square_sum: torch.Tensor | float = 0.0,
    marks: Sequence[float] = (),
    *,
    group: dist.ProcessGroup | None,
) -> Totals:
    """Sums over the group's ranks in float64, and waits for them. Without a group it moves nothing.

    Args:
        loss_sum: 0-d, on the device that the group communicates.
        weight: 0-d or a number.
        square_sum: 0-d or a number.
        marks: As many on every rank.
        group: None for one device.
    """
    scalars = [torch.as_tensor(value, device=loss_sum.device) for value in (loss_sum, weight, square_sum)]
    vector = torch.stack([scalar.to(_wide(loss_sum.device)) for scalar in scalars])
    if marks:
        vector = torch.cat([vector, vector.new_tensor(marks)])
    if group is not None:
        dist.all_reduce(vector, group=group)
    total_loss, total_weight, total_square, *total_marks = vector.tolist()
    return Totals(total_loss, total_weight, total_square, total_marks)


def _wide(device: torch.device) -> torch.dtype:
    # Apple's GPUs have no float64
    return torch.float32 if device.type == "mps" else torch.float64
