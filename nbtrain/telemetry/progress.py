"""`progress`: a bar with loss, samples a second and the time left."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, TextIO, TypeVar

T = TypeVar("T")

_INTERVAL_S = 0.1
_FULL, _EMPTY = "█", "░"


class Progress(Generic[T]):
    """Iterates what it was given, and draws at most ten times a second.

    ::

        for batch in (bar := nt.progress(loader)):
            bar.update(loss=trainer.step(*batch))
    """

    def __init__(
        self,
        iterable: Iterable[T],
        *,
        total: int | None = None,
        label: str = "",
        samples: int | None = None,
        file: TextIO | None = None,
    ) -> None:
        self._iterable = iterable
        self._total = total if total is not None else _length(iterable)
        self._label = label
        self._samples = samples if samples is not None else getattr(iterable, "batch_size", None)
        self._file = file
        self._values: dict[str, Any] = {}
        self._done = 0
        self._started = self._drawn = 0.0
        self._width = 0

    def __len__(self) -> int:
        if self._total is None:
            raise TypeError("the length is not known; give total=")
        return self._total

    def __iter__(self) -> Iterator[T]:
        self._done, self._started = 0, time.perf_counter()
        self._draw()
        try:
            for item in self._iterable:
                yield item
                self._done += 1
                if time.perf_counter() - self._drawn >= _INTERVAL_S:
                    self._draw()
        finally:
            self._draw(end="\n")

    def update(self, **values: Any) -> None:
        """Shows ``values`` from the next drawing on. A tensor is read then, not now: reading waits for a GPU."""
        self._values.update(values)

    def _draw(self, end: str = "") -> None:
        file = self._file or sys.stderr
        line = self._line()
        # blanks cover what is left of a longer line
        file.write(f"\r{line}{' ' * (self._width - len(line))}{end}")
        file.flush()
        self._width = len(line)
        self._drawn = time.perf_counter()

    def _line(self) -> str:
        elapsed_s = time.perf_counter() - self._started
        values = [f"{name} {_number(value)}" for name, value in self._values.items()]
        parts = [self._count(), *values, self._speed(elapsed_s), self._time(elapsed_s)]
        text = "  ".join(part for part in parts if part)
        columns = shutil.get_terminal_size((80, 24)).columns - 1
        return f"{self._head(columns - len(text))}{text}"[: max(columns, 20)]

    def _head(self, room: int) -> str:
        label = f"{self._label} " if self._label else ""
        width = min(20, room - len(label) - 1)
        if self._total is None or width < 5:
            return label
        full = width * min(self._done, self._total) // max(self._total, 1)
        return f"{label}{_FULL * full}{_EMPTY * (width - full)} "

    def _count(self) -> str:
        return f"{self._done}" if self._total is None else f"{self._done}/{self._total}"

    def _speed(self, elapsed_s: float) -> str:
        if not self._done or elapsed_s <= 0:
            return ""
        rate = self._done / elapsed_s
        return f"{rate * self._samples:.4g} samples/s" if self._samples else f"{rate:.4g} it/s"

    def _time(self, elapsed_s: float) -> str:
        if self._total is None or not self._done or self._done >= self._total:
            return _clock(elapsed_s)
        return f"{_clock(elapsed_s / self._done * (self._total - self._done))} left"


def progress(
    iterable: Iterable[T],
    *,
    total: int | None = None,
    label: str = "",
    samples: int | None = None,
    file: TextIO | None = None,
) -> Progress[T]:
    """A bar over ``iterable``.

    Args:
        iterable: E.g. a loader.
        total: Items; None takes ``len(iterable)`` where there is one.
        label: Stands in front.
        samples: Global samples an item; None takes ``iterable.batch_size`` where there is one.
        file: Where it is drawn; None takes stderr.
    """
    return Progress(iterable, total=total, label=label, samples=samples, file=file)


def _length(iterable: Iterable[Any]) -> int | None:
    return len(iterable) if isinstance(iterable, Sized) else None


def _number(value: Any) -> str:
    number = value.item() if hasattr(value, "item") else value
    return f"{number:.4g}" if isinstance(number, float) else str(number)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
