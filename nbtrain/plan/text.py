"""A plan as one line of text, and back: ``zero=3,tp=2,offload=params+optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nbtrain.errors import PlanError, nearest
from nbtrain.plan.fields import CHECKS

_FLAGS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def parse_spec(spec: str) -> dict[str, Any]:
    """The fields that ``spec`` sets. A plan's repr is understood too, so that printed plans can be pasted.

    Raises:
        PlanError: A part is not ``field=value``, names no field, repeats one or has a value of another kind.
    """
    if not isinstance(spec, str):
        raise PlanError(f"{spec!r} is no text of a plan; type e.g. nt.Plan.parse('zero=3,tp=2')")
    if ";" in spec:
        raise PlanError(f"{spec!r} has a semicolon; fields are separated by commas: {spec.replace(';', ',')!r}")
    values: dict[str, Any] = {}
    for part in filter(None, map(str.strip, _unwrap(spec).split(","))):
        name, word = _halves(part)
        if name in values:
            raise PlanError(f"{name} is given twice in {spec!r}; keep one of the two")
        values[name] = _read(name, word)
    return values


_DATA = "dp_shard=2, or dp_replicate=2 for whole copies"
_AXES = {"data": _DATA, "dp": _DATA, "tensor": "tp=2", "tp": "tp=2", "pipeline": "pp=2", "pp": "pp=2"}
_MEANT = {
    "ddp": "zero=0",
    "fsdp": "zero=3",
    "bf16": "precision='bf16'",
    "fp16": "precision='fp16'",
    "amp": "precision='bf16'",
    "dtype": "precision='bf16'",
    "activation_checkpointing": "recompute='full'",
    "gradient_checkpointing": "recompute='full'",
    "cpu_offload": "offload='params+optimizer'",
    "microbatches": "num_microbatches=8",
    "stages": "pp=2",
    "num_stages": "pp=2",
}
"""What people call fields elsewhere, and what to type here."""


def require_fields(names: Mapping[str, Any] | set[str]) -> None:
    """Raises `PlanError` for the first name that is no field of a plan."""
    for name in names:
        if name not in CHECKS:
            axis = name.removesuffix("_size").removesuffix("_degree").removesuffix("_parallel")
            meant = _MEANT.get(name) or _AXES.get(axis)
            raise PlanError(f"a plan has no field {name!r}; {f'type {meant}' if meant else nearest(name, CHECKS)}")


def spell(value: Any) -> Any:
    """The form of a stored value that reads best: names joined by ``+``, a read-only mapping as a dict."""
    if isinstance(value, tuple):
        return "+".join(value)
    return dict(value) if isinstance(value, Mapping) else value


def _unwrap(spec: str) -> str:
    text = spec.strip()
    return text[len("Plan(") : -1] if text.startswith("Plan(") and text.endswith(")") else text


def _halves(part: str) -> tuple[str, str]:
    name, equals, word = (half.strip() for half in part.partition("="))
    if not equals or not word:
        raise PlanError(f"{part!r} is not of the form field=value, e.g. zero=3")
    require_fields({name})
    return name, word.strip("'\"")


def _read(name: str, word: str) -> Any:
    if name == "tp_plan" and word != "auto":
        raise PlanError("tp_plan can be given in text as 'auto' only; for a dict type Plan(tp_plan={...})")
    if word.lower() == "none" and name != "recompute":
        return None
    reader = _READERS.get(name, _int)
    return reader(name, word)


def _int(name: str, word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise PlanError(f"{name}={word} is not an integer, e.g. {name}=2") from None


def _float(name: str, word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise PlanError(f"{name}={word} is not a number, e.g. {name}=25") from None


def _flag(name: str, word: str) -> bool:
    if word.lower() not in _FLAGS:
        raise PlanError(f"{name}={word} must be true or false")
    return _FLAGS[word.lower()]


def _word(name: str, word: str) -> str:
    return word


def _word_or_int(name: str, word: str) -> str | int:
    return int(word) if word.lstrip("-").isdigit() else word


_READERS: dict[str, Callable[[str, str], Any]] = {
    "schedule": _word,
    "sequence_parallel": _flag,
    "loss_parallel": _flag,
    "tp_plan": _word,
    "split": _word,
    "precision": _word,
    "recompute": _word_or_int,
    "offload": _word,
    "algorithm": _word,
    "bucket_mb": _float,
    "hierarchical": _flag,
}
