"""Which GPUs there are, without initialising CUDA and without torch."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from pathlib import Path

from nbtrain.errors import UsageError


def visible_gpus() -> list[str]:
    """The GPUs that a process started from here could use, as CUDA_VISIBLE_DEVICES names them."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [name.strip() for name in allowed.split(",") if name.strip() and name.strip() != "-1"]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    asked = subprocess.run(
        [tool, "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True, timeout=30, check=False
    )
    return asked.stdout.split() if asked.returncode == 0 else []


def choose_gpus(spec: str | None, visible: list[str]) -> list[str]:
    """The GPUs that ``--gpus`` picks by position: ``"0,1"``, ``"none"`` for the CPU, None for all.

    Raises:
        UsageError: a GPU that is not there.
    """
    if spec is None:
        return visible
    if spec.strip().lower() in ("none", "cpu", ""):
        return []
    wanted = [part.strip() for part in spec.split(",")]
    unknown = [part for part in wanted if not part.isdigit() or int(part) >= len(visible)]
    if unknown:
        there = (
            f"choose from {', '.join(map(str, range(len(visible))))}" if visible else "there is none; type --gpus none"
        )
        raise UsageError(f"--gpus {spec}: there is no GPU {unknown[0]!r}; {there}")
    if len(set(wanted)) != len(wanted):
        raise UsageError(f"--gpus {spec}: one GPU is named twice, and each rank needs its own; name each once")
    return [visible[int(part)] for part in wanted]


def threads_per_rank(num_ranks: int) -> int:
    """Intra-operation CPU threads for each of ``num_ranks`` ranks on this machine: cores / ranks, at least 1."""
    return max(1, usable_cores() // num_ranks)


def usable_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The cores that this process may use: those it may run on, and no more than its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return cores
