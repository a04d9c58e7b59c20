"""`Twins`: the units of a model, run without their weights to find the shapes that they give."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from nbtrain.errors import ModelError
from nbtrain.parallel.pipeline.alike import Alike, Ran
from nbtrain.parallel.pipeline.quiet import quiet
from nbtrain.parallel.pipeline.tracker import draws

SMALL = 0.02
_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")  # gets the traceback of a shape that cannot be


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
        self._meta, self._alike = structure, Alike()
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

    def run(self, unit: str, modes: dict[str, bool], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ran:
        """A forward of one unit, or of one that is like it.

        Args:
            unit: Its name.
            modes: ``training`` of each module in it, by name.
            args: Real tensors.
            kwargs: Too.

        Raises:
            ModelError: It adds to what it was given, or gives numbers that depend on values.
        """
        twin = _in_modes(self._structure.get_submodule(unit), modes)
        return self._alike.run(twin, args, kwargs, lambda: self._run(unit, twin, modes, args, kwargs))

    def _run(
        self, unit: str, twin: nn.Module, modes: dict[str, bool], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Ran:
        try:
            return self._run_fake(unit, twin, args, kwargs)
        except ModelError:
            raise
        except Exception:  # of shapes that depend on values, and of kernels that know no fake tensors
            pass
        return self._run_constant(unit, modes, args, kwargs)

    def _run_fake(self, unit: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ran:
        counter, watch = FlopCounterMode(display=False), _Randomness()  # type: ignore[no-untyped-call]
        given = tree_map(self._fake, (args, kwargs))
        counting = counter if self._counts else nullcontext()
        with _Kept(module) as kept, _untouched(unit, given), quiet(_LOGGER), self._mode, watch, counting:
            output = module(*given[0], **given[1])
        cost = float(counter.get_total_flops()) if self._counts else 0.0
        return Ran(output, kept.found, cost, watch.seen)

    def _run_constant(self, unit: str, modes: dict[str, bool], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ran:
        """A real forward of one unit, whose weights are one number, on inputs that are one too."""
        module = copy.deepcopy(self._meta.get_submodule(unit))
        made: dict[int, Any] = {}
        for part in module.modules():
            for slots in (part._parameters, part._buffers):
                for name, tensor in slots.items():
                    if tensor is not None and tensor.is_meta:
                        slots[name] = made.setdefault(id(tensor), self._constant(tensor))
        watch = _Randomness()  # type: ignore[no-untyped-call]
        given = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        with _Kept(module) as kept, _untouched(unit, given), torch.random.fork_rng(devices=[]), watch:
            output = _in_modes(module, modes)(*given[0], **given[1])
        _require_no_numbers(unit, output)
        # operations were not counted: most of them are the weights', by each position of the input
        cost = 2.0 * sum(one.numel() for one in module.parameters())
        return Ran(output, kept.found, cost * _num_positions((args, kwargs)), watch.seen)

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        value = SMALL if tensor.is_floating_point() else 0
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
        self.seen = self.seen or draws(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Kept:
    """Notices tensors that code inside leaves as attributes of modules: auxiliary losses, attention maps."""

    def __init__(self, unit: nn.Module) -> None:
        self._modules = dict(unit.named_modules())
        self.found: dict[tuple[str, str], torch.Tensor] = {}

    def __enter__(self) -> _Kept:
        self._before = {name: dict(vars(module)) for name, module in self._modules.items()}
        return self

    def __exit__(self, *problem: object) -> None:
        for name, module in self._modules.items():
            for key, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value is not self._before[name].get(key):
                    self.found[name, key] = value


@contextmanager
def _untouched(unit: str, given: Any) -> Iterator[None]:
    """Raises `ModelError` where a unit adds to lists, dicts or objects that it was given: no other stage would see it.

    What such an object has inside of lists is its own matter: caches of keys and values do that.
    """
    leaves = tree_leaves(given)
    held = [(leaf, dict(vars(leaf))) for leaf in leaves if _is_object(leaf)]
    yield
    now = tree_leaves(given)
    changed = len(now) != len(leaves) or any(one is not other for one, other in zip(now, leaves, strict=True))
    for leaf, before in held:
        changed = changed or any(
            isinstance(value, torch.Tensor | float | int) and value is not before.get(key)
            for key, value in vars(leaf).items()
        )
    if changed:
        raise ModelError(
            f"'{unit}' changes a list, dict or object that it was given, which other pipeline stages do not see; let "
            "it return what it adds, or type pp=1"
        )


def _require_no_numbers(unit: str, output: Any) -> None:
    if any(type(leaf) in (int, float, bool) for leaf in tree_leaves(output)):
        raise ModelError(
            f"'{unit}' gives a Python number that seems to depend on values (.item()), and other pipeline stages would "
            "not know it; let it give a tensor, or type pp=1"
        )


def _is_object(leaf: Any) -> bool:
    return hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor | nn.Module | type)
