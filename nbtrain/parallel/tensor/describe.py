"""A tensor-parallel plan as a table for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from nbtrain.parallel.tensor.cuts import Cut, Layer, TensorPlan

_SHOWN = 12


def describe(plan: TensorPlan, model: nn.Module) -> str:
    """What is cut and how, what stays whole and why; repeated blocks on one line.

    ::

        tensor parallelism over 2 ranks: 92% of the parameters are cut
        blocks.0-11.attn.c_attn  colwise  48 = 16 + 16 + 16 outputs
        whole:
        blocks.0-11.ln_1         a norm
    """
    cut, total = _counted(plan, model)
    head = f"tensor parallelism over {plan.degree} ranks: {100 * cut // max(total, 1)}% of the parameters are cut"
    width = max((len(layer.style) for layer in plan.layers.values()), default=0)
    layers = _folded((name, f"{layer.style:<{width}}  {_sizes(layer)}".rstrip()) for name, layer in plan.layers.items())
    whole = _folded((name or f"({type(model).__name__})", why) for name, why in plan.whole.items())
    lines = [head, *_table(layers)]
    if whole:
        lines += ["whole:", *_table(whole[:_SHOWN])]
    if len(whole) > _SHOWN:
        lines.append(f"... and {len(whole) - _SHOWN} more")
    return "\n".join(lines)


def _counted(plan: TensorPlan, model: nn.Module) -> tuple[int, int]:
    """Elements that are cut, and all; tied ones once."""
    cut = {
        id(parameter): parameter.numel()
        for name, layer in plan.layers.items()
        for own in layer.cuts
        if (parameter := dict(model.get_submodule(name).named_parameters()).get(own)) is not None
    }
    return sum(cut.values()), sum(parameter.numel() for parameter in model.parameters())


def _sizes(layer: Layer) -> str:
    """Of the dim that is cut."""
    if layer.style == "attention":
        return "by heads"
    cut: Cut | None = layer.cuts.get("weight")
    if cut is None:
        return ""
    what = {"rowwise": "inputs", "vocab": "rows"}.get(layer.style, "outputs")
    parts = " = " + " + ".join(map(str, cut.segments)) if len(cut.segments) > 1 else ""
    return f"{cut.size}{parts} {what}"


def _folded(entries: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Entries whose names differ in one number only, with equal texts, become one: ``blocks.0-11.mlp``."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, text in entries:
        groups.setdefault((_shape(name), text), []).append(name)
    return [(shown, text) for (_, text), names in groups.items() for shown in _ranges(names)]


def _shape(name: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _ranges(names: list[str]) -> list[str]:
    """The names of one shape, shorter if they vary in their first number only."""
    split = [name.split(".") for name in names]
    vary = [at for at in range(len(split[0])) if len({parts[at] for parts in split}) > 1]
    if len(vary) > 1:
        by_rest: dict[str, list[str]] = {}
        for name, parts in zip(names, split, strict=True):
            by_rest.setdefault(".".join((*parts[: vary[0]], "#", *parts[vary[0] + 1 :])), []).append(name)
        return [shown for some in by_rest.values() for shown in _ranges(some)] if len(by_rest) < len(names) else names
    if not vary:
        return names
    numbers = sorted(int(parts[vary[0]]) for parts in split)
    parts = split[0]
    return [".".join((*parts[: vary[0]], _spans(numbers), *parts[vary[0] + 1 :]))]


def _spans(numbers: list[int]) -> str:
    """``0-3,5``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)


def _table(rows: Iterable[tuple[str, str]] | Mapping[str, str]) -> list[str]:
    rows = list(rows.items() if isinstance(rows, Mapping) else rows)
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:<{width}}  {text}" for name, text in rows]
