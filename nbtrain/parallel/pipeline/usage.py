"""Which parameters got a gradient, where every rank has others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from nbtrain.parallel.usage import Usage


class StageUsage(Usage):
    """Marks for all trained parameters of the whole model, of which this rank sets those of its own.

    Args:
        parameters: That this rank trains.
        places: Of each its number among those of the whole model.
        num_all: Of the whole model.
        inner: Takes the gradients away instead; None: they are the parameters' own.
    """

    def __init__(
        self, parameters: list[nn.Parameter], places: Sequence[int], num_all: int, inner: Usage | None = None
    ) -> None:
        super().__init__(parameters)
        self._places, self._num_all, self._inner = places, num_all, inner

    def note(self, found: Sequence[bool]) -> None:
        """For each of this rank's parameters, whether a gradient arrived."""
        for index, is_there in enumerate(found):
            if is_there:
                self.mark(index)

    def take(self) -> list[float]:
        marks = [0.0] * self._num_all
        if self._inner is not None:
            self._inner.take()
        for place, mark in zip(self._places, super().take(), strict=True):
            marks[place] = max(marks[place], mark)
        return marks

    def clear_unused(self, totals: list[float]) -> None:
        own = [totals[place] for place in self._places] if totals else []
        clear: Callable[[list[float]], None] = super().clear_unused if self._inner is None else self._inner.clear_unused
        clear(own)
