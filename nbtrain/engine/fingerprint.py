"""What a call of a collective says that must be said alike on all ranks of its group.

Element counts must agree, shapes need not: a [4] and a [2, 2] hold the same bytes. What may legally differ is left out:
lists that only one rank gives, objects, and the splits of an all-to-all, which are compared pair by pair.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Arguments = Mapping[str, Any]

# Old names of what has a new one, and the two ends of a message.
_SAME = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
_SAME |= dict.fromkeys(("send", "isend", "recv", "irecv"), "message")


@dataclass(frozen=True)
class Call:
    """A call of ``op``: ``text`` for a person, ``facts`` that must be equal on all ranks.

    ``sends`` and ``receives`` are elements by peer, of an all-to-all only.
    """

    op: str
    tensors: tuple[torch.Tensor, ...]
    text: str
    facts: tuple[Any, ...]
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        return hashlib.blake2b(repr((_SAME.get(self.op, self.op), self.facts)).encode(), digest_size=8).hexdigest()


def of_collective(op: str, given: Arguments, group: dist.ProcessGroup) -> Call:
    """The fingerprint of ``op`` called with ``given`` (by parameter name).

    Raises:
        Exception: of any kind, if the arguments make no sense: torch says so better.
    """
    if op.startswith("all_to_all"):
        return _all_to_all(op, given, group)
    tensors = tuple(_TENSORS.get(op, _no_tensors)(given))
    facts: list[Any] = [tensor.numel() for tensor in tensors] + [tensor.dtype for tensor in tensors[:1]]
    text = op
    if op in _REDUCING:
        reduction = given.get("op", dist.ReduceOp.SUM)
        name = getattr(reduction, "name", str(reduction))
        text, facts = f"{op}({name})", [*facts, name]
    text += _of(tensors)
    if root := _root(op, given, group):
        direction, rank = root
        text, facts = f"{text} {direction} rank {rank}", [*facts, rank]
    if op == "broadcast_object_list":
        facts.append(len(given["object_list"]))
        text += f" of {len(given['object_list'])}"
    return Call(op, tensors, text, tuple(facts))


def of_message(op: str, tensor: torch.Tensor) -> Call:
    """The fingerprint of one end of a send and a receive, which fit if their elements do."""
    return Call(op, (tensor,), op + _of([tensor]), (tensor.numel(), tensor.dtype))


def fit(calls: Mapping[int, Call]) -> bool:
    """Whether what each rank sends in an all-to-all is what the other expects; ``calls`` by rank of the group."""
    return all(
        call.sends[peer] == other.receives[rank]
        for rank, call in calls.items()
        for peer, other in calls.items()
        if call.sends and other.receives
    )


def _all_to_all(op: str, given: Arguments, group: dist.ProcessGroup) -> Call:
    if op == "all_to_all":
        outputs, inputs = tuple(given["output_tensor_list"]), tuple(given["input_tensor_list"])
        sends, receives = (tuple(tensor.numel() for tensor in tensors) for tensors in (inputs, outputs))
    else:
        inputs = (given["input"],)
        sends = _split(given["input"], given.get("input_split_sizes"), group.size())
        receives = _split(given["output"], given.get("output_split_sizes"), group.size())
    text = f"{op} of {_dtype(inputs[0])}, sends {list(sends)}, receives {list(receives)} elements"
    return Call(op, inputs, text, (inputs[0].dtype,), sends, receives)


def _split(tensor: torch.Tensor, sizes: Sequence[int] | None, world_size: int) -> tuple[int, ...]:
    """Elements by peer; ``sizes`` are along dim 0."""
    if not sizes:
        return (tensor.numel() // world_size,) * world_size
    row = tensor.numel() // max(tensor.shape[0], 1)
    return tuple(size * row for size in sizes)


def _root(op: str, given: Arguments, group: dist.ProcessGroup) -> tuple[str, int] | None:
    """Whence or where to, as a global rank; None for an operation without a root."""
    kind = _ROOTED.get(op)
    if kind is None:
        return None
    within = given.get(f"group_{kind}")
    rank = (given.get(kind) or 0) if within is None else dist.get_global_rank(group, within)
    return ("from" if kind == "src" else "to"), int(rank)


def _of(tensors: Sequence[torch.Tensor]) -> str:
    if not tensors:
        return ""
    return f" of {_dtype(tensors[0])} " + ", ".join(str(list(tensor.shape)) for tensor in tensors)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _no_tensors(given: Arguments) -> list[torch.Tensor]:
    return []


def _gathered(given: Arguments) -> list[torch.Tensor]:
    """NCCL takes pieces of different sizes, if all ranks name the same ones; gloo wants one size."""
    own = [given["tensor"]] if given["tensor"].device.type == "cpu" else []
    return [*own, *given["tensor_list"]]


_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor")
_ROOTED = {
    "broadcast": "src",
    "scatter": "src",
    "broadcast_object_list": "src",
    "scatter_object_list": "src",
    "reduce": "dst",
    "gather": "dst",
    "gather_object": "dst",
}
_TENSORS: dict[str, Callable[[Arguments], list[torch.Tensor]]] = {
    "all_reduce": lambda given: [given["tensor"]],
    "broadcast": lambda given: [given["tensor"]],
    "reduce": lambda given: [given["tensor"]],
    "gather": lambda given: [given["tensor"]],
    "scatter": lambda given: [given["tensor"]],
    "all_gather": _gathered,
    "all_gather_single": lambda given: [given["input_tensor"]],
    "all_gather_into_tensor": lambda given: [given["input_tensor"]],
    "reduce_scatter": lambda given: list(given["input_list"]),
    "reduce_scatter_single": lambda given: [given["input"]],
    "reduce_scatter_tensor": lambda given: [given["input"]],
}
