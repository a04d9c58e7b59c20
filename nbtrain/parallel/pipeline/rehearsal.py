"""`rehearse`: finds the `Score` of a forward without running a unit.

The skeleton's own code runs as it does in a step. Each unit is run by a twin on fake tensors, which have shapes and no
memory, and gives blanks of those shapes. Which unit's output reaches which unit is followed operation by operation, by
the storage of each tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from nbtrain.errors import ModelError, NbtrainError
from nbtrain.parallel.pipeline.flow import blank, conducted
from nbtrain.parallel.pipeline.score import Call, Meta, Score, Value

Label = Value | str
"""Of a tensor: a unit's output, or the name of a parameter outside of units."""


class Twins:
    """The units of a model on fake tensors.

    Args:
        structure: The model on the meta device.
        device: Where the model lives.
        dtype: That FSDP casts parameters and inputs of units to; None leaves them.
    """

    def __init__(self, structure: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device, self._dtype = device, dtype
        self._structure = copy.deepcopy(structure)
        made: dict[int, torch.Tensor] = {}
        for module in self._structure.modules():
            if isinstance(module, _BatchNorm):  # which refuses single samples that those of other ranks go with
                module.forward = _unchanged  # type: ignore[method-assign, assignment]
            for slots in (module._parameters, module._buffers):
                for name, tensor in slots.items():
                    if tensor is not None:
                        slots[name] = made.setdefault(id(tensor), self._parameter(tensor))  # type: ignore[assignment]

    def run(
        self, unit: str, modes: dict[str, bool], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, float, bool]:
        """Output of fake tensors, floating-point operations, and whether it draws random numbers.

        Args:
            unit: Its name.
            modes: ``training`` of each module in it, by name.
            args: Real tensors.
            kwargs: Too.
        """
        module = self._structure.get_submodule(unit)
        for name, training in modes.items():
            module.get_submodule(name).training = training
        counter, watch = FlopCounterMode(display=False), _Randomness()  # type: ignore[no-untyped-call]
        with self._mode, watch, counter:
            output = module(*tree_map(self._fake, args), **tree_map(self._fake, kwargs))
        return output, float(counter.get_total_flops()), watch.seen

    def has_trained(self, unit: str) -> bool:
        return any(parameter.requires_grad for parameter in self._structure.get_submodule(unit).parameters())

    def _parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = self._fake(tensor)
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        dtype = self._dtype if self._dtype is not None and value.is_floating_point() else value.dtype
        with self._mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=self._device)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Randomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices operations that draw random numbers."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or _draws(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers: attention does so only where it drops."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


class _Labels:
    """By storage: views share what is written into one of them."""

    def __init__(self) -> None:
        self._sets: dict[int, set[Label]] = {}
        self._kept: list[Any] = []  # a storage's address is its name only as long as it lives

    def of(self, tensors: Iterable[Any]) -> set[Label]:
        found: set[Label] = set()
        for tensor in tensors:
            if (key := _storage(tensor)) is not None:
                found |= self._sets.get(key, set())
        return found

    def add(self, tensor: torch.Tensor, labels: set[Label]) -> None:
        if (key := _storage(tensor)) is not None:
            self._sets.setdefault(key, set()).update(labels)
            self._kept.append(tensor)


def _storage(tensor: Any) -> int | None:
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or tensor.layout != torch.strided:
        return None
    return int(tensor.untyped_storage()._cdata)


