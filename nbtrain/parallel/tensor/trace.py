"""Follows the features of a model's linear layers through one forward: abstract interpretation on a probe batch.

Beside each tensor that depends on cut features goes a tensor of the same shape that names, for each element, the
feature (`features.Features`) on which it depends. What moves elements moves the names; what computes one number from
several joins them. Nothing goes by the names of classes or attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nbtrain.parallel.tensor import operations as known
from nbtrain.parallel.tensor.features import Features

_NAME = "_nbtrain_features"
Func = Callable[..., Any]
Rule = Callable[["Trace", Func, Any, Any], Any]


@dataclass(frozen=True)
class Touch:
    """An operation on features.

    Attributes:
        node: One of the features.
        module: Names of the running modules, outermost first.
        op: What was called.
        joined: How many features it joined.
        written: It was given sizes, draws random numbers or takes whole tensors, so that `Marks` must be active.
    """

    node: int
    module: tuple[str, ...]
    op: str
    joined: int
    written: bool


@dataclass
class Record:
    """What a trace saw.

    Attributes:
        touches: Of features, in order.
        partial: Whole leaves that act on features: their id and one of the features.
        used: Ids of tensors that some operation outside of layers took, and in which modules.
    """

    touches: list[Touch] = field(default_factory=list)
    partial: list[tuple[int, int]] = field(default_factory=list)
    used: dict[int, set[str]] = field(default_factory=dict)


def nodes_of(value: Any) -> Tensor | None:
    found: Tensor | None = getattr(value, _NAME, None) if isinstance(value, Tensor) else None
    return found


def set_nodes(tensor: Tensor, nodes: Tensor) -> None:
    setattr(tensor, _NAME, nodes.expand(tensor.shape))


class Trace(TorchFunctionMode):
    """Carries the features' names along.

    Args:
        stack: Names of the running modules; `layers.Layers` keeps it.
    """

    def __init__(self, features: Features, stack: list[str]) -> None:
        super().__init__()
        self.features, self.stack, self.record = features, stack, Record()
        self.inside_layer = False
        self._alive: list[Tensor] = []  # ids must not be used again

    def __torch_function__(
        self, func: Func, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.inside_layer:
            return func(*args, **kwargs)
        operands = list(tensors((args, kwargs)))
        if not any(nodes_of(value) is not None for value in operands):
            result = func(*args, **kwargs)
            self._use(operands, result)
            return result
        before = len(self.features.edges)
        rule: Rule = _RULES.get(func, opaque)
        result = rule(self, func, args, kwargs)
        self._use(operands, result)
        self._touch(func, args, kwargs, result, sum(pair.shape[1] for pair in self.features.edges[before:]))
        return result

    def _use(self, operands: list[Tensor], result: Any) -> None:
        if any(True for _ in tensors(result)):
            for value in operands:
                self.record.used.setdefault(id(value), set()).update(self.stack)
            self._alive += operands

    def _touch(self, func: Func, args: Any, kwargs: Any, result: Any, joined: int) -> None:
        nodes = next(nodes for value in tensors((args, kwargs)) if (nodes := nodes_of(value)) is not None)
        written = func in known.SIZED or known.draws(func, args, kwargs) or self._meets_whole(func, args, kwargs)
        if nodes.numel() and any(True for _ in tensors(result)):
            touch = Touch(int(nodes.reshape(-1)[0]), tuple(self.stack), known.name_of(func), joined, written)
            self.record.touches.append(touch)

    def _meets_whole(self, func: Func, args: Any, kwargs: Any) -> bool:
        """Whole operands that may want gradients, or that are as large as the features."""
        found = False
        nodes = next(nodes for value in tensors((args, kwargs)) if (nodes := nodes_of(value)) is not None)
        for value in tensors((args, kwargs)) if func not in known.MOVES else ():
            if nodes_of(value) is not None:
                continue
            if isinstance(value, nn.Parameter):
                self.record.partial.append((id(value), int(nodes.reshape(-1)[0])))
            found |= (value.is_floating_point() and not isinstance(value, nn.Parameter)) or bool(_shared(value, nodes))
        return found

    def finish(self, outputs: list[Tensor]) -> None:
        """The model's outputs are wanted whole."""
        for value in outputs:
            if (nodes := nodes_of(value)) is not None:
                self.whole(nodes)
                self.record.touches.append(Touch(int(nodes.reshape(-1)[0]), (), "output", nodes.numel(), True))

    def whole(self, nodes: Tensor) -> None:
        """These features are wanted whole."""
        self.features.join(nodes, torch.zeros((), dtype=torch.long, device="cpu"))


