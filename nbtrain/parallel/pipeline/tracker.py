"""Following what comes from where through the operations of a skeleton, by the storage of each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nbtrain.errors import ModelError
from nbtrain.parallel.pipeline.score import Value

Label = Value | str
"""Of a tensor: a unit's output, or the name of a parameter."""

_READING = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "unique")
"""Operations by which Python's own code, or a shape, comes to depend on values."""


class Labels:
    """By storage: views share what is written into one of them."""

    def __init__(self) -> None:
        self._sets: dict[int, set[Label]] = {}
        self._origins: dict[int, Label] = {}
        self._kept: list[Any] = []  # a storage's address is its name only as long as it lives

    def of(self, tensors: Iterable[Any]) -> set[Label]:
        found: set[Label] = set()
        for tensor in tensors:
            if (key := _storage(tensor)) is not None:
                found |= self._sets.get(key, set())
        return found

    def begin(self, tensor: torch.Tensor, label: Label) -> None:
        """``tensor`` is what ``label`` names, in memory of its own."""
        if (key := _storage(tensor)) is not None:
            self._origins[key] = label
            self.add(tensor, {label})

    def origin(self, tensor: Any) -> Label | None:
        """Whose own memory ``tensor`` lies in."""
        key = _storage(tensor)
        return None if key is None else self._origins.get(key)

    def add(self, tensor: torch.Tensor, labels: set[Label]) -> None:
        if (key := _storage(tensor)) is not None:
            self._sets.setdefault(key, set()).update(labels)
            self._kept.append(tensor)


def _storage(tensor: Any) -> int | None:
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or tensor.layout != torch.strided:
        return None
    return int(tensor.untyped_storage()._cdata)


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows labels through operations of the skeleton.

    Attributes:
        random: Whether random numbers were drawn.
        decisive: What Python's own code has read: it decides about all that follows.
        written: Outputs of units into which the skeleton has written.
    """

    def __init__(self, labels: Labels) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._labels = labels
        self._is_paused = self.random = False
        self.decisive: set[Label] = set()
        self.written: set[Value] = set()

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """What is done inside is no matter of the skeleton."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        given = tree_leaves((args, kwargs))
        if any(isinstance(leaf, FakeTensor) for leaf in given):
            raise ModelError(
                "a module hands a tensor to the model's own code by a hook, a list or an object, and other pipeline "
                "stages do not have it; let the module return it, or type pp=1"
            )
        output = func(*args, **kwargs)
        if draws(func, args, kwargs):
            self.random = True
            if kwargs.get("generator") is not None:
                raise ModelError(
                    "the model's own code draws from a torch.Generator, which each pipeline stage would draw from; "
                    "use the default one, or draw inside of a module that one stage runs"
                )
        written = list(_written(func, args, kwargs))
        if found := self._labels.of(given):
            if func.overloadpacket.__name__ in _READING:
                self.decisive |= found
            for tensor in (*tree_leaves(output), *written):
                if isinstance(tensor, torch.Tensor):
                    self._labels.add(tensor, found)
        self.written |= {label for one in written if isinstance(label := self._labels.origin(one), Value)}
        return output


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers: attention does so only where it drops."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from tree_leaves(given)