class _Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows labels through operations of the skeleton."""

    def __init__(self, labels: _Labels) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._labels = labels
        self.paused = self.random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.paused:
            return output
        self.random = self.random or _draws(func, args, kwargs or {})
        if found := self._labels.of(tree_leaves((args, kwargs))):
            for tensor in (*tree_leaves(output), *_written(func, args, kwargs or {})):
                if isinstance(tensor, torch.Tensor):
                    self._labels.add(tensor, found)
        return output


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from tree_leaves(given)


class Rehearsal:
    """A conductor that lets no unit run.

    Args:
        twins: Of the units.
        units: By name.
        device: Where the model lives.
    """

    def __init__(self, twins: Twins, units: dict[str, nn.Module], device: torch.device) -> None:
        self._twins, self._units, self._device = twins, units, device
        self._labels = _Labels()
        self._tracker = _Tracker(self._labels)
        self._calls: list[Call] = []
        self._random = False
        self._grown: set[Value] = set()  # what gradients come back for
        self._trained: set[str] = set()

    def run(self, model: nn.Module, forward: Callable[[], Any]) -> Score:
        """The score of ``forward``, which calls the model's own."""
        with _blank_parameters(model, self._device) as parameters:
            for name, (tensor, trains) in parameters.items():
                self._labels.add(tensor, {name})
                self._trained |= {name} if trains else set()
            with torch.no_grad(), conducted(self), self._tracker:
                output = forward()
        reads, names = _sorted_out(self._labels.of(tree_leaves(_plain(output))))
        return Score(tuple(self._calls), reads, names, self._random or self._tracker.random)

    def conduct(self, forward: Callable[[], Any]) -> Any:
        return forward()

    def call(self, unit: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position = len(self._calls)
        reads, parameters = _sorted_out(self._labels.of(tree_leaves(_plain((args, kwargs)))))
        modes = {name: module.training for name, module in self._units[unit].named_modules()}
        self._tracker.paused = True
        try:
            output, cost, random = self._twins.run(unit, modes, args, kwargs)
        except NbtrainError:
            raise
        except Exception as problem:
            raise ModelError(
                f"the shape of what '{unit}' gives could not be found without running it ({type(problem).__name__}: "
                f"{problem}); type pp=1, or cut what depends on values out of it"
            ) from problem
        finally:
            self._tracker.paused = False
        self._random |= random
        grown = self._twins.has_trained(unit) or bool(reads & self._grown) or bool(parameters & self._trained)
        leaves, form = tree_flatten(output)
        metas = tuple(self._meta(unit, leaf, grown) for leaf in leaves)
        self._calls.append(Call(unit, metas, form, reads, parameters, cost))
        return self._calls[-1].output([self._blank(Value(position, index), meta) for index, meta in enumerate(metas)])

    def _meta(self, unit: str, leaf: Any, grown: bool) -> Any:
        if isinstance(leaf, torch.Tensor):
            return Meta(tuple(leaf.shape), leaf.dtype, grown and leaf.is_floating_point())
        if _holds_tensors(leaf):
            raise ModelError(
                f"'{unit}' gives a {type(leaf).__name__} that holds tensors, and no other stage can be sent it; let it "
                "give tensors in tuples, lists or dicts"
            )
        return leaf

    def _blank(self, value: Value, meta: Any) -> Any:
        if not isinstance(meta, Meta):
            return meta
        made = blank(meta.shape, meta.dtype, self._device)
        self._labels.add(made, {value})
        if meta.requires_grad:
            self._grown.add(value)
        return made


def _sorted_out(labels: set[Label]) -> tuple[frozenset[Value], frozenset[str]]:
    values = frozenset(label for label in labels if isinstance(label, Value))
    return values, frozenset(label for label in labels if isinstance(label, str))


def _plain(value: Any) -> Any:
    """Objects that torch's trees do not open, as what they hold."""
    return tree_map(lambda leaf: vars(leaf) if _holds_tensors(leaf) else leaf, value)


def _holds_tensors(leaf: Any) -> bool:
    held = getattr(leaf, "__dict__", None)
    if isinstance(leaf, torch.Tensor | nn.Module | type) or not isinstance(held, dict):
        return False
    return any(isinstance(tensor, torch.Tensor) for tensor in tree_leaves(held))


@contextmanager
def _blank_parameters(model: nn.Module, device: torch.device) -> Iterator[dict[str, tuple[torch.Tensor, bool]]]:
    """Blanks without memory in the place of all parameters, by first name, and whether they train; afterwards the
    parameters are back. Code outside of units may read those inside: ``self.positions.weight[:length]``."""
    taken: list[tuple[nn.Module, str, nn.Parameter]] = []
    blanks: dict[int, torch.Tensor] = {}
    named: dict[str, tuple[torch.Tensor, bool]] = {}
    for prefix, module in model.named_modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            taken.append((module, key, parameter))
            if id(parameter) not in blanks:
                blanks[id(parameter)] = blank((), parameter.dtype, device).expand(parameter.shape)
                named[f"{prefix}.{key}" if prefix else key] = blanks[id(parameter)], parameter.requires_grad
            del module._parameters[key]
            module.__dict__[key] = blanks[id(parameter)]
    try:
        yield named
    finally:
        for module, key, parameter in taken:
            del module.__dict__[key]
            module._parameters[key] = parameter
