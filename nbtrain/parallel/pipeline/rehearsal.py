"""`rehearse`: finds the `Score` of a forward without running a unit.

The skeleton's own code runs as it does in a step. Each unit is run by a twin on fake tensors, which have shapes and no
memory, and gives stand-ins of those shapes: numbers as activations are, since the skeleton's code may look whether they
are finite, or how large. Which unit's output reaches which unit is followed operation by operation, by the storage of
each tensor.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

from nbtrain.errors import ModelError, NbtrainError, first_line
from nbtrain.parallel.cell import unheard
from nbtrain.parallel.pipeline.alike import Ran
from nbtrain.parallel.pipeline.flow import conducted
from nbtrain.parallel.pipeline.holding import elsewhere
from nbtrain.parallel.pipeline.score import Call, Meta, Passed, Score, Value
from nbtrain.parallel.pipeline.skeleton import Skeleton
from nbtrain.parallel.pipeline.tracker import Label, Labels, Tracker
from nbtrain.parallel.pipeline.twins import SMALL, Twins

_MISSING = object()


class Rehearsal:
    """A conductor that lets no unit run.

    Args:
        twins: Of the units.
        units: By name.
        skeleton: What is around them.
        device: Where the model lives.
    """

    def __init__(self, twins: Twins, units: dict[str, nn.Module], skeleton: Skeleton, device: torch.device) -> None:
        self._twins, self._units, self._skeleton, self._device = twins, units, skeleton, device
        self._labels = Labels()
        self._tracker = Tracker(self._labels)
        self._calls: list[Call] = []
        self._random = False
        self._grown: set[Value] = set()  # what gradients come back for
        self._trained: set[str] = set()
        self._left: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}

    def run(self, model: nn.Module, forward: Callable[[Any], Any], given: Any = None) -> Score:
        """The score of ``forward``, which calls the model's own.

        Args:
            model: That is called.
            forward: Gets a copy of ``given``: the model may write into its inputs.
            given: Tensors in any form.
        """
        copies = tree_map_only(torch.Tensor, torch.clone, given)
        inputs = [(leaf, leaf._version) for leaf in tree_leaves(copies) if isinstance(leaf, torch.Tensor)]
        with (
            _plain_parameters(model, self._device) as parameters,
            _drawn_elsewhere() as drawn,
            self._restored(),
            unheard(),
        ):
            for name, (tensor, trains) in parameters.items():
                self._labels.add(tensor, {name})
                self._trained |= {name} if trains else set()
            with self._skeleton.unchanged(self._is_grown), torch.no_grad(), conducted(self), self._tracker:
                output = forward(copies)
        found = tree_leaves(_plain(output))
        if any(isinstance(leaf, FakeTensor) for leaf in found):
            raise ModelError(
                "the model's output has a tensor that a module gave by a hook, a list or an object; let the module "
                "return it, or type pp=1"
            )
        reads, names = _sorted_out(self._labels.of(found) | self._tracker.decisive)
        return Score(
            tuple(self._calls),
            reads,
            names,
            self._random or self._tracker.random or bool(drawn),
            frozenset(self._tracker.written),
            any(leaf._version != version for leaf, version in inputs),
        )

    def _is_grown(self, tensor: torch.Tensor) -> bool:
        return any(isinstance(label, Value) for label in self._labels.of([tensor]))

    def conduct(self, forward: Callable[[], Any]) -> Any:
        return forward()

    def call(self, unit: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position = len(self._calls)
        labels = self._labels.of(tree_leaves(_plain((args, kwargs)))) | self._tracker.decisive
        reads, parameters = _sorted_out(labels)
        ran = self._run_twin(unit, args, kwargs)
        self._random |= ran.random
        grown = self._twins.has_trained(unit) or bool(reads & self._grown) or bool(parameters & self._trained)
        leaves, form = tree_flatten(ran.output)
        given = tree_leaves((args, kwargs))
        with self._tracker.pausing():
            metas = [self._meta(unit, leaf, grown, given) for leaf in (*leaves, *ran.kept.values())]
        call = Call(unit, tuple(metas), form, tuple(ran.kept), reads, parameters, ran.cost)
        self._calls.append(call)
        stand_ins = [self._stand_in(Value(position, index), meta, given) for index, meta in enumerate(metas)]
        self._leave(unit, call, stand_ins)
        return call.output(stand_ins)

    def _run_twin(self, unit: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ran:
        modes = {name: module.training for name, module in self._units[unit].named_modules()}
        try:
            with self._tracker.pausing():
                return self._twins.run(unit, modes, args, kwargs)
        except NbtrainError:
            raise
        except Exception as problem:
            raise ModelError(
                f"'{unit}' raised {first_line(problem)}; that was in a run without its weights, for the shapes of what "
                "it gives. Give a batch that the model takes on one device. If it takes this one there, something in "
                "it depends on values: cut that out of it, or type pp=1"
            ) from problem

    def _leave(self, unit: str, call: Call, stand_ins: list[Any]) -> None:
        """What the unit would leave as attributes."""
        for (name, key), stand_in in call.kept_of(stand_ins):
            held = vars(self._units[unit].get_submodule(name))
            self._left.setdefault((id(held), key), (held, key, held.get(key, _MISSING)))
            held[key] = stand_in

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Attributes of units are those from before."""
        try:
            yield
        finally:
            for held, key, before in self._left.values():
                if before is _MISSING:
                    held.pop(key, None)
                else:
                    held[key] = before

    def _meta(self, unit: str, leaf: Any, grown: bool, given: list[Any]) -> Any:
        if isinstance(leaf, torch.Tensor):
            return Meta.of(leaf, requires_grad=grown and (leaf.is_floating_point() or leaf.is_complex()))
        if (index := next((i for i, one in enumerate(given) if one is leaf and _is_object(one)), None)) is not None:
            return Passed(index)
        if _holds_tensors(leaf):
            raise ModelError(
                f"'{unit}' gives a {type(leaf).__name__} that holds tensors, and no other stage can be sent it; let it "
                "give tensors in tuples, lists or dicts"
            )
        return leaf

    def _stand_in(self, value: Value, meta: Any, given: list[Any]) -> Any:
        if isinstance(meta, Passed):
            return given[meta.index]
        if not isinstance(meta, Meta):
            return meta
        made = _standing(meta.empty(self._device))
        self._labels.begin(made, value)
        if meta.requires_grad:
            self._grown.add(value)
        return made


