"""Which collectives this rank waits in, from torch's flight recorder (on by ``TORCH_FR_BUFFER_SIZE``)."""

from __future__ import annotations

import json
import time
from typing import Any

import torch

_since_ns = 0


def begin() -> None:
    """Forget what is older: groups were formed again, and what was left in the old ones is no longer waited for."""
    global _since_ns
    _since_ns = time.time_ns()


def pending() -> list[dict[str, Any]]:
    """The collectives that were begun and have not ended, the oldest first.

    Each with ``op``, ``group``, ``seq``, ``sizes``, ``dtypes`` and ``waits_s``. From any thread.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return []
    entries = json.loads(dump(True, False)).get("entries", [])
    return [_shown(entry) for entry in entries if not entry["retired"] and entry["time_created_ns"] > _since_ns]


def _shown(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "op": entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
        "group": entry["process_group"][1],
        "seq": entry["collective_seq_id"] or entry["p2p_seq_id"],
        "sizes": entry["input_sizes"],
        "dtypes": entry["input_dtypes"],
        "waits_s": (time.time_ns() - entry["time_created_ns"]) / 1e9,
    }
