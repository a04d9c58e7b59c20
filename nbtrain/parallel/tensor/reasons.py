"""Why a module with parameters stays whole, for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch import nn

from nbtrain.parallel.tensor.cuts import Layer
from nbtrain.parallel.tensor.features import Labels
from nbtrain.parallel.tensor.joints import Analysis, Undivided
from nbtrain.parallel.tensor.patterns import own_plan, styles_of

_ELSEWHERE = "its weight is used outside of its forward"


def reasons(
    analysis: Analysis, layers: Mapping[str, Layer], undivided: Sequence[Undivided], degree: int
) -> dict[str, str]:
    """By module name, of modules with parameters of their own that aren't cut."""
    own = styles_of(analysis.model, own_plan(analysis.model) or {})
    found = {}
    for name, module in analysis.model.named_modules():
        if not module._parameters or name in layers or _within(name, analysis.layers.attentions):
            continue
        if not any(parameter is not None for parameter in module._parameters.values()):
            continue
        why = _reason(analysis, name, module, undivided, degree)
        if own.get(name) not in (None, "replicate"):
            why += f"; the model's own plan has it {own[name]}"
        found[name] = why
    return found


def _within(name: str, outer: Iterable[str]) -> bool:
    return any(name.startswith(f"{each}.") for each in outer)


def _reason(analysis: Analysis, name: str, module: nn.Module, undivided: Sequence[Undivided], degree: int) -> str:
    if name in analysis.layers.embeddings:
        return _embedding(analysis, name, degree)
    for each in undivided:
        if name in each.names:
            return f"{analysis.counted(each)} cannot be cut into {degree}"
    if name in analysis.layers.attentions:
        return "it adds keys and values of its own" if name in analysis.layers.calls else "the probe did not call it"
    if name in analysis.layers.matrices:
        return _matrix(analysis, name)
    kind = type(module).__name__
    if "conv" in kind.lower():
        return "a convolution"
    return "a norm" if "norm" in kind.lower() else "not a linear layer"


def _embedding(analysis: Analysis, name: str, degree: int) -> str:
    size = analysis.layers.embeddings[name].num_embeddings
    if name not in analysis.layers.calls:
        return _ELSEWHERE if analysis.used_elsewhere(name) else "the probe did not call it"
    if name != analysis.vocabulary(0):
        return "an embedding other than the vocabulary's"
    if size % degree:
        return f"its {size} rows cannot be cut into {degree}"
    return _ELSEWHERE if analysis.used_elsewhere(name) else f"{size} rows are few"


def _matrix(analysis: Analysis, name: str) -> str:
    if name not in analysis.layers.calls:
        return "the probe did not call it"
    if analysis.used_elsewhere(name):
        return _ELSEWHERE
    for joint in analysis.joints:
        unreached = analysis.unreached(analysis.region(joint)[-1]) if name in joint.names and joint.rows else []
        if unreached and joint.columns:
            return f"beside it, the probe did not call {', '.join(map(repr, unreached[:3]))}"
    incoming, output = analysis.inputs(name), analysis.outputs(name)
    own = set(analysis.layers.outputs[name].tolist())
    if any(touch.op == "output" and touch.node in own for touch in analysis.record.touches):
        return "its output is the model's"
    fed = any(name in joint.rows and joint.columns for joint in analysis.joints)
    if fed and _mixed(incoming) and (incoming > 0).all():
        return _event(analysis, incoming, "its input features are mixed", "input")
    if (output == 0).any():
        return _event(analysis, output, "its output is wanted whole", "output")
    if _mixed(output):
        return _event(analysis, output, "its output features are mixed", "output")
    return "no layer takes its output features one by one, or those that do are cut otherwise"


def _mixed(side: Labels) -> bool:
    return len(np.unique(side)) == 1 and len(side) > 1


def _event(analysis: Analysis, side: Labels, otherwise: str, which: str) -> str:
    """The operation that joined most of these features."""
    mine = set(side.tolist())
    touches = [touch for touch in analysis.record.touches if int(analysis.labels[touch.node]) in mine and touch.joined]
    most = max(touches, key=lambda touch: touch.joined, default=None)
    if most is None:
        return otherwise
    if most.op == "output":
        return "its output is the model's"
    where = f" in '{most.module[-1]}'" if most.module and most.module[-1] else ""
    return f"{most.op}{where} mixes its {which} features"
