"""What a constructor did to its tensors, as data: operations on storages, to be done for real later.

::

    storage of blocks.0.weight    empty, uniform_            its own history
    storage of head.weight        randn, mul 0.02            randn's storage is an intermediate one
    storage of ema.weight         empty, copy_ <- storage of blocks.0.weight as it was then

Views are no operations: a tensor is a storage and a geometry. So parameters that were detached, transposed, assigned to
``.data`` or tied are found by their storage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

_ATTRIBUTE = "_nbtrain_slot"
_UNINITIALISED = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
}
_numbers = itertools.count()


@dataclass(eq=False)
class Slot:
    """A storage without memory, and all that was written to it.

    Attributes:
        seed: Of the `meta_init` under which it was made.
    """

    seed: int
    num_bytes: int
    writes: list[Entry] = field(default_factory=list)


@dataclass(frozen=True)
class Ref:
    """A tensor: a geometry on a storage."""

    slot: Slot
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor on a storage that has memory."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)

    @property
    def key(self) -> tuple[Any, ...]:
        """What it is apart from its storage."""
        return self.dtype, self.shape, self.stride, self.offset


@dataclass(frozen=True)
class Constant:
    """A tensor that was real when it was read: Python's or NumPy's numbers."""

    tensor: torch.Tensor


@dataclass(eq=False)
class Entry:
    """One operation.

    Attributes:
        number: Operations happened in this order.
        arguments: ``(args, kwargs)`` with `Ref` and `Constant` in the place of tensors.
        results: Of each tensor that it returned; None where that is a view of an argument.
        written: Storages that it made or changed.
        is_random: Whether it draws random numbers.
    """

    number: int
    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    results: list[Ref | None]
    written: list[Slot]
    is_random: bool

    @property
    def reads(self) -> list[Slot]:
        return [leaf.slot for leaf in tree_flatten(self.arguments)[0] if isinstance(leaf, Ref)]

    def run(self, storages: dict[Slot, torch.UntypedStorage], device: torch.device) -> None:
        """Does it for real.

        Args:
            storages: Those that have memory by now; what it makes is added.
            device: Where it is done.
        """
        args, kwargs = tree_map_only(Ref, lambda ref: ref.of(storages[ref.slot]), self.arguments)
        args, kwargs = tree_map_only(Constant, lambda constant: constant.tensor.to(device), (args, kwargs))
        args, kwargs = tree_map_only(torch.device, lambda _: device, (args, kwargs))
        made = _tensors(self.function(*args, **kwargs))
        for ref, tensor in zip(self.results, made, strict=True):
            if ref is not None and ref.slot not in storages:
                storages[ref.slot] = self._storage(ref, tensor)

    def _storage(self, ref: Ref, tensor: torch.Tensor) -> torch.UntypedStorage:
        if getattr(self.function, "overloadpacket", None) in _UNINITIALISED:
            tensor.zero_()  # what is never initialised must be the same on all ranks
        if (tensor.stride(), tensor.storage_offset()) == (ref.stride, ref.offset):
            return tensor.untyped_storage()
        storage = torch.UntypedStorage(ref.slot.num_bytes, device=tensor.device)  # type: ignore[no-untyped-call]
        ref.of(storage).copy_(tensor)
        return storage


def slot_of(tensor: torch.Tensor) -> Slot | None:
    """The storage of a tensor that was made under `meta_init`; None of any other."""
    # under `meta_init` its device looks like a real one
    with torch._C.DisableTorchFunction():
        if not tensor.is_meta or tensor.layout != torch.strided:
            return None
        slot: Slot | None = getattr(tensor.untyped_storage(), _ATTRIBUTE, None)
        return slot


def ref_of(tensor: torch.Tensor, slot: Slot) -> Ref:
    return Ref(slot, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def track(tensor: torch.Tensor, seed: int) -> Slot:
    """Begins the history of a meta tensor's storage, which keeps it as long as it lives."""
    storage = tensor.untyped_storage()
    slot = Slot(seed, storage.nbytes())
    setattr(storage, _ATTRIBUTE, slot)
    return slot


def record(function: Callable[..., Any], arguments: Any, result: Any, changed: Iterable[Slot], seed: int) -> None:
    """Adds an operation to the history of the storages that it made or changed; a view has none.

    Args:
        function: An operator of torch; what is none counts as random.
        arguments: ``(args, kwargs)`` with `Ref` and `Constant`, as they were before.
        result: What the operation returned on meta.
        changed: Storages of the arguments that it wrote to.
    """
    written = list(dict.fromkeys(changed))
    results: list[Ref | None] = []
    for tensor in _tensors(result):
        slot = slot_of(tensor)
        if slot is None:
            slot = track(tensor, seed)
            written.append(slot)
            results.append(ref_of(tensor, slot))
        else:
            results.append(ref_of(tensor, slot) if slot in written else None)
    if written:
        is_random = torch.Tag.nondeterministic_seeded in getattr(function, "tags", [torch.Tag.nondeterministic_seeded])
        entry = Entry(next(_numbers), function, arguments, results, written, is_random)
        for slot in written:
            slot.writes.append(entry)


def history(slot: Slot) -> list[Entry]:
    """All operations that the last value of a storage depends on, in order."""
    needed: dict[int, Entry] = {}
    pending: list[tuple[Slot, float]] = [(slot, float("inf"))]
    while pending:
        source, before = pending.pop()
        for entry in source.writes:
            if entry.number < before and entry.number not in needed:
                needed[entry.number] = entry
                pending += [(read, entry.number) for read in entry.reads]
    return [needed[number] for number in sorted(needed)]


def replay(ref: Ref, device: torch.device, before_random: Callable[[Entry], None]) -> torch.Tensor:
    """The value of a tensor: a new one on ``device``, with its own memory.

    Args:
        before_random: Called before each operation that draws random numbers.
    """
    storages: dict[Slot, torch.UntypedStorage] = {}
    # nested modes (a model that is built under another one's mode) must not see it
    with torch.no_grad(), torch._C.DisableTorchFunction():
        for entry in history(ref.slot):
            if entry.is_random:
                before_random(entry)
            entry.run(storages, device)
        tensor = ref.of(storages[ref.slot])
        alone = tensor.numel() * tensor.element_size() == ref.slot.num_bytes
        return tensor if alone else tensor.clone()


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
