"""Every error that nbtrain raises.

::

    NbtrainError
    ├── PlanError (ValueError)             a layout that cannot be
    ├── ModelError (ValueError)            a model that the plan cannot hold
    ├── OptimizerError (ValueError)        an optimizer that would train nothing
    ├── BatchError (ValueError)            a batch that cannot be divided
    ├── GradientError (ArithmeticError)    gradients that are not finite
    ├── CheckpointError (RuntimeError)     a checkpoint that cannot be written, or that does not fit
    ├── CollectiveError (RuntimeError)     ranks that call different collectives, or one with different tensors
    ├── UsageError (ValueError)            a magic's line or an argument that cannot be understood
    │   └── RankSpecError                  ranks that do not exist
    └── SessionError (RuntimeError)        the session is not in the state that the request needs
        ├── NotStartedError                no ranks run
        ├── BusyError                      the ranks still run another cell
        ├── StartError                     the ranks could not be started
        ├── RankDiedError                  a rank's process ended
        ├── CellTimeoutError               a cell ran past its --timeout
        └── CellError                      a cell raised on some rank
    KeyboardInterrupt
    └── CellInterrupted                    a cell was interrupted

A message says what was given, what was expected and what to type next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


class NbtrainError(Exception):
    """Base of all."""


class PlanError(NbtrainError, ValueError):
    """A layout that cannot be: values out of range, or degrees that do not multiply to the world size."""


class ModelError(NbtrainError, ValueError):
    """A model that the plan cannot hold, for instance one without parameters."""


class OptimizerError(NbtrainError, ValueError):
    """An optimizer that would train nothing: it holds other tensors than the model's parameters."""


class BatchError(NbtrainError, ValueError):
    """A batch that cannot be divided among the ranks or microbatches."""


class GradientError(NbtrainError, ArithmeticError):
    """Gradients that are not finite. The weights are those of the step before."""


class CheckpointError(NbtrainError, RuntimeError):
    """A checkpoint that could not be written, or that does not fit what is to take it."""


class CollectiveError(NbtrainError, RuntimeError):
    """Ranks call different collectives where they must call the same, or one with different tensors.

    ``begun``: some rank had begun, so that the group is not as it was; else nothing was sent.
    """

    def __init__(self, message: str, *, begun: bool = False) -> None:
        super().__init__(message)
        self.begun = begun


class UsageError(NbtrainError, ValueError):
    """A magic's line or an argument that cannot be understood."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class RankSpecError(UsageError):
    """A rank specification that is malformed or names ranks that do not exist."""


class SessionError(NbtrainError, RuntimeError):
    """The session is not in the state that the request needs."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows this instead of frames, none of which is the user's.
        return [f"{type(self).__name__}: {self}"]


class NotStartedError(SessionError):
    """No ranks run."""


class BusyError(SessionError):
    """The ranks still run another cell."""


class StartError(SessionError):
    """The ranks could not be started."""


class RankDiedError(SessionError):
    """A rank's process ended."""


class CellTimeoutError(SessionError):
    """A cell ran past its ``--timeout``."""


class CellError(SessionError):
    """A cell raised on some rank. It renders each distinct error once, with the ranks that share it.

    ``groups`` are `nbtrain.cluster.failures.Group`, the first failure first; ``lines`` are what the notebook shows.
    """

    def __init__(self, message: str, groups: Sequence[Any] = (), lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.groups = tuple(groups)
        self.lines = list(lines)

    def _render_traceback_(self) -> list[str]:
        return self.lines or super()._render_traceback_()


class CellInterrupted(KeyboardInterrupt):
    """A cell was interrupted. A KeyboardInterrupt, so that it passes through ``except Exception``."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


def nearest(word: str, valid: Iterable[str]) -> str:
    """A clause that names the valid word closest to ``word``, or all of them: for error messages."""
    choices = list(valid)
    begun = [choice for choice in choices if choice.startswith(word)] if word else []
    if len(begun) == 1:
        return f"did you mean {begun[0]!r}?"
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"choose from {', '.join(choices)}"


def first_line(problem: BaseException) -> str:
    """An exception's class and the first line of what it says: for errors that it is the cause of."""
    text = str(problem).strip().partition("\n")[0]
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__