def _shared(value: Tensor, nodes: Tensor) -> list[int]:
    """Dims of ``nodes`` along which both it and the aligned ``value`` vary."""
    shift = nodes.ndim - value.ndim
    dims = range(max(shift, 0), nodes.ndim)
    return [dim for dim in dims if value.shape[dim - shift] > 1 and varies(nodes, dim)]


def _shape(have: list[Tensor]) -> tuple[int, ...]:
    return np.broadcast_shapes(*(tuple(nodes.shape) for nodes in have))


def varies(nodes: Tensor, dim: int) -> bool:
    return nodes.shape[dim] > 1 and nodes.stride(dim) > 0 and bool((nodes != nodes.narrow(dim, 0, 1)).any())


def tensors(value: Any) -> Iterable[Tensor]:
    """In nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))


# Rules: each calls the function, joins what it mixes, and names its result


def opaque(trace: Trace, func: Func, args: Any, kwargs: Any) -> Any:
    """What is not known mixes everything; a shape or a dtype has nothing of the features."""
    result = func(*args, **kwargs)
    if func not in known.READS and not any(True for _ in tensors(result)):
        return result
    flat = [nodes.reshape(-1) for value in tensors((args, kwargs)) if (nodes := nodes_of(value)) is not None]
    everything = torch.cat(flat)
    if len(everything):
        trace.features.join(everything, everything[:1])
        for out in tensors(result):
            set_nodes(out, everything[0])
    return result


def elementwise(trace: Trace, func: Func, args: Any, kwargs: Any) -> Any:
    operands = list(tensors((args, kwargs)))
    have = [nodes for value in operands if (nodes := nodes_of(value)) is not None]
    if known.in_place(func) and nodes_of(args[0]) is None:
        return opaque(trace, func, args, kwargs)
    first = have[0].expand(_shape(have))
    for other in have[1:]:
        trace.features.join(first, other)
    result = func(*args, **kwargs)
    for out in tensors(result):
        set_nodes(out, first)
    return result


def move(trace: Trace, func: Func, args: Any, kwargs: Any) -> Any:
    """The names move as the elements do."""
    data, *rest = args if args else (kwargs.pop("tensors"),)
    if any(nodes_of(value) is not None for value in tensors((rest, kwargs)) if func not in known.LIKE):
        return opaque(trace, func, args, kwargs)
    result = func(data, *rest, **kwargs)
    rest, kwargs = _here(rest), {name: _here(value) for name, value in kwargs.items()}
    named = _COPYING.get(func, func)(_named(data), *rest, **kwargs)  # names have other strides
    for out, nodes in zip(tensors(result), tensors(named), strict=True):
        set_nodes(out, nodes)
    return result


_COPYING: dict[Func, Func] = {Tensor.view: Tensor.reshape, Tensor.view_as: Tensor.reshape_as}


def _here(value: Any) -> Any:
    """Indices on the names' device."""
    if isinstance(value, Tensor):
        return torch.zeros(value.shape, dtype=value.dtype, device="cpu") if value.is_meta else value.cpu()
    return type(value)(map(_here, value)) if type(value) in (list, tuple) else value


def _named(data: Any) -> Any:
    if isinstance(data, Tensor):
        nodes = nodes_of(data)
        empty = data.ndim == 1 and not data.numel()  # joins any tensor in `cat`
        return torch.zeros(data.shape, dtype=torch.long, device="cpu") if nodes is None or empty else nodes
    return [_named(value) for value in data]


