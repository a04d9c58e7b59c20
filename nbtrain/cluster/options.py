"""What ``start`` may be given, checked in one place for the magic and for Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from nbtrain.cluster import devices
from nbtrain.cluster.hangwatch import HANG_AFTER_S
from nbtrain.cluster.launch import Request
from nbtrain.errors import UsageError, nearest

DEFAULT_CPU_RANKS = 4
BACKENDS = ("auto", "gloo", "nccl")


@dataclass(frozen=True)
class Options:
    """The options of a session; None means the default. See `nbtrain.Session` for their meaning."""

    n: int | None = None
    gpus: str | None = None
    backend: str = "auto"
    threads: int | None = None
    launcher: str = "local"
    hang_after: float = HANG_AFTER_S

    def __post_init__(self) -> None:
        for name in ("n", "threads"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{_flag(name)} {value}: give a whole number from 1, e.g. {_flag(name)} 4")
        if not self.hang_after > 0:
            raise UsageError(f"--hang-after {self.hang_after}: give a positive number of seconds, e.g. --hang-after 10")
        if self.backend not in BACKENDS:
            raise UsageError(f"--backend {self.backend}: {nearest(self.backend, BACKENDS)}")

    def updated(self, given: Mapping[str, Any]) -> Options:
        """With the values that are given and not None.

        Raises:
            UsageError: an option that does not exist, or a value that cannot be.
        """
        known = [field.name for field in fields(self)]
        for name in given:
            if name not in known:
                raise UsageError(f"start has no option {name!r}; {nearest(name, known)}")
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def differences(self, other: Options) -> str:
        """The options in which ``other`` differs, as one would type them."""
        changed = {
            f.name: getattr(other, f.name) for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)
        }
        return " ".join(f"{_flag(name)} {value}" for name, value in changed.items())

    def request(self) -> Request:
        """What to start on this machine.

        Raises:
            UsageError: more ranks than GPUs, GPUs that are not there, or nccl without GPUs.
        """
        visible = devices.visible_gpus() if self.backend != "gloo" else []
        gpus = devices.choose_gpus(self.gpus, visible)
        count = self.n or len(gpus) or DEFAULT_CPU_RANKS
        if gpus and count > len(gpus):
            raise UsageError(
                f"-n {count}: there are {len(gpus)} GPUs and each rank needs one; "
                f"type -n {len(gpus)}, or -n {count} --gpus none for CPU ranks"
            )
        if self.backend == "nccl" and not gpus:
            raise UsageError("--backend nccl needs GPUs and there is none; type --backend gloo")
        return Request(count, tuple(gpus[:count]), self.threads or devices.threads_per_rank(count), self.backend)


def _flag(name: str) -> str:
    return "-n" if name == "n" else f"--{name.replace('_', '-')}"
