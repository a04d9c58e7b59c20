"""Which collectives this rank waits in, from torch's flight recorder (on by ``TORCH_FR_BUFFER_SIZE``)."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import c10d_logger
from torch.distributed import distributed_c10d as c10d

from nbtrain.engine import guard, tracebacks
from nbtrain.parallel import waits

_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Char": "int8"}
_DTYPES |= {"BFloat16": "bfloat16", "Short": "int16", "Byte": "uint8", "Bool": "bool"}

_C10D = (c10d.__file__, c10d_logger.__file__, guard.__file__)  # whose functions wrap those of the first

_since_ns = 0


def begin() -> None:
    """Forget what is older: groups were formed again, and what was left in the old ones is no longer waited for."""
    global _since_ns
    _since_ns = time.time_ns()


def pending() -> list[dict[str, Any]]:
    """The collectives that were begun and have not ended, the oldest first.

    Each with ``op``, ``group`` (its name), ``ranks`` (of the group), ``seq``, ``sizes``, ``dtypes`` and ``waits_s``.
    Last are the messages of ``zero=1`` and of stages, which torch does not record and which may be ``told`` in words,
    and what the guard holds back. From any thread.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return [*waits.waiting(), *guard.waiting()]
    entries = json.loads(dump(True, False)).get("entries", [])
    left = [entry for entry in entries if not entry["retired"] and entry["time_created_ns"] > _since_ns]
    ranks = _ranks_by_group() if left else {}
    shown = [_shown(entry, ranks) for entry in left]
    called = tracebacks.called_in(*_C10D) if shown else ""
    if called:  # gloo's reduce-scatter shows as an all-reduce, and that of an object as what carries it
        shown[-1]["op"] = called
        shown[-1]["waits_s"] = max(shown[-1]["waits_s"], guard.held_s())
    return [*shown, *waits.waiting(), *guard.waiting()]


def _shown(entry: dict[str, Any], ranks: dict[str, list[int]]) -> dict[str, Any]:
    name = entry["process_group"][0]
    return {
        "op": entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
        "group": name,
        "ranks": ranks.get(name, []),
        "seq": entry["collective_seq_id"] or entry["p2p_seq_id"],
        "sizes": entry["input_sizes"],
        "dtypes": [_DTYPES.get(dtype, dtype.lower()) for dtype in entry["input_dtypes"]],
        "waits_s": (time.time_ns() - entry["time_created_ns"]) / 1e9,
    }


def _ranks_by_group() -> dict[str, list[int]]:
    """The ranks of each group, by its name in the flight recorder."""
    return {name: dist.get_process_group_ranks(group) for group, name in list(c10d._world.pg_names.items())}
