"""`rehearse`: finds the `Score` of a forward without running a unit.

The skeleton's own code runs as it does in a step. Each unit is run by a twin on fake tensors, which have shapes and no
memory, and gives blanks of those shapes. Which unit's output reaches which unit is followed operation by operation, by
the storage of each tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
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
from nbtrain.parallel.pipeline.score import Call, Meta, Passed, Score, Value
from nbtrain.parallel.pipeline.skeleton import Skeleton

_SMALL = 0.02

Label = Value | str
"""Of a tensor: a unit's output, or the name of a parameter outside of units."""


class Twins:
    """The units of a model on fake tensors.

    Args:
        structure: The model on the meta device.
        device: Where the model lives.
        dtype: That FSDP casts parameters and inputs of units to; None leaves them.
        counts: Whether operations are counted, which takes time.
    """

    def __init__(
        self, structure: nn.Module, device: torch.device, dtype: torch.dtype | None = None, *, counts: bool = False
    ) -> None:
        self._counts = counts
        self._meta = structure
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
        try:
            return self._run_fake(unit, modes, args, kwargs)
        except Exception:  # of shapes that depend on values, and of kernels that know no fake tensors
            return self._run_constant(unit, modes, args, kwargs)

    def _run_fake(
        self, unit: str, modes: dict[str, bool], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, float, bool]:
        module = _in_modes(self._structure.get_submodule(unit), modes)
        counter, watch = FlopCounterMode(display=False), _Randomness()  # type: ignore[no-untyped-call]
        with self._mode, watch, counter if self._counts else nullcontext():
            output = module(*tree_map(self._fake, args), **tree_map(self._fake, kwargs))
        return output, float(counter.get_total_flops()) if self._counts else 0.0, watch.seen

    def _run_constant(
        self, unit: str, modes: dict[str, bool], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, float, bool]:
        """A real forward of one unit, whose weights are one number, on inputs that are one too."""
        module = copy.deepcopy(self._meta.get_submodule(unit))
        made: dict[int, Any] = {}
        for part in module.modules():
            for slots in (part._parameters, part._buffers):
                for name, tensor in slots.items():
                    if tensor is not None and tensor.is_meta:
                        slots[name] = made.setdefault(id(tensor), self._constant(tensor))
        watch = _Randomness()  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices=[]), watch:
            output = _in_modes(module, modes)(*tree_map(_tame, args), **tree_map(_tame, kwargs))
        # operations were not counted: most of them are the weights', by each position of the input
        cost = 2.0 * sum(one.numel() for one in module.parameters())
        return output, cost * _num_positions((args, kwargs)), watch.seen

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        value = _SMALL if tensor.is_floating_point() else 0
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        made = torch.full(tensor.shape, value, dtype=dtype, device=self._device)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

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


def _in_modes(module: nn.Module, modes: dict[str, bool]) -> nn.Module:
    for name, training in modes.items():
        module.get_submodule(name).training = training
    return module


def _tame(value: Any) -> Any:
    """A blank is of NaNs, by which code may choose nothing."""
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return torch.nan_to_num(value, nan=_SMALL) if is_float else value


def _num_positions(given: Any) -> int:
    """Of the first activation: the elements of all dims but the last."""
    tensors = (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.ndim > 1)
    return next((leaf.shape[:-1].numel() for leaf in tensors), 1)


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
        skeleton: What is around them.
        device: Where the model lives.
    """

    def __init__(self, twins: Twins, units: dict[str, nn.Module], skeleton: Skeleton, device: torch.device) -> None:
        self._twins, self._units, self._skeleton, self._device = twins, units, skeleton, device
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
            with self._skeleton.unchanged(self._is_grown), torch.no_grad(), conducted(self), self._tracker:
                output = forward()
        reads, names = _sorted_out(self._labels.of(tree_leaves(_plain(output))))
        return Score(tuple(self._calls), reads, names, self._random or self._tracker.random)

    def _is_grown(self, tensor: torch.Tensor) -> bool:
        return any(isinstance(label, Value) for label in self._labels.of([tensor]))

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
                f"the shape of what '{unit}' gives could not be found without its weights ({type(problem).__name__}: "
                f"{problem}); type pp=1, or cut what depends on values out of it"
            ) from problem
        finally:
            self._tracker.paused = False
        self._random |= random
        grown = self._twins.has_trained(unit) or bool(reads & self._grown) or bool(parameters & self._trained)
        leaves, form = tree_flatten(output)
        given = tree_leaves((args, kwargs))
        metas = tuple(self._meta(unit, leaf, grown, given) for leaf in leaves)
        self._calls.append(Call(unit, metas, form, reads, parameters, cost))
        stand_ins = [self._blank(Value(position, index), meta, given) for index, meta in enumerate(metas)]
        return self._calls[-1].output(stand_ins)

    def _meta(self, unit: str, leaf: Any, grown: bool, given: list[Any]) -> Any:
        if isinstance(leaf, torch.Tensor):
            return Meta(tuple(leaf.shape), leaf.dtype, grown and leaf.is_floating_point())
        if (index := next((i for i, one in enumerate(given) if one is leaf and _is_object(one)), None)) is not None:
            return Passed(index)
        if _holds_tensors(leaf):
            raise ModelError(
                f"'{unit}' gives a {type(leaf).__name__} that holds tensors, and no other stage can be sent it; let it "
                "give tensors in tuples, lists or dicts"
            )
        return leaf

    def _blank(self, value: Value, meta: Any, given: list[Any]) -> Any:
        if isinstance(meta, Passed):
            return given[meta.index]
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


def _is_object(leaf: Any) -> bool:
    return hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor | type)


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
