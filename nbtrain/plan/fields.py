"""What each field of a plan may hold: one checker a field, and the error when a value is not allowed.

A checker returns the value in its stored form, so that ``offload="params+optimizer"`` and
``offload=["optimizer", "params"]`` make equal plans.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nbtrain.errors import PlanError, nearest

SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)
PRECISIONS = ("fp32", "bf16", "fp16")
OFFLOADS = ("params", "optimizer", "activations")
RECOMPUTES = ("none", "full", "selective")
ALGORITHMS = (
    "allreduce",
    "fp16",
    "powersgd",
    "bytegrad",
    "qadam",
    "decentralized",
    "low_precision_decentralized",
    "async_average",
    "post_local_sgd",
)

Check = Callable[[str, Any], Any]


def _is_int(value: object) -> bool:
    # True == 1, but `tp=True` is a mistake and not a degree
    return isinstance(value, int) and not isinstance(value, bool)


def _count(name: str, value: Any) -> int:
    if _is_int(value) and value >= 1:
        return int(value)
    raise PlanError(f"{name}={value!r} must be an integer of at least 1, e.g. {name}=2")


def _data_degree(name: str, value: Any) -> int:
    if value == -1 and _is_int(value):
        return -1
    if _is_int(value) and value >= 1:
        return int(value)
    raise PlanError(f"{name}={value!r} must be at least 1, or -1 for all ranks that are left; type {name}=-1")


def _optional_count(name: str, value: Any) -> int | None:
    return None if value is None else _count(name, value)


def _optional_megabytes(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return value
    raise PlanError(f"{name}={value!r} must be a positive number of megabytes, e.g. {name}=25")


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise PlanError(f"{name}={value!r} must be True or False")


def _one_of(choices: Iterable[Any]) -> Check:
    allowed = tuple(choices)

    def check(name: str, value: Any) -> Any:
        # by type too: 1.0 and True are equal to 1
        if any(type(value) is type(choice) and value == choice for choice in allowed):
            return value
        raise PlanError(f"{name}={value!r} is not one of {_listed(allowed)}{_hint(value, allowed)}")

    return check


def _recompute(name: str, value: Any) -> str | int:
    if value in RECOMPUTES or (_is_int(value) and value >= 1):
        return value  # type: ignore[no-any-return]  # str or int, as just tested
    raise PlanError(
        f"{name}={value!r} is not one of {_listed(RECOMPUTES)} or n, for every n-th block{_hint(value, RECOMPUTES)}"
    )


def _offload(name: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    parts = _names(value)
    if parts is None or not parts:
        raise PlanError(f"{name}={value!r} must be None or any of {_listed(OFFLOADS)}, joined by '+'")
    for part in parts:
        if part not in OFFLOADS:
            raise PlanError(f"{name} names {part!r}, which is not one of {_listed(OFFLOADS)}{_hint(part, OFFLOADS)}")
    return tuple(choice for choice in OFFLOADS if choice in parts)


def _split(name: str, value: Any) -> str | tuple[str, ...]:
    if value == "auto":
        return "auto"
    parts = _names(value)
    if not parts or len(set(parts)) != len(parts):
        raise PlanError(
            f"{name}={value!r} must be 'auto' or the distinct names of the modules that begin a stage, "
            f"e.g. {name}=['blocks.2', 'blocks.4']"
        )
    return parts


def _tp_plan(name: str, value: Any) -> str | Mapping[str, str]:
    if value == "auto":
        return "auto"
    if isinstance(value, Mapping) and all(isinstance(word, str) for pair in value.items() for word in pair):
        return types.MappingProxyType(dict(value))
    raise PlanError(
        f"{name}={value!r} must be 'auto' or a dict from module names to styles, "
        f"e.g. {name}={{'blocks.*.mlp.up': 'colwise'}}"
    )


def _names(value: Any) -> tuple[str, ...] | None:
    """``"a+b"``, ``["a", "b"]`` and ``("a", "b")`` as a tuple; None for anything else."""
    parts = value.split("+") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple | set | frozenset):
        return None
    if not all(isinstance(part, str) and part.strip() for part in parts):
        return None
    return tuple(part.strip() for part in parts)


def _listed(choices: Iterable[Any]) -> str:
    return ", ".join(map(repr, choices))


def _hint(value: Any, choices: Iterable[Any]) -> str:
    words = [choice for choice in choices if isinstance(choice, str)]
    hint = nearest(value, words) if isinstance(value, str) and words else ""
    return f"; {hint}" if hint.startswith("did you mean") else ""


CHECKS: dict[str, Check] = {
    "dp_replicate": _data_degree,
    "dp_shard": _data_degree,
    "tp": _count,
    "pp": _count,
    "zero": _one_of(range(4)),
    "schedule": _one_of(SCHEDULES),
    "num_microbatches": _optional_count,
    "num_virtual_stages": _optional_count,
    "sequence_parallel": _flag,
    "loss_parallel": _flag,
    "tp_plan": _tp_plan,
    "split": _split,
    "precision": _one_of(PRECISIONS),
    "recompute": _recompute,
    "offload": _offload,
    "algorithm": _one_of(ALGORITHMS),
    "bucket_mb": _optional_megabytes,
    "hierarchical": _flag,
}
