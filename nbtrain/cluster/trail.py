"""The last line that a dead rank ran, read from the trail that it left (`nbtrain.engine.trail`)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from nbtrain.events import TRAIL_BYTES

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def last_line(path: Path) -> str:
    """ "Cell In[5], line 3: x = f(y)"; empty if the rank ran no cell, or left no trail."""
    try:
        data = path.read_bytes()
    except OSError:
        return ""
    record = _record(data[:TRAIL_BYTES])
    if record is None:
        return ""
    number = _crashed_at(data[TRAIL_BYTES:].decode(errors="replace"), record["file"])
    text = f": {record['line']}" if record["line"] and number in (None, record["number"]) else ""
    return f"{record['cell'] or 'the cell'}, line {number or record['number']}{text}"


def _record(data: bytes) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] | None = json.loads(data.strip(b"\0 \n") or b"null")
    except ValueError:  # the machine went down in the middle of a write
        return None
    return record


def _crashed_at(dump: str, file: str) -> int | None:
    """The innermost line of ``file`` in faulthandler's dump, which knows better than a look a moment before."""
    return next((int(number) for name, number in _FRAME.findall(dump) if name == file), None)