def _standing(room: torch.Tensor) -> torch.Tensor:
    """``room`` full of numbers with mean 0 and deviation 1, or of zeros where its dtype has no fractions."""
    if not (room.is_floating_point() or room.is_complex()):
        return room.fill_(0)
    room.fill_(1).as_strided((room.numel(),), (1,))[1::2] = -1
    return room


def _sorted_out(labels: set[Label]) -> tuple[frozenset[Value], frozenset[str]]:
    values = frozenset(label for label in labels if isinstance(label, Value))
    return values, frozenset(label for label in labels if isinstance(label, str))


def _plain(value: Any) -> Any:
    """Objects that torch's trees do not open, as what they hold."""
    return tree_map(lambda leaf: vars(leaf) if _holds_tensors(leaf) else leaf, value)


def _is_object(leaf: Any) -> bool:
    return hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor | type)


def _holds_tensors(leaf: Any) -> bool:
    held = getattr(leaf, "__dict__", None)
    if isinstance(leaf, torch.Tensor | nn.Module | type) or not isinstance(held, dict):
        return False
    return any(isinstance(tensor, torch.Tensor) for tensor in tree_leaves(held))


@contextmanager
def _drawn_elsewhere() -> Iterator[list[str]]:
    """Puts back Python's and NumPy's random numbers; what was drawn from."""
    numpy: Any = sys.modules.get("numpy.random")
    drawn: list[str] = []
    before = random.getstate(), None if numpy is None else numpy.get_state()
    try:
        yield drawn
    finally:
        if random.getstate() != before[0]:
            drawn.append("random")
            random.setstate(before[0])
        if numpy is not None and str(numpy.get_state()) != str(before[1]):
            drawn.append("numpy")
            numpy.set_state(before[1])


@contextmanager
def _plain_parameters(model: nn.Module, device: torch.device) -> Iterator[dict[str, tuple[torch.Tensor, bool]]]:
    """One number, without memory, in the place of all parameters, by first name, and whether they train; afterwards the
    parameters are back. Code outside of units may read those inside: ``self.positions.weight[:length]``."""
    taken: list[tuple[nn.Module, str, nn.Parameter]] = []
    plain: dict[int, nn.Parameter] = {}
    named: dict[str, tuple[torch.Tensor, bool]] = {}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            taken.append((module, key, parameter))
            if id(parameter) not in plain:
                value = SMALL if parameter.is_floating_point() else 0
                made = torch.full((), value, dtype=parameter.dtype, device=device).expand(parameter.shape)
                plain[id(parameter)] = nn.Parameter(made, parameter.requires_grad)
                named[f"{dot}{key}"] = plain[id(parameter)], parameter.requires_grad
            module._parameters[key] = plain[id(parameter)]
        for key, (stand_in, trains) in elsewhere(module).items():
            named[f"{dot}{key}"] = stand_in, trains
    try:
        yield named
    finally:
        for module, key, parameter in taken:
            module._parameters[key] = parameter
