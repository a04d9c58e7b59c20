"""A model's tensor parallelism, found by following its features: `cuts.TensorPlan`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import gcd

import numpy as np
from torch import nn

from nbtrain.parallel.tensor.cuts import Cut, Layer, Region, TensorPlan
from nbtrain.parallel.tensor.joints import Analysis, Joint, Undivided
from nbtrain.parallel.tensor.layers import Frames
from nbtrain.parallel.tensor.patterns import own_plan, styles_of
from nbtrain.parallel.tensor.probe import Probe
from nbtrain.parallel.tensor.proof import Refused, prove
from nbtrain.parallel.tensor.reasons import reasons

SMALLEST_VOCABULARY = 32
"""Rows below which an embedding isn't worth a collective."""


def recognise(
    model: nn.Module, degree: int, probe: Probe, *, whole: Collection[str] = (), analysis: Analysis | None = None
) -> TensorPlan:
    """Which layers of ``model`` are cut over ``degree`` ranks, and how.

    The same on all ranks whose models are the same.

    Args:
        probe: Arguments for one forward (`probe.probe_inputs`).
        whole: Modules that stay whole.
        analysis: Of this model on this probe, if there is one already.
    """
    analysis, refused = analysis or Analysis(model, probe), dict.fromkeys(whole, "tp_plan says so")
    while True:
        plan = plan_for(Chosen(analysis, degree, refused=refused))
        try:
            prove(model, plan, probe)
        except Refused as error:
            refused |= dict.fromkeys(_alike(model, plan, error.region), f"its code does not run on a part: {error}")
        else:
            return plan


def _alike(model: nn.Module, plan: TensorPlan, refused: str) -> list[str]:
    """The layers of a region, and of others of its kind."""
    kind, layers = type(model.get_submodule(refused)), plan.regions[refused].layers
    return [
        f"{name}.{own}" if name else own
        for name, region in plan.regions.items()
        if region.layers == layers and type(model.get_submodule(name)) is kind
        for own in layers
    ]


def findings(model: nn.Module, degree: int, probe: Probe, *, analysis: Analysis | None = None) -> list[str]:
    """What ``degree`` does not divide: numbers of heads and hidden sizes, each with the degrees that would do."""
    return Chosen(analysis or Analysis(model, probe), degree).findings()


def plan_for(chosen: Chosen) -> TensorPlan:
    """The plan for what is cut."""
    analysis = chosen.analysis
    regions: dict[str, Region] = {}
    for joint in chosen.joints:
        _add_region(analysis, joint, regions)
    return TensorPlan(
        degree=chosen.degree,
        layers=chosen.layers,
        regions=regions,
        partial=_partial(analysis, chosen.joints),
        whole=reasons(analysis, chosen.layers, chosen.undivided, chosen.degree)
        | {name: why for name, why in chosen.refused.items() if name in analysis.layers.calls},
    )


