"""A `TensorPlan` from styles that a person states: only the named layers are cut."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from nbtrain.errors import ModelError, PlanError, nearest
from nbtrain.parallel.tensor.cuts import Cut, Layer, Region, TensorPlan
from nbtrain.parallel.tensor.joints import Analysis, Joint, Undivided
from nbtrain.parallel.tensor.layers import Matrix, matrix_of
from nbtrain.parallel.tensor.patterns import matches, style_named
from nbtrain.parallel.tensor.probe import Probe
from nbtrain.parallel.tensor.proof import Refused, prove
from nbtrain.parallel.tensor.recognise import Chosen, attention_cuts, plan_for, recognise

_PASSIVE = ("replicate", "sequence")


def from_patterns(model: nn.Module, degree: int, patterns: Mapping[str, str], probe: Probe | None) -> TensorPlan:
    """The plan that ``patterns`` state.

    Args:
        patterns: Styles by module name, whose parts may hold ``*``: ``{"blocks.*.mlp.up": "colwise"}``. If all are
            "replicate", the rest of the model is recognised.
        probe: With one, segments and regions come from a trace, and what the styles forget is an error. Without, a
            layer's features are one segment, and a region is the parent module.

    Raises:
        PlanError: An unknown style, a pattern that matches no module, or a degree that does not divide.
        ModelError: A module cannot have its style.
    """
    styles = stated_styles(model, patterns)
    if probe is None:
        return _unseen(model, degree, styles)
    if all(style == "replicate" for style in styles.values()):
        return recognise(model, degree, probe, whole=_inside(model, styles))
    chosen = Chosen(Analysis(model, probe), degree, styles)
    chosen.layers |= _alone(model, styles, chosen.layers, degree)
    for name, style in styles.items():
        if style not in _PASSIVE and name not in chosen.layers:
            raise _why(chosen, name, style)
    plan = plan_for(chosen)
    try:
        prove(model, plan, probe)
    except Refused as error:
        raise ModelError(
            f"tp_plan: the code of {error.region!r} does not run on a part of its features: {error}"
        ) from error
    return plan


def stated_styles(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, str]:
    """The style of each module that a pattern names; later patterns win."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    styles: dict[str, str] = {}
    for pattern, given in patterns.items():
        style = style_named(given, pattern)
        found = [name for name in names if matches(name, pattern)]
        if not found:
            raise PlanError(f"tp_plan: {pattern!r} matches no module of the model; {nearest(pattern, _folded(names))}")
        styles |= {name: _fitting(model.get_submodule(name), name, style) for name in found}
    return styles


def _folded(names: list[str]) -> list[str]:
    """Names with numbers as ``*``: the patterns that one would write."""
    return list(dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names))


def _fitting(module: nn.Module, name: str, style: str) -> str:
    """The style, if this module can have it; an embedding that is cut by rows is the vocabulary's."""
    if isinstance(module, nn.Embedding):
        allowed = {"vocab": "vocab", "rowwise": "vocab"}
    elif isinstance(module, nn.MultiheadAttention):
        allowed = {"attention": "attention"}
    elif matrix_of(module):
        allowed = {each: each for each in ("colwise", "colwise_gather_output", "rowwise")}
    else:
        allowed = {"sequence": "sequence"}
    allowed["replicate"] = "replicate"
    if style not in allowed:
        raise ModelError(
            f"tp_plan: {name!r} is a {type(module).__name__}, which cannot be {style!r}; "
            f"it can be {', '.join(map(repr, allowed))}"
        )
    return allowed[style]


def _inside(model: nn.Module, styles: Mapping[str, str]) -> list[str]:
    names = [name for name, _ in model.named_modules()]
    return [name for name in names if any(name == outer or name.startswith(f"{outer}.") for outer in styles)]


def _alone(model: nn.Module, styles: Mapping[str, str], have: Mapping[str, Layer], degree: int) -> dict[str, Layer]:
    """Layers that need no other: heads, embeddings, and what is passive."""
    found = {}
    for name, style in styles.items():
        module = model.get_submodule(name)
        if name not in have and style == "sequence":
            found[name] = Layer(style)
        elif name not in have and style in ("vocab", "colwise_gather_output"):
            found[name] = _cut(module, name, style, degree)
    return found


