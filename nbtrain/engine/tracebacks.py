"""An exception as data: which frames are the cell's, which are the user's files, which are libraries'."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
import threading
import time
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

# Set by a peer's failure, not by this rank's own: they are shown after the failure that caused them.
_CONSEQUENCES = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Software caused connection abort|"
    r"NCCL communicator was aborted|Read error \[",
)
_CELL_FILE = re.compile(r"<ipython-input-|ipykernel_\d+/|<cell")
_LIBRARIES = tuple(
    {
        str(Path(path).resolve())
        for path in (
            *(sysconfig.get_path(name) or "" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
            str(Path(__file__).parents[1]),
        )
    }
)
_SPOTS = tuple(
    (str(Path(*file.split("/"))), function, name)
    for file, function, name in (
        ("torch/utils/data/dataloader.py", "__next__", "next(loader)"),
        ("nbtrain/parallel/trainer.py", "step", "Trainer.step"),
        ("nbtrain/parallel/trainer.py", "evaluate", "Trainer.evaluate"),
        ("torch/autograd/__init__.py", "backward", "backward"),
    )
)
MAX_MESSAGE = 4000  # characters of an exception's text

# What the notebook calls a cell's file. Its line numbers are the notebook's: see `nbtrain.engine.shell`.
CELLS: dict[str, str] = {}


def describe(error: BaseException, *, consequence: bool = False) -> dict[str, Any]:
    """``error`` and its causes as JSON-friendly data; ``frames`` run from the cell's line to where it was raised.

    ``consequence`` says that another rank's failure is known to have caused it.
    """
    return {
        "time": time.time(),
        "consequence": consequence or bool(_CONSEQUENCES.search(_text(error))),
        "chain": [_one(link) for link in _chain(error)],
    }


def current_line() -> dict[str, Any]:
    """Where the main thread is.

    ``cell`` is the innermost line of a cell, ``user`` that of the user's own files if it is further in, ``inner`` the
    innermost of all, ``spot`` what is called there that a person knows by name.
    """
    stack = _stack(_main_frame())
    kinds = [kind(f.f_code.co_filename) for f, _ in stack]
    first_cell = kinds.index("cell") if "cell" in kinds else len(stack)
    own = kinds.index("user") if "user" in kinds[:first_cell] else None
    spots = (_spot(f) for f, _ in stack[:first_cell])
    return {
        "cell": _placed(stack[first_cell]) if "cell" in kinds else None,
        "user": _placed(stack[own]) if own is not None else None,
        "inner": _placed(stack[0]) if stack else None,
        "spot": next((spot for spot in spots if spot), ""),
    }


def called_in(file: str, *wrappers: str) -> str:
    """The function of ``file`` that the main thread called, perhaps through ``wrappers``, if it is still in there."""
    called = ""
    innermost = _main_frame()
    while innermost is not None and innermost.f_code.co_filename in (file, *wrappers):
        if innermost.f_code.co_filename == file:
            called = innermost.f_code.co_name
        innermost = innermost.f_back
    return called


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _spot(at: FrameType) -> str:
    """``next(loader)``, for instance; empty for what has no such name."""
    code = at.f_code
    return next((name for file, function, name in _SPOTS if code.co_name == function and file in code.co_filename), "")


def _placed(entry: tuple[FrameType, int]) -> dict[str, Any]:
    return source_line(entry[0].f_code.co_filename, entry[1], entry[0].f_code.co_name)


def cell_line() -> dict[str, Any] | None:
    """The innermost line of a cell that the main thread runs. Cheap: it is looked at ten times a second."""
    innermost = _main_frame()
    while innermost is not None and not is_cell(innermost.f_code.co_filename):
        innermost = innermost.f_back
    return innermost and source_line(innermost.f_code.co_filename, innermost.f_lineno, innermost.f_code.co_name)


def pad(file: str, num_lines: int) -> None:
    """Make ``file``'s source begin ``num_lines`` further down: those of the cell that were not sent."""
    size, stamp, lines, name = linecache.cache[file]  # type: ignore[misc]
    linecache.cache[file] = (size, stamp, ["\n"] * num_lines + lines, name)


def _chain(error: BaseException) -> list[BaseException]:
    """The exceptions that led to ``error``, the oldest first."""
    links = [error]
    while len(links) < 8:
        last = links[-1]
        before = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if before is None or before in links:
            break
        links.append(before)
    return links[::-1]


def _one(error: BaseException) -> dict[str, Any]:
    frames = _folded(error.__traceback__)
    first = next((i for i, f in enumerate(frames) if f["kind"] == "cell"), None)
    shown = frames[first:] if first is not None else frames  # above the cell there is only the kernel
    if isinstance(error, SyntaxError) and error.lineno:
        shown = [
            *shown,
            {**source_line(error.filename or "<cell>", error.lineno, ""), "line": (error.text or "").rstrip()},
        ]
    return {"ename": type(error).__name__, "evalue": _text(error), "frames": shown}


def _folded(trace: TracebackType | None) -> list[dict[str, Any]]:
    """The frames from the outermost on; one that repeats itself (a recursion) is told once, with a count."""
    frames: list[dict[str, Any]] = []
    for one, number in traceback.walk_tb(trace):
        code = one.f_code
        if frames and (frames[-1]["file"], frames[-1]["number"]) == (code.co_filename, number):
            frames[-1]["times"] += 1
        else:
            frames.append({**source_line(code.co_filename, number, code.co_name), "times": 1})
    return frames


def _text(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return error.msg or "invalid syntax"
    try:
        text = str(error)
    except Exception as broken:
        text = f"<its text raised {type(broken).__name__}>"
    parts = [f"  - {type(part).__name__}: {part}" for part in getattr(error, "exceptions", ())]
    text = "\n".join([text, *map(str, getattr(error, "__notes__", ())), *parts])
    text = text.encode("utf-8", "backslashreplace").decode()  # lone surrogates cannot be sent
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}… ({len(text)} characters)"


def source_line(file: str, line_number: int, function: str) -> dict[str, Any]:
    """A line of source as data."""
    whose = kind(file)
    around = range(line_number - 1, line_number + 2) if whose != "library" else (line_number,)
    return {
        "file": file,
        "number": line_number,
        "function": function,
        "kind": whose,
        "cell": CELLS.get(file, ""),
        "line": linecache.getline(file, line_number).rstrip(),
        "around": [[n, linecache.getline(file, n).rstrip()] for n in around if n > 0],
    }


def is_cell(file: str) -> bool:
    """Whether a code object's file name is a cell's."""
    return bool(_CELL_FILE.search(file))


def kind(file: str) -> str:
    """Whose code a file is: "cell", "user" or "library"."""
    if is_cell(file):
        return "cell"
    return "library" if file.startswith(_LIBRARIES) or file.startswith("<") else "user"


def _stack(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    frames = []
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return frames