@dataclass
class Chosen:
    """What is cut.

    Args:
        styles: Of the only modules that may be cut; None: of all.
        refused: Modules that stay whole, and why.

    Attributes:
        joints: Those that are cut.
        layers: By module name.
        undivided: What ``degree`` does not divide.
    """

    analysis: Analysis
    degree: int
    styles: Mapping[str, str] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    joints: list[Joint] = field(default_factory=list)
    layers: dict[str, Layer] = field(default_factory=dict)
    undivided: list[Undivided] = field(default_factory=list)

    def __post_init__(self) -> None:
        left = []
        for joint in _preferred(self.analysis):
            if self._allowed(joint):
                cuts = self.analysis.cuts(joint, self.degree)
                if cuts:
                    self._take(joint, cuts)
                else:
                    left.append(joint)
        for joint in left:
            count = self.analysis.num_groups(joint)
            if (
                count > 1
                and self._free(joint)
                and not any(set(joint.names) & set(each.names) for each in self.undivided)
            ):
                self.undivided.append(Undivided(joint.names, self.analysis.region(joint)[-1], count))
        self._take_attentions()
        self._take_vocabulary()
        self._take_holders()
        self.layers = dict(sorted(self.layers.items(), key=lambda item: self._order(item[0])))

    def _order(self, name: str) -> int:
        return self.analysis.order[name]

    def _wants(self, style: str, *names: str) -> bool:
        if self.styles is None:
            return not any(name in self.refused for name in names)
        return all(self.styles.get(name) == style for name in names)

    def _allowed(self, joint: Joint) -> bool:
        """From columns to rows, of weights that nothing else uses."""
        return (
            bool(joint.columns and joint.rows)
            and not set(joint.columns) & set(joint.rows)
            and all((side > 0).all() for side in self.analysis.sides(joint))
            and not any(self.analysis.used_elsewhere(name) for name in joint.names)
            and not self.analysis.unreached(self.analysis.region(joint)[-1])
            and self._wants("colwise", *joint.columns)
            and self._wants("rowwise", *joint.rows)
            and self._free(joint)
        )

    def _free(self, joint: Joint) -> bool:
        """None of its layers, nor one of the same weight, is cut otherwise."""
        taken = {self._weight(name) for name in self.layers}
        mine = {self._weight(name) for name in joint.names}
        columns = {self._weight(name) for name in joint.columns}
        return not (taken & mine) and not columns & {self._weight(name) for name in joint.rows}

    def _take(self, joint: Joint, cuts: list[tuple[int, ...]]) -> None:
        self.joints.append(joint)
        for at, name in enumerate((*joint.rows, *joint.columns)):
            matrix = self.analysis.layers.matrices[name]
            if name in joint.rows:
                self.layers[name] = Layer("rowwise", {"weight": Cut(1 - matrix.out_dim, cuts[at])})
            else:
                self.layers[name] = self._column(name, "colwise", cuts[at])

    def _column(self, name: str, style: str, segments: tuple[int, ...]) -> Layer:
        cuts = {"weight": Cut(self.analysis.layers.matrices[name].out_dim, segments)}
        if self.analysis.model.get_submodule(name)._parameters.get("bias") is not None:
            cuts["bias"] = Cut(0, segments)
        return Layer(style, cuts)

    def _take_attentions(self) -> None:
        for name, module in self.analysis.layers.attentions.items():
            if not self._wants("attention", name) or module.bias_k is not None or module.add_zero_attn:
                continue
            if module.num_heads % self.degree:
                self.undivided.append(Undivided((name,), name, module.num_heads))
            elif name in self.analysis.layers.calls:
                self.layers[name] = Layer("attention", attention_cuts(module))

    def _take_vocabulary(self) -> None:
        """The vocabulary's embedding, and heads: a weight that they share is cut in both, or in neither."""
        name = self.analysis.vocabulary(SMALLEST_VOCABULARY)
        if name is None:
            return
        size = self.analysis.layers.embeddings[name].num_embeddings
        heads = [each for each in self.analysis.heads(size) if each not in self.layers]
        same = [each for each in self.analysis.layers.embeddings if self._weight(each) == self._weight(name)]
        tied = [head for head in heads if self._weight(head) == self._weight(name)]
        wanted = self._wants("vocab", *same) and self._wants("colwise_gather_output", *tied)
        if wanted and self._whole_rows(size, *same, *tied):
            self.layers |= {each: Layer("vocab", {"weight": Cut(0, (size,))}) for each in same}
        for head in heads:
            cut = name in self.layers if head in tied else self._whole_rows(size, head)
            if cut and self._wants("colwise_gather_output", head):
                self.layers[head] = self._column(head, "colwise_gather_output", (size,))

    def _weight(self, name: str) -> int:
        return self.analysis.weight(name)

    def _take_holders(self) -> None:
        """Modules that hold a cut parameter without using it have the part as well."""
        cuts = {
            id(parameter): cut
            for name, layer in self.layers.items()
            for own, cut in layer.cuts.items()
            if (parameter := self.analysis.model.get_submodule(name)._parameters.get(own)) is not None
        }
        for name, module in self.analysis.model.named_modules():
            held = {own: cuts[id(each)] for own, each in module._parameters.items() if id(each) in cuts}
            if held and name not in self.layers:
                self.layers[name] = Layer("replicate", held)

    def _whole_rows(self, size: int, *names: str) -> bool:
        return size % self.degree == 0 and not any(map(self.analysis.used_elsewhere, names))

    def findings(self) -> list[str]:
        common = gcd(*(each.count for each in self.undivided), *map(self.analysis.num_groups, self.joints))
        for name, layer in self.layers.items():
            if layer.style == "attention":
                common = gcd(common, self.analysis.layers.attentions[name].num_heads)
        choices = ", ".join(str(one) for one in range(1, common + 1) if common % one == 0)
        return [
            f"tp={self.degree} does not divide {self.analysis.counted(each)}; choose tp from {choices}"
            for each in self.undivided
        ]


def _preferred(analysis: Analysis) -> list[Joint]:
    """Those that the model's own plan names first."""
    own = styles_of(analysis.model, own_plan(analysis.model) or {})

    def agrees(joint: Joint) -> bool:
        return all(own.get(name) == "colwise" for name in joint.columns) and all(
            own.get(name) == "rowwise" for name in joint.rows
        )

    return sorted(analysis.joints, key=lambda joint: not agrees(joint))


def attention_cuts(module: nn.MultiheadAttention) -> Mapping[str, Cut]:
    """Of its parameters, which hold the heads one behind the other."""
    size = module.embed_dim
    cuts = {"out_proj.weight": Cut(1, (size,))}
    if module.in_proj_weight is not None:
        cuts["in_proj_weight"] = Cut(0, (size, size, size))
    else:
        cuts |= {f"{each}_proj_weight": Cut(0, (size,)) for each in "qkv"}
    if module.in_proj_bias is not None:
        cuts["in_proj_bias"] = Cut(0, (size, size, size))
    return cuts


def _add_region(analysis: Analysis, joint: Joint, regions: dict[str, Region]) -> None:
    """A region may hold several joints, an inline block its attention and its MLP."""
    frames: Frames = analysis.region(joint)
    name = frames[-1]
    written = any(touch.written for touch in analysis.touches(joint))
    inputs = analysis.region_inputs(joint, frames)
    inside = tuple(_relative(each, name) for each in sorted(joint.names, key=lambda each: analysis.order[each]))
    have = regions.get(name)
    if have:
        # an argument that one joint's columns take must not have been given to the other's
        written, inputs, inside = written or have.written, (), (*have.layers, *inside)
    regions[name] = Region(written, inputs, inside)


def _relative(name: str, region: str) -> str:
    return name.removeprefix(f"{region}.") if region else name


def _partial(analysis: Analysis, joints: list[Joint]) -> tuple[str, ...]:
    """Whole parameters that act on cut tensors."""
    cut = {one for joint in joints for side in analysis.sides(joint) for one in np.unique(side).tolist()}
    acting = {tensor for tensor, node in analysis.record.partial if int(analysis.labels[node]) in cut}
    return tuple(name for name, each in analysis.model.named_parameters() if id(each) in acting)