def _cut(module: nn.Module, name: str, style: str, degree: int) -> Layer:
    """In one segment."""
    if isinstance(module, nn.MultiheadAttention):
        _divides(degree, module.num_heads, f"num_heads={module.num_heads} of {name!r}")
        return Layer(style, attention_cuts(module))
    if isinstance(module, nn.Embedding):
        _divides(degree, module.num_embeddings, f"num_embeddings={module.num_embeddings} of {name!r}")
        return Layer(style, {"weight": Cut(0, (module.num_embeddings,))})
    matrix = matrix_of(module)
    assert isinstance(matrix, Matrix)  # _fitting saw to it
    if style == "rowwise":
        _divides(degree, matrix.num_inputs, f"the {matrix.num_inputs} input features of {name!r}")
        return Layer(style, {"weight": Cut(1 - matrix.out_dim, (matrix.num_inputs,))})
    _divides(degree, matrix.num_outputs, f"the {matrix.num_outputs} output features of {name!r}")
    cuts = {"weight": Cut(matrix.out_dim, (matrix.num_outputs,))}
    if module._parameters.get("bias") is not None:
        cuts["bias"] = Cut(0, (matrix.num_outputs,))
    return Layer(style, cuts)


def _divides(degree: int, count: int, what: str) -> None:
    if count % degree:
        choices = ", ".join(str(one) for one in range(1, min(count, 64) + 1) if count % one == 0)
        raise PlanError(f"tp={degree} does not divide {what}; choose tp from {choices}")


def _unseen(model: nn.Module, degree: int, styles: Mapping[str, str]) -> TensorPlan:
    """Without a probe: as stated."""
    layers, inside = {}, dict[str, list[str]]()
    for name, style in styles.items():
        if style == "replicate":
            continue
        layers[name] = Layer(style) if style == "sequence" else _cut(model.get_submodule(name), name, style, degree)
        if style in ("colwise", "rowwise"):
            parent, _, own = name.rpartition(".")
            inside.setdefault(parent, []).append(own)
    regions = {parent: Region(True, (), tuple(names)) for parent, names in inside.items()}
    whole = {
        name: "tp_plan does not name it"
        for name, module in model.named_modules()
        if name not in layers and any(each is not None for each in module._parameters.values())
    }
    return TensorPlan(degree, layers, regions, whole=whole)


def _why(chosen: Chosen, name: str, style: str) -> Exception:
    """Why a named layer is not in the plan."""
    analysis = chosen.analysis
    if name not in analysis.layers.calls:
        return ModelError(f"tp_plan: the probe batch did not reach {name!r}; give another one: probe=(...)")
    if isinstance(analysis.model.get_submodule(name), nn.MultiheadAttention):
        return _undivided(chosen, name) or ModelError(f"tp_plan: {name!r} adds keys of its own and cannot be cut")
    if analysis.used_elsewhere(name):
        return ModelError(f"tp_plan: {name!r} cannot be {style}: its weight is used outside of its forward")
    for joint in analysis.joints:
        if name in (joint.columns if style == "colwise" else joint.rows):
            return _undivided(chosen, name) or _incomplete(chosen, joint, name, style)
    if style == "colwise":
        return ModelError(f"tp_plan: {name!r} is colwise, but its output is wanted whole: say 'colwise_gather_output'")
    return ModelError(f"tp_plan: {name!r} is rowwise, but its input is whole: no colwise layer gives it")


def _undivided(chosen: Chosen, name: str) -> PlanError | None:
    for each, finding in zip(chosen.undivided, chosen.findings(), strict=True):
        if name in each.names:
            return PlanError(finding)
    return None


def _incomplete(chosen: Chosen, joint: Joint, name: str, style: str) -> Exception:
    styles = chosen.styles or {}
    needed = {each: "colwise" for each in joint.columns} | {each: "rowwise" for each in joint.rows}
    missing = {each: want for each, want in needed.items() if styles.get(each) != want}
    count = chosen.analysis.num_groups(joint)
    if missing and count > 1:
        listed = ", ".join(f"{each!r}: {want!r}" for each, want in missing.items())
        return PlanError(f"tp_plan: {name!r} is {style}, which needs {listed} as well: their features go together")
    if count > 1 and count % chosen.degree:
        region = (chosen.analysis.region(joint) or ("",))[-1]
        counted = chosen.analysis.counted(Undivided(joint.names, region, count))
        return PlanError(f"tp={chosen.degree} does not divide {counted}")
    return ModelError(f"tp_plan: {name!r} cannot be {style}: its features are mixed on the way from column to row")
