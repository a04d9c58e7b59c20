"""Whether the kernel's out-of-memory killer was at work: it sends SIGKILL and says nothing."""

from __future__ import annotations

import re
from pathlib import Path

_COUNTERS = ("/sys/fs/cgroup/memory.events", "/proc/vmstat")
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OutOfMemory:
    """Counts kills from now on. Where the system does not count them, there are none."""

    def __init__(self) -> None:
        self._seen = _kills()

    def ran_out(self) -> bool:
        """Whether there was a kill since the last call."""
        before, self._seen = self._seen, _kills()
        return self._seen > before


def _kills() -> int:
    return sum(int(count) for path in _COUNTERS for count in _KILLS.findall(_read(path)))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
