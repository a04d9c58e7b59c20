"""`meta_init`: a model that is built without memory, whose weights depend on seed and name alone.

While the constructor runs, its tensors are on the meta device and what it does to them is recorded
(`nbtrain.parallel.tape`). `Deferred` knows the names, and makes any one tensor for real.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules import module as registration
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from nbtrain.errors import ModelError, UsageError
from nbtrain.parallel.tape import Constant, Entry, Ref, Slot, history, record, ref_of, replay, slot_of

_META, _CPU = torch.device("meta"), torch.device("cpu")
_CURE = "build the model without nt.meta_init()"
# of registered tensors, when their `meta_init` ended
_versions: Any = WeakTensorKeyDictionary()


@contextlib.contextmanager
def meta_init(seed: int = 0) -> Iterator[None]:
    """Models built inside have no memory until `parallelize` or `Trainer` makes each rank's part of them.

    Their weights are what their own initialisation draws, from numbers that depend on ``seed`` and the parameter's
    name (the first of a tied one), and on nothing else: any plan on any number of ranks starts from the same weights,
    on one kind of device. The largest memory of a rank is its shards, one whole parameter and its part of that.
    Memory that a constructor leaves uninitialised is 0. Random numbers outside the block are not touched.

    Whatever changes the weights belongs inside: ``apply(init)``, ``to(dtype)``, tying, ``copy.deepcopy``.

    Raises:
        ModelError: The constructor reads a number that it has drawn, which does not exist yet.
        UsageError: It is inside another one.
    """
    if any(isinstance(mode, _Recorder) for mode in _active_modes()):
        raise UsageError("nt.meta_init() is already active; leave the inner one out")
    if not isinstance(seed, int):
        raise UsageError(f"seed={seed!r} must be an integer, e.g. nt.meta_init(seed=0)")
    with torch.random.fork_rng(devices=[]), _registered() as tensors:
        torch.default_generator.manual_seed(seed)  # for what is built on a real device all the same
        with _whole_calls(seed), _LikeReal(), _Recorder(seed):
            yield
        for tensor in tensors():
            _versions[tensor] = tensor._version


class Deferred:
    """The tensors of a model that was built under `meta_init`, by name.

    Args:
        model: The whole model, before it is cut, split or sharded: names decide what is drawn.
    """

    def __init__(self, model: nn.Module) -> None:
        self._refs = {name: ref for name, tensor in _named(model) if (ref := _ref(tensor)) is not None}
        self._seeds: dict[Entry, int] = {}
        for name, entries in self._random_entries().items():
            for index, entry in enumerate(entries):
                mixed = f"nbtrain {entry.written[0].seed} {name} {index}"
                self._seeds[entry] = random.Random(mixed).getrandbits(63)

    def __contains__(self, name: str) -> bool:
        return name in self._refs

    def __bool__(self) -> bool:
        return bool(self._refs)

    def make(self, name: str, device: torch.device) -> torch.Tensor:
        """The whole tensor, for real. Random numbers outside are not touched."""
        generator = _generator(device)
        state = generator.get_state()
        try:
            return replay(self._refs[name], device, lambda entry: _seed(generator, self._seeds[entry]))
        finally:
            generator.set_state(state)

    def digest(self) -> str:
        """The same on two ranks where both make the same weights."""
        digest = hashlib.blake2b(digest_size=16)
        for name, ref in self._refs.items():
            digest.update(f"{name} {ref.key}".encode())
            for entry in history(ref.slot):
                digest.update(_spelled(entry))
        return digest.hexdigest()

    def _random_entries(self) -> dict[str, list[Entry]]:
        """Operations that draw numbers, by the name of the tensor that they are drawn for, each list in order.

        What was drawn for a tensor that is no part of the model, such as the layer of which others are copies, belongs
        to the first that depends on it.
        """
        owners: dict[Slot, str] = {}
        for name, ref in self._refs.items():
            owners.setdefault(ref.slot, name)
        found: dict[Entry, str] = {}
        for name, ref in self._refs.items():
            for entry in history(ref.slot):
                if entry.is_random:
                    found.setdefault(entry, owners.setdefault(entry.written[0], name))
        entries: dict[str, list[Entry]] = {}
        for entry in sorted(found, key=lambda entry: entry.number):
            entries.setdefault(found[entry], []).append(entry)
        return entries


def is_deferred(tensor: torch.Tensor) -> bool:
    """Whether it was made under `meta_init`, and nothing is known to have changed it since."""
    return slot_of(tensor) is not None


def changed_since(tensor: torch.Tensor) -> bool:
    """Whether a registered tensor was written to after its `meta_init` had ended: that was not recorded."""
    return bool(_versions.get(tensor, tensor._version) != tensor._version)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on meta, and records those that make or change a storage."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        if func is torch.ops.aten.lift_fresh.default and not tensors[0].is_meta:
            return self._constant(tensors[0])
        if tensors and not any(slot_of(tensor) for tensor in tensors):
            return func(*args, **kwargs)  # of real tensors
        for argument, tensor in _written(func, args, kwargs):
            if slot_of(tensor) is None:
                raise ModelError(f"{_place()} writes what does not exist yet to a real tensor ({argument}); {_CURE}")
        if _gives_numbers(func):
            return _really(func, args, kwargs)
        return self._record(func, args, kwargs)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = _on_meta(func, kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        leaves = [None if isinstance(leaf, torch.Generator) else leaf for leaf in leaves]
        described = tree_unflatten([_described(leaf) for leaf in leaves], tree)
        meta_args, meta_kwargs = tree_unflatten([_as_meta(leaf) for leaf in leaves], tree)
        changed = [slot for _, tensor in _written(func, args, kwargs) if (slot := slot_of(tensor)) is not None]
        try:
            result = func(*meta_args, **meta_kwargs)
        except NotImplementedError:  # shapes depend on values
            return tree_map_only(torch.Tensor, self._constant, _really(func, args, kwargs))
        record(func, _with_dtype(func, described, result), result, changed, self._seed)
        return result

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """A recorded tensor with the value of a real one."""
        twin = torch.empty_like(tensor, device=_META)
        arguments: Any = (Constant(tensor.detach().clone()),), {}
        record(torch.ops.aten.clone.default, arguments, twin, [], self._seed)
        return twin


class _LikeReal(TorchFunctionMode):
    """Makes a recorded tensor look like one in host memory: code that asks would not initialise it on meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _ANSWERS.get(func)
        if answer is not None and slot_of(args[0]) is not None:
            return answer(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _whole_calls(seed: int) -> Iterator[None]:
    """Records truncated normals as one operation: torch draws again until all numbers are within the bounds."""
    original = nn.init._no_grad_trunc_normal_

    def trunc_normal_(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        slot = slot_of(tensor)
        if slot is None:
            return original(tensor, *args, **options)
        plain = {key: None if key == "generator" else value for key, value in options.items()}
        record(original, ((ref_of(tensor, slot), *args), plain), tensor, [slot], seed)
        return tensor

    nn.init._no_grad_trunc_normal_ = trunc_normal_
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


def _value(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, where that does not depend on random numbers."""
    slot = slot_of(tensor)
    if slot is None:
        return tensor
    if any(entry.is_random for entry in history(slot)):
        raise ModelError(
            f"{_place()} reads numbers that are drawn at random, which under nt.meta_init() are not drawn before the "
            f"model is laid out; {_CURE}"
        )
    # not under the recorder: it would record
    with torch.utils._python_dispatch._disable_current_modes():
        return replay(ref_of(tensor, slot), _CPU, lambda entry: None)


_TENSOR: Any = torch.Tensor
_ANSWERS: dict[Any, Callable[..., Any]] = {
    _TENSOR.device.__get__: lambda tensor: _CPU,
    _TENSOR.is_meta.__get__: lambda tensor: False,
    _TENSOR.is_cpu.__get__: lambda tensor: True,
    _TENSOR.tolist: lambda tensor: _value(tensor.detach()).tolist(),
    _TENSOR.numpy: lambda tensor, **options: _value(tensor.detach()).numpy(**options),
    _TENSOR.__array__: lambda tensor, *args: cast(Any, _value(tensor.detach())).__array__(*args),
}


def _really(func: Any, args: Any, kwargs: Any) -> Any:
    real_args, real_kwargs = tree_map_only(torch.Tensor, _value, (args, kwargs))
    with torch.utils._python_dispatch._disable_current_modes():
        return func(*real_args, **real_kwargs)


def _gives_numbers(func: Any) -> bool:
    """Whether it returns Python's numbers (``item``, ``equal``)."""
    returns = func._schema.returns
    return bool(returns) and any(str(value.type) in ("number", "bool", "int", "float") for value in returns)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The arguments that the operation writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            for leaf in tree_flatten(value)[0]:
                if isinstance(leaf, torch.Tensor):
                    yield argument.name, leaf


def _on_meta(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A copy to another device stays on meta; what makes a tensor makes it there."""
    takes_device = any(argument.name == "device" for argument in func._schema.arguments)
    if "device" in kwargs or (takes_device and not _has_tensor(func)):
        return {**kwargs, "device": _META}
    return kwargs


def _has_tensor(func: Any) -> bool:
    return any("Tensor" in str(argument.type) for argument in func._schema.arguments)


def _with_dtype(func: Any, arguments: Any, result: Any) -> Any:
    """A factory's dtype is that of ``torch.get_default_dtype()`` now, not then."""
    args, kwargs = arguments
    takes_dtype = any(argument.name == "dtype" for argument in func._schema.arguments)
    if takes_dtype and not _has_tensor(func) and isinstance(result, torch.Tensor):
        return args, {**kwargs, "dtype": result.dtype}
    return arguments


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    slot = slot_of(leaf)
    return Constant(leaf.detach().clone()) if slot is None else ref_of(leaf, slot)


def _as_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
        return torch.empty_like(leaf, device=_META)
    return leaf


def _spelled(entry: Entry) -> bytes:
    leaves = tree_flatten(entry.arguments)[0]
    plain = [leaf.key if isinstance(leaf, Ref) else leaf for leaf in leaves if not isinstance(leaf, Constant)]
    constants = [
        leaf.tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for leaf in leaves
        if isinstance(leaf, Constant)
    ]
    return b" ".join([f"{entry.function} {[slot.seed for slot in entry.written]} {plain}".encode(), *constants])


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Under their first names."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _ref(tensor: torch.Tensor) -> Ref | None:
    slot = slot_of(tensor)
    return None if slot is None else ref_of(tensor, slot)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _seed(generator: torch.Generator, seed: int) -> None:
    generator.manual_seed(seed)


def _active_modes() -> list[Any]:
    return torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@contextlib.contextmanager
def _registered() -> Iterator[Callable[[], Iterator[torch.Tensor]]]:
    """Collects the parameters and buffers that modules get meanwhile."""
    seen: list[weakref.ref[torch.Tensor]] = []

    def see(module: nn.Module, name: str, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            seen.append(weakref.ref(tensor))

    hooks = [
        registration.register_module_parameter_registration_hook(see),
        registration.register_module_buffer_registration_hook(see),
    ]
    try:
        yield lambda: (tensor for reference in seen if (tensor := reference()) is not None)
    finally:
        for hook in hooks:
            hook.remove()


def _place() -> str:
    """The line of the model's code that runs."""
    for frame in reversed(traceback.extract_stack()):
        if not any(part in frame.filename for part in ("/torch/", "nbtrain/parallel/")):
            return f"{frame.line!r} ({frame.filename}, line {frame.lineno})"
    return "the constructor"
