"""What the notebook asks of a rank at any time: answered on the control thread, while the main thread runs a cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbtrain.engine import groups, guard, prompts, recorder, tracebacks


def complete(kernel: Any, code: str, cursor: int) -> dict[str, Any]:
    """Completions of ``code`` at ``cursor`` from the rank's namespace."""
    reply: dict[str, Any] = kernel.do_complete(code, cursor)
    return reply


def where(kernel: Any) -> dict[str, Any]:
    """The line that the main thread runs now, the collectives that it waits in, and whether it ``asks`` a person."""
    return {
        **tracebacks.current_line(),
        "pending": recorder.pending(),
        "activity": "guard" if guard.waiting() else "",
        "asks": prompts.standing(),
    }


def free(kernel: Any) -> bool:
    """Cut the main thread out of the collective that it waits in."""
    return groups.free()


def pending(kernel: Any) -> list[dict[str, Any]]:
    """The collectives that this rank waits in."""
    return recorder.pending()


def last_error(kernel: Any) -> dict[str, Any] | None:
    """When the last error of a cell was, and in which; None if there was none."""
    return kernel.shell.last_error


CONTROL: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (complete, where, free, pending, last_error, prompts.answer)
}