def fresh(trace: Trace, func: Func, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def along(at: int, *names: str, default: Any = None) -> Func:
    """Mixes along its argument ``dim``, number ``at``."""

    def rule(trace: Trace, func: Func, args: Any, kwargs: Any) -> Any:
        nodes = nodes_of(args[0]) if args else None
        dims = next((kwargs[name] for name in names if name in kwargs), args[at] if len(args) > at else default)
        if isinstance(dims, Tensor):
            return elementwise(trace, func, args, kwargs)
        if nodes is None or dims is None or isinstance(dims, torch.dtype):
            return opaque(trace, func, args, kwargs)
        mixed = sorted({dim % nodes.ndim for dim in ([dims] if isinstance(dims, int) else dims)})
        trace.features.join_along(nodes, mixed)
        result = func(*args, **kwargs)
        for dim in reversed(mixed):
            nodes = nodes.narrow(dim, 0, 1)
        for out in tensors(result):
            left = nodes if out.ndim == nodes.ndim else nodes.squeeze(tuple(mixed))
            set_nodes(out, left)
        return result

    return rule


def glu(trace: Trace, func: Func, args: Any, kwargs: Any) -> Any:
    """The first half of a dim, gated by the second."""
    nodes, dim = nodes_of(args[0]), kwargs.get("dim", args[1] if len(args) > 1 else -1)
    if nodes is None:
        return opaque(trace, func, args, kwargs)
    first, second = nodes.chunk(2, dim)
    trace.features.join(first, second)
    result = func(*args, **kwargs)
    set_nodes(result, first)
    return result


def norm(trace: Trace, func: Func, args: Any, kwargs: Any) -> Any:
    nodes, shape = nodes_of(args[0]), kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
    if nodes is None:
        return opaque(trace, func, args, kwargs)
    trace.features.join_along(nodes, range(nodes.ndim - len(shape), nodes.ndim))
    result = func(*args, **kwargs)
    set_nodes(result, nodes)
    return result


def contract(trace: Trace, func: Func, args: Any, kwargs: Any) -> Any:
    """Matrix products: the rows of the first, the columns of the second, and what is added."""
    *added, left, right = tensors((args, kwargs))
    if min(left.ndim, right.ndim) < 2 or any(nodes_of(value) is not None for value in added):
        return opaque(trace, func, args, kwargs)
    result = func(*args, **kwargs)
    rows, columns = _summed(trace, left, right, -1), _summed(trace, right, left, -2)
    _combine(trace, [result], [nodes for nodes in (rows, columns) if nodes is not None])
    return result


def _summed(trace: Trace, value: Tensor, other: Tensor, dim: int) -> Tensor | None:
    """Names of an operand after the sum over ``dim``, which becomes 1."""
    nodes = nodes_of(value)
    if nodes is None:
        return None
    trace.features.join_along(nodes, [dim])
    if nodes_of(other) is None:  # a whole factor for each feature isn't narrowed
        trace.features.join_along(nodes, [at for at in _shared(other, nodes) if at < nodes.ndim - 2])
    return nodes.narrow(dim, 0, 1)


def _combine(trace: Trace, results: list[Tensor], have: list[Tensor]) -> None:
    for other in have[1:]:
        trace.features.join(have[0], other)
    for out in results:
        set_nodes(out, have[0].expand(_shape(have)))


def einsum(trace: Trace, func: Func, args: Any, kwargs: Any) -> Any:
    equation, operands = str(args[0]).replace(" ", ""), list(tensors(args[1:]))
    inputs, arrow, output = equation.partition("->")
    if "." in equation or not arrow or any(len(set(part)) < len(part) for part in inputs.split(",")):
        return opaque(trace, func, args, kwargs)
    have = []
    for letters, value in zip(inputs.split(","), operands, strict=True):
        if (nodes := nodes_of(value)) is not None:
            gone = [at for at, letter in enumerate(letters) if letter not in output]
            trace.features.join_along(nodes, gone)
            for at in reversed(gone):
                nodes = nodes.select(at, 0)
            kept = [letter for letter in letters if letter in output]
            nodes = nodes.permute([kept.index(letter) for letter in output if letter in kept])
            have.append(nodes[tuple(slice(None) if letter in kept else None for letter in output)])
    others = [value for value in operands if nodes_of(value) is None]
    result = func(*args, **kwargs)
    _combine(trace, [result], have)
    if others:
        # a whole factor that has the letter of the features would have to be cut
        shared = {
            letter
            for part, value in zip(inputs.split(","), operands, strict=True)
            if nodes_of(value) is None
            for letter in part
        }
        trace.features.join_along(
            have[0], [at for at, letter in enumerate(output) if letter in shared and have[0].shape[at] > 1]
        )
    return result


def attention(trace: Trace, func: Func, args: Any, kwargs: Any) -> Any:
    """Each head by itself."""
    given = dict(zip(("query", "key", "value"), args[:3], strict=False)) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    result = func(*args, **kwargs)
    have = []
    for each in (query, key, value):
        if (nodes := nodes_of(each)) is not None:
            trace.features.join_along(nodes, [-1, -2])
            heads = nodes[..., :1, :1]
            if each.ndim > 2 and each.shape[-3] not in (1, query.shape[-3]):
                heads = heads.repeat_interleave(query.shape[-3] // each.shape[-3], -3)
            have.append(heads)
    _combine(trace, [result], have)
    return result


_RULES: dict[Func, Func] = {
    **dict.fromkeys(known.ELEMENTWISE, elementwise),
    **dict.fromkeys(known.RANDOM, elementwise),
    **dict.fromkeys(known.MOVES, move),
    **dict.fromkeys(known.NEW, fresh),
    **{func: along(at, *names, default=default) for func, (at, names, default) in known.ALONG.items()},
    **dict.fromkeys(known.GLU, glu),
    **dict.fromkeys(known.NORMS, norm),
    **dict.fromkeys(known.MATMUL, contract),
    **dict.fromkeys(known.EINSUM, einsum),
    **dict.fromkeys(known.ATTENTION, attention),
}
