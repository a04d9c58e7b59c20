"""Which linear layers go together: the columns whose features flow into the same rows, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import nn

from nbtrain.parallel.tensor.features import Labels, num_groups, pieces, segments
from nbtrain.parallel.tensor.layers import Call, Frames, Layers
from nbtrain.parallel.tensor.names import tensors
from nbtrain.parallel.tensor.probe import Probe, probing
from nbtrain.parallel.tensor.trace import Record, Touch, Trace


@dataclass(frozen=True)
class Joint:
    """Layers whose features are joined: outputs of columns, inputs of rows.

    A layer may be both, with different joints; then one of the two cannot be cut.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.columns, *self.rows)


@dataclass(frozen=True)
class Undivided:
    """Layers that could be cut over other numbers of ranks.

    Attributes:
        count: What that number must divide.
    """

    names: tuple[str, ...]
    region: str
    count: int


class Analysis:
    """What a trace of ``model`` on ``probe`` found."""

    def __init__(self, model: nn.Module, probe: Probe) -> None:
        self.model, self.layers = model, Layers(model)
        self.record = _trace(self.layers, probe)
        self.labels = self.layers.features.components()

    def outputs(self, name: str) -> Labels:
        """Components of a matrix's output features."""
        found: Labels = self.labels[self.layers.outputs[name].numpy()]
        return found

    def inputs(self, name: str) -> Labels:
        found: Labels = self.labels[self.layers.inputs[name].numpy()]
        return found

    @cached_property
    def joints(self) -> list[Joint]:
        """Those of large weights first (not LoRA's), then small ones, then in the order in which they are called."""
        found: dict[int, tuple[list[str], list[str]]] = {}
        cluster = self._clusters()
        for name in self.called:
            for at, side in enumerate((self.outputs(name), self.inputs(name))):
                for one in dict.fromkeys(cluster[component] for component in side[side > 0].tolist()):
                    found.setdefault(one, ([], []))[at].append(name)
        joints = [Joint(tuple(columns), tuple(rows)) for columns, rows in found.values()]
        return sorted(joints, key=lambda joint: (-self._mean_weight(joint), len(joint.names)))

    def _mean_weight(self, joint: Joint) -> float:
        matrices = [self.layers.matrices[name] for name in joint.names]
        return sum(each.num_inputs * each.num_outputs for each in matrices) / len(matrices)

    @cached_property
    def called(self) -> list[str]:
        """Matrices that the forward called, in order."""
        return sorted(
            (name for name in self.layers.matrices if name in self.layers.calls),
            key=lambda name: self.layers.calls[name][0].order,
        )

    def _clusters(self) -> dict[int, int]:
        """For each component the cluster of those that share a side with it."""
        parent: dict[int, int] = {}

        def root(one: int) -> int:
            while parent.setdefault(one, one) != one:
                parent[one] = one = parent[parent[one]]
            return one

        for name in self.called:
            for side in (self.outputs(name), self.inputs(name)):
                components = np.unique(side[side > 0]).tolist()
                for one in components:
                    parent[root(one)] = root(components[0])
        return {one: root(one) for one in list(parent)}

    def sides(self, joint: Joint) -> list[Labels]:
        """Rows' inputs, then columns' outputs."""
        return [*map(self.inputs, joint.rows), *map(self.outputs, joint.columns)]

    def cuts(self, joint: Joint, degree: int) -> list[tuple[int, ...]] | None:
        """Segments of each side; None where ``degree`` does not divide them."""
        ranks = pieces(self.sides(joint), degree)
        found = [segments(each, degree) for each in ranks] if ranks else [None]
        return [each for each in found if each] if all(found) else None

    def num_groups(self, joint: Joint) -> int:
        """How many ranks it can at most be cut over."""
        return num_groups(self.sides(joint))

    def touches(self, joint: Joint) -> list[Touch]:
        mine = {component for side in self.sides(joint) for component in np.unique(side[side > 0]).tolist()}
        return [touch for touch in self.record.touches if int(self.labels[touch.node]) in mine]

    def calls(self, names: Iterable[str]) -> list[Call]:
        return [call for name in names for call in self.layers.calls[name]]

    def region(self, joint: Joint) -> Frames:
        """Frames of the smallest module whose call encloses the joint, that module last."""
        frames = [call.frames[:-1] for call in self.calls(joint.names)]
        return _common([*frames, *(touch.module for touch in self.touches(joint))])

    def region_inputs(self, joint: Joint, frames: Frames) -> tuple[int | str, ...]:
        """The arguments of the region that only its columns take, if those are all that they take."""
        calls = self.calls(joint.columns)
        depth = len(frames) - 1
        if any(call.arguments[depth] is None for call in calls):
            return ()
        taken, here = {call.input for call in calls}, frames[-1]
        others = [call for name in self.layers.calls if name not in joint.columns for call in self.calls([name])]
        if any(call.input in taken and here in call.frames for call in others):
            return ()
        if any(here in self.record.used.get(one, ()) for one in taken):
            return ()
        return tuple(dict.fromkeys(key for call in calls if (key := call.arguments[depth]) is not None))

    @cached_property
    def order(self) -> dict[str, int]:
        """Of all modules in the model."""
        return {name: at for at, (name, _) in enumerate(self.model.named_modules())}

    def unreached(self, region: str) -> list[str]:
        """Layers inside a module that the probe did not reach: its code branches."""
        inside = f"{region}." if region else ""
        names = (*self.layers.matrices, *self.layers.attentions)
        return [name for name in names if name.startswith(inside) and name not in self.layers.calls]

    def weight(self, name: str) -> int:
        """Identity of a layer's weight, or of the layer."""
        module = self.model.get_submodule(name)
        return id(module._parameters.get("weight", module))

    def used_elsewhere(self, name: str) -> bool:
        """Something but the layer's own forward takes its parameters."""
        parameters = self.model.get_submodule(name)._parameters.values()
        return any(id(each) in self.record.used for each in parameters if each is not None)

    def heads(self, size: int) -> list[str]:
        """Matrices whose outputs, of this size, leave the model."""
        sized = [name for name in self.called if self.layers.matrices[name].num_outputs == size]
        return [name for name in sized if bool((self.outputs(name) == 0).all())]

    def vocabulary(self, smallest: int) -> str | None:
        """The embedding that is worth cutting: as large as a head, or else four times as large as any other."""
        called = {name: each for name, each in self.layers.embeddings.items() if name in self.layers.calls}
        sizes = {name: each.num_embeddings for name, each in called.items()}
        ranked = sorted(sizes, key=lambda name: -sizes[name])
        with_head = [name for name in ranked if self.heads(sizes[name])]
        for name in with_head or ranked[:1]:
            others = [sizes[each] for each in ranked if self.weight(each) != self.weight(name)]
            if sizes[name] >= smallest and (with_head or all(sizes[name] >= 4 * other for other in others)):
                return name
        return None

    def counted(self, what: Undivided) -> str:
        """``num_heads=8 of 'blocks.0.attn'``: by the attribute that holds the number, if there is one."""
        module = self.model.get_submodule(what.region)
        of = f"of {what.region!r}" if what.region else "of the model"
        widths = {self.layers.matrices[name].num_inputs for name in what.names if name in self.layers.matrices}
        if what.count in widths:
            return f"the hidden size {what.count} {of}"
        for owner in (module, getattr(module, "config", None), *module.children()):
            for name, value in vars(owner).items() if owner is not None else ():
                if (
                    type(value) is int
                    and value == what.count
                    and "head" in name
                    and not {"dim", "size"} & set(name.split("_"))
                ):
                    return f"{name}={what.count} {of}"
        return f"the {what.count} heads {of}"


def _common(frames: list[Frames]) -> Frames:
    """What they all begin with."""
    same = [len(set(each)) == 1 for each in zip(*frames, strict=False)]
    return frames[0][: same.index(False) if False in same else len(same)]


def _trace(layers: Layers, probe: Probe) -> Record:
    args, kwargs = probe
    trace = Trace(layers.features, layers.stack)
    with probing(layers.model), torch.no_grad(), layers.hooked(trace), trace:
        output = layers.model(*args, **kwargs)
    trace.finish(list(tensors(output)))
    return trace.record
