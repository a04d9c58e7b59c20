"""The debugger of a rank: IPython's, with the notebook's cell as its terminal.

Its stack begins at the cell: what is above is the engine. An interrupt ends the debugger and the cell, and is not taken
for a wish to look around, since it is how a person frees a session.
"""

from __future__ import annotations

import bdb
import code
import pdb
import sys
import time
from types import FrameType, TracebackType
from typing import Any

from IPython.core import debugger as upstream

from nbtrain.engine import tracebacks
from nbtrain.errors import UsageError


class RankDebugger(upstream.Pdb):
    """Asks through ``input()``, which a rank passes on to the notebook."""

    interrupt: KeyboardInterrupt | None = None
    shown: FrameType | None = None  # where it last stopped at a line

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "nosigint": True})  # Ctrl-C is the session's

    def get_stack(self, frame: FrameType | None, trace: TracebackType | None) -> tuple[list[Any], int]:
        """From the cell's frame on; after an error the innermost frame that is the person's own comes first."""
        stack, position = super().get_stack(frame, trace)
        kinds = [tracebacks.kind(entry[0].f_code.co_filename) for entry in stack]
        first = kinds.index("cell") if "cell" in kinds else 0
        if trace is not None:
            position = max((i for i, kind in enumerate(kinds) if kind != "library"), default=position)
        return stack[first:], max(position - first, 0)

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        """A cell by the notebook's name for it, not by the temporary file that Python knows."""
        text = super().format_stack_entry(frame_lineno, lprefix)
        file = frame_lineno[0].f_code.co_filename
        label = tracebacks.CELLS.get(file, "")
        return str(text.replace(self.canonic(file), label) if label else text)

    def stop_here(self, frame: FrameType) -> bool:
        """Not in the engine, when a step leads out of the cell."""
        return _in_cell(frame) and bool(super().stop_here(frame))

    def user_line(self, frame: FrameType) -> None:
        self.shown = frame
        super().user_line(frame)

    def user_call(self, frame: FrameType, args: Any) -> None:
        """A cell's statements are run one by one: they are no calls to a person."""
        if not _is_statement(frame):
            super().user_call(frame, args)

    def user_return(self, frame: FrameType, value: Any) -> None:
        """Nor do they return, unless ``breakpoint()`` is the last that one of them does."""
        if not _is_statement(frame):
            super().user_return(frame, value)
        elif self.shown is not frame:
            self.interaction(frame, None)

    def interaction(self, frame: FrameType | None, trace: Any) -> None:
        super().interaction(frame, trace)
        if self.interrupt is not None:
            interrupt, self.interrupt = self.interrupt, None
            sys.settrace(None)
            raise interrupt

    def _cmdloop(self) -> None:
        try:
            self.cmdloop()
        except KeyboardInterrupt as interrupt:  # raised behind the debugger, which would go on
            self.interrupt = interrupt

    def do_interact(self, arg: str) -> None:
        """interact: type Python in this frame's names; exit() comes back to the debugger."""
        assert self.curframe is not None
        names = {**self.curframe.f_globals, **self._curframe_locals, "exit": _leave, "quit": _leave}
        try:
            code.interact("type exit() to come back to the debugger", local=names, exitmsg="")
        except SystemExit:
            return


def install() -> None:
    """Make ``breakpoint()``, ``pdb.set_trace()`` and ``pdb.post_mortem()`` ask at the notebook."""
    pdb.Pdb = RankDebugger  # type: ignore[misc]
    pdb.set_trace = set_trace
    sys.breakpointhook = sys.__breakpointhook__  # debugpy, which ipykernel imports, has put its own there


def set_trace(frame: FrameType | None = None, header: str | None = None, **_: Any) -> None:
    """Stop at the caller's next line."""
    debugger = RankDebugger()
    if header is not None:
        debugger.message(header)
    debugger.set_trace(frame or sys._getframe().f_back)


def post_mortem() -> None:
    """Look at the frames of the last error.

    Raises:
        UsageError: there was none.
    """
    error = getattr(sys, "last_value", None)
    if error is None or error.__traceback__ is None:
        raise UsageError("this rank had no error to debug; type %debug after a cell that failed")
    debugger = RankDebugger()
    debugger.reset()
    debugger.interaction(None, error if sys.version_info >= (3, 13) else error.__traceback__)


def was_quit(result: Any) -> bool:
    """Whether a cell ended since the person typed q. IPython shows nothing then."""
    return isinstance(getattr(result, "error_in_exec", None), bdb.BdbQuit)


def quit_failure() -> dict[str, Any]:
    """What the notebook shows of it: no frames, since the person knows where they were."""
    link = {"ename": "BdbQuit", "evalue": "the debugger was quit, and the cell with it", "frames": []}
    return {"time": time.time(), "consequence": False, "chain": [link]}


def end() -> None:
    """The cell is over: no longer trace what runs."""
    owner = getattr(sys.gettrace(), "__self__", None)
    if isinstance(owner, bdb.Bdb):
        sys.settrace(None)


def _is_statement(frame: FrameType) -> bool:
    return frame.f_code.co_name == "<module>" and tracebacks.kind(frame.f_code.co_filename) == "cell"


def _in_cell(frame: FrameType | None) -> bool:
    """Whether the cell, or something that it called, runs in ``frame``."""
    while frame is not None:
        if tracebacks.kind(frame.f_code.co_filename) == "cell":
            return True
        frame = frame.f_back
    return False


def _leave(*_: Any) -> None:
    raise SystemExit
