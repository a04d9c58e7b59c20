"""The shell of a rank: runs cells, and keeps an error as data."""

from __future__ import annotations

import ast
import asyncio
import sys
import traceback
from typing import Any

from ipykernel.displayhook import ZMQShellDisplayHook
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.error import UsageError as MagicUsageError
from traitlets import Type

from nbtrain.engine import debugger, exhaustion, groups, tracebacks, trail
from nbtrain.errors import UsageError


class RankDisplayHook(ZMQShellDisplayHook):
    """Keeps the value of a cell's last expression, also where a semicolon mutes its display."""

    value: Any = None

    def __call__(self, result: Any = None) -> None:
        self.value = result
        super().__call__(result)


class RankShell(ZMQInteractiveShell):
    """A shell that keeps an error as data instead of printing its traceback.

    The notebook shows each distinct error once, with the ranks that share it, so no rank formats its own.
    """

    displayhook_class = Type(RankDisplayHook)
    failure: dict[str, Any] | None = None
    cell_label: tuple[str, int] = ("", 0)
    cut_short: BaseException | None = None
    was_cancelled = False  # an interrupt has ended what the cell awaits
    cell_number = 0
    last_error: dict[str, Any] | None = None  # what `debug` looks for

    @property
    def debugger_cls(self) -> type[debugger.RankDebugger]:
        return debugger.RankDebugger

    def debugger(self, force: bool = False) -> None:
        """``%debug``."""
        if force or self.call_pdb:
            debugger.post_mortem()

    def let_go(self) -> None:
        """Drop what the frames of a cell hold that was interrupted, or for which the memory did not suffice.

        A loader's iterator among them, whose workers end with it, and the tensors that filled the memory.
        """
        if self.cut_short is None:
            return
        error, self.cut_short = self.cut_short, None
        traceback.clear_frames(error.__traceback__)
        if self.last_execution_result is not None:
            self.last_execution_result.error_in_exec = None
        if exhaustion.is_out_of_memory(error):
            error.__traceback__ = None
            exhaustion.give_back()

    def _format_exception_for_storage(self, exception: BaseException, *_: Any, **__: Any) -> dict[str, Any]:
        """IPython would format the traceback for its history, slowly, and keep the frames."""
        return {"ename": type(exception).__name__, "evalue": "", "traceback": []}

    def init_display_formatter(self) -> None:
        super().init_display_formatter()
        remember = self.compile.cache

        def cache(*args: Any, **kwargs: Any) -> str:
            name: str = remember(*args, **kwargs)
            label, offset = self.cell_label
            tracebacks.CELLS[name] = label
            tracebacks.pad(name, offset)
            return name

        self.compile.cache = cache
        self.ast_transformers.append(_CellLines(self))

    async def run_code(self, code_obj: Any, *args: Any, **kwargs: Any) -> bool:
        trail.trail.statement(code_obj)
        failed: bool = await super().run_code(code_obj, *args, **kwargs)
        return failed

    def ask_exit(self) -> None:
        """``exit`` and ``quit`` in a cell: the rank would die, and what it holds with it."""
        raise UsageError("a rank does not end from a cell; to end all of them type %distributed stop")

    def init_hooks(self) -> None:
        super().init_hooks()
        self.set_hook("show_in_pager", lambda _shell, text, *_, **__: print(_plain(text)), priority=0)

    def showtraceback(self, exc_tuple: Any = None, *_: Any, **__: Any) -> None:
        self._record(exc_tuple)
        if self.call_pdb and self.cut_short is None:  # %pdb on
            debugger.post_mortem()

    def showsyntaxerror(self, *_: Any, **__: Any) -> None:
        self._record(None)

    def show_usage_error(self, exc: MagicUsageError) -> None:
        self._record((type(exc), exc, exc.__traceback__))

    def _record(self, exc_tuple: Any) -> None:
        kind, value, trace = exc_tuple or sys.exc_info()
        if kind is None or value is None or self.failure is not None:
            return  # IPython may fail over the text of the first error; the first is the cell's
        if self.was_cancelled and issubclass(kind, asyncio.CancelledError):
            kind, value = KeyboardInterrupt, KeyboardInterrupt().with_traceback(trace)
        sys.stdout.flush()  # what was printed before the error is shown before it
        sys.stderr.flush()
        if issubclass(kind, KeyboardInterrupt) or exhaustion.is_out_of_memory(value):
            self.cut_short = value
        else:
            sys.last_type, sys.last_value, sys.last_traceback = kind, value, trace  # %debug reads these
        self.failure = tracebacks.describe(value, consequence=groups.was_freed())
        self._last_traceback = [kind.__name__]
        if self.cut_short is None:
            self.last_error = {
                "cell": self.cell_number,
                "time": self.failure["time"],
                "consequence": self.failure["consequence"],
            }


class _CellLines:
    """Numbers a cell's lines as the notebook does, for errors, warnings and debuggers alike."""

    def __init__(self, shell: RankShell) -> None:
        self.shell = shell

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.increment_lineno(node, self.shell.cell_label[1])


def _plain(text: Any) -> str:
    """What ``name?`` would show in a pager: a rank has none."""
    return str(text.get("text/plain", "")) if isinstance(text, dict) else str(text)
