"""The one reduction of a step: small, after backward and before the optimizer.

Who passes it knows that every rank holds its final gradients. It carries all that ranks must agree on:

::

    [ loss | weight | chunks | ignored | ignored^2 | 1 | reference | reference^2 | step | step^2 | trainer | trainer^2
      | rate | rate^2 | squares of gradients | marks ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.errors import BatchError, SessionError, UsageError
from nbtrain.parallel.exchange import all_reduce
from nbtrain.parallel.loss import Loss

KEPT_LOSSES = 256
"""An evaluation may have any number of them."""


class Tally:
    """Adds up the losses of one rank's chunks, on the device: nothing waits for it.

    Many at a time: each operation on a single number costs as much as one on all of them.
    """

    def __init__(self, device: torch.device) -> None:
        # Apple's GPUs have no float64
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sums = torch.zeros(5, dtype=self._dtype, device=device)
        self._rows: list[tuple[Any, Any, Any, Any]] = []  # a loss, what makes it a sum, its weight, what is ignored
        self._cure = ""

    def add(self, loss: Loss) -> None:
        # copies: both may lie in buffers, of which the next chunk makes its own
        value, weight = loss.value.detach().clone(), loss.weight
        weight = weight.clone() if isinstance(weight, torch.Tensor) else weight
        self._rows.append((value, 1.0 if loss.is_sum else weight, weight, loss.ignored))
        self._cure = loss.cure
        if len(self._rows) == KEPT_LOSSES:
            self._add_up()

    def _add_up(self) -> None:
        if not self._rows:
            return
        losses, factors, weights, ignored = (self._row(*column) for column in zip(*self._rows, strict=True))
        ones = torch.ones_like(weights)
        self._sums += torch.stack([losses * factors, weights, ones, ignored, ignored**2]).sum(1)
        self._rows.clear()

    def reduce(
        self,
        group: dist.ProcessGroup | None,
        reference: float = 1.0,
        step: int = 0,
        square_sum: torch.Tensor | float = 0.0,
        marks: Sequence[float] = (),
        copies: int = 1,
        trainer: int = 0,
        rate: float = 0.0,
    ) -> Totals:
        """Sums over the group's ranks, and waits for them. Without a group it moves nothing.

        Args:
            group: None for one device.
            reference: What this rank divided its losses by before backward.
            step: Which step this rank takes.
            square_sum: Of this rank's gradients.
            marks: One for each parameter that ranks may or may not use; as many on every rank.
            copies: How many ranks have the same batch, and count the same loss.
            trainer: Whose step it is.
            rate: What the optimizer's learning rates sum to.
        """
        self._add_up()
        alike = [square for one in (reference, step, trainer, rate) for square in (one, one**2)]
        vector = torch.cat([self._sums, self._row(1.0, *alike, square_sum, *marks)])
        if group is not None:
            all_reduce(vector, group)
        loss_sum, weight, *rest = vector.tolist()
        uneven, ranks = _spread(*rest[0:3]), rest[3]
        apart = [_spread(ranks, *rest[begin : begin + 2]) for begin in (4, 6, 8, 10)]
        agreed, crossed, rates_differ = not (apart[0] or apart[1]), apart[2], apart[3]
        total_squares, *reached = rest[12:]
        mean = loss_sum / copies, weight / copies
        return Totals(*mean, total_squares, reached, uneven, agreed, crossed, rates_differ, self._cure)

    def _row(self, *values: Any) -> torch.Tensor:
        if not any(isinstance(value, torch.Tensor) for value in values):
            return torch.tensor(values, dtype=self._dtype, device=self._sums.device)
        return torch.stack([torch.as_tensor(value, dtype=self._dtype, device=self._sums.device) for value in values])


@dataclass(frozen=True)
class Totals:
    """Sums over ranks and chunks.

    Attributes:
        loss_sum: Of losses times their weights.
        weight: What the global mean divides by.
        square_sum: Of the gradients on all ranks.
        marks: For each parameter, how many ranks reached it.
        uneven: Whether means were taken over shares with different numbers of ignored targets.
        agreed: Whether all ranks took the same step and divided by the same reference.
        crossed: Whether ranks are in steps of different trainers.
        rates_differ: Whether their optimizers have different learning rates.
        cure: What to return in the place of an uneven mean, as this rank saw it; "" where it saw none.
    """

    loss_sum: float
    weight: float
    square_sum: float
    marks: list[float]
    uneven: bool
    agreed: bool
    crossed: bool = False
    rates_differ: bool = False
    cure: str = ""

    @property
    def mean(self) -> float:
        return self.loss_sum / self.weight

    def require_meaning(self) -> None:
        """Raises on all ranks alike, where the global mean is not defined by what was added.

        Raises:
            BatchError: Nothing counts, or means are over different numbers of targets.
            SessionError: Ranks did not end the last step together.
            UsageError: They are in steps of different trainers, or their learning rates differ.
        """
        if self.crossed:
            raise UsageError("ranks are in steps of different trainers; make every rank step the same one")
        if not self.agreed:
            raise SessionError("an interruption left ranks a step apart; call trainer.step again: ranks agree now")
        if self.weight < 0:
            raise BatchError(f"the counts of loss_fn sum to {self.weight:g}; return (sum, count) with count >= 0")
        if self.weight == 0:
            raise BatchError(
                "nothing in the global batch counts: its weight is 0, and the mean loss 0/0; give a batch with a "
                "sample or valid token on some rank"
            )
        if self.rates_differ:
            raise UsageError(
                "learning rates differ between ranks, on which weights would drift apart; set them alike on all ranks "
                "(trainer.optimizer.param_groups), or load a checkpoint"
            )
        if self.uneven:
            raise BatchError(
                "ignored, weighted or left out targets fall unevenly on ranks or chunks, so that the mean of their "
                "means isn't the mean; let loss_fn return (sum, count), the sum of the losses and what they divide by"
                + (f", of the tensors that it takes the mean of now: {self.cure}" if self.cure else "")
            )


def _spread(chunks: float, total: float, squares: float) -> bool:
    """Whether numbers with this sum and sum of squares differ, beyond rounding."""
    return chunks * squares - total**2 > 1e-9 * chunks * squares
