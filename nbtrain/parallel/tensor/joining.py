"""What each torch function does to the names of features: it moves them, and joins those that it mixes.

A rule is called as ``rule(features, func, args, kwargs)`` and returns what ``func`` returns, with names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nbtrain.parallel.tensor import operations as known
from nbtrain.parallel.tensor.features import Features
from nbtrain.parallel.tensor.names import nodes_of, set_nodes, shape_of, shared, tensors

Func = Callable[..., Any]
Rule = Callable[[Features, Func, Any, Any], Any]


def opaque(features: Features, func: Func, args: Any, kwargs: Any) -> Any:
    """What is not known mixes everything; a shape or a dtype has nothing of the features."""
    result = func(*args, **kwargs)
    if func not in known.READS and not any(True for _ in tensors(result)):
        return result
    flat = [nodes.reshape(-1) for value in tensors((args, kwargs)) if (nodes := nodes_of(value)) is not None]
    everything = torch.cat(flat)
    if len(everything):
        features.join(everything, everything[:1])
        for out in tensors(result):
            set_nodes(out, everything[0])
    return result


def elementwise(features: Features, func: Func, args: Any, kwargs: Any) -> Any:
    operands = list(tensors((args, kwargs)))
    have = [nodes for value in operands if (nodes := nodes_of(value)) is not None]
    if known.in_place(func) and nodes_of(args[0]) is None:
        return opaque(features, func, args, kwargs)
    first = have[0].expand(shape_of(have))
    for other in have[1:]:
        features.join(first, other)
    result = func(*args, **kwargs)
    for out in tensors(result):
        set_nodes(out, first)
    return result


def move(features: Features, func: Func, args: Any, kwargs: Any) -> Any:
    """The names move as the elements do."""
    data, *rest = args if args else (kwargs.pop("tensors"),)
    if any(nodes_of(value) is not None for value in tensors((rest, kwargs)) if func not in known.LIKE):
        return opaque(features, func, args, kwargs)
    result = func(data, *rest, **kwargs)
    here = {name: _here(value) for name, value in kwargs.items()}
    try:
        named = _COPYING.get(func, func)(_named(data), *_here(rest), **here)  # names have other strides
    except (RuntimeError, IndexError, TypeError):
        return opaque(features, func, args, kwargs)
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


def fresh(features: Features, func: Func, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def along(at: int, *names: str, default: Any = None) -> Func:
    """Mixes along its argument ``dim``, number ``at``."""

    def rule(features: Features, func: Func, args: Any, kwargs: Any) -> Any:
        nodes = nodes_of(args[0]) if args else None
        dims = next((kwargs[name] for name in names if name in kwargs), args[at] if len(args) > at else default)
        if isinstance(dims, Tensor):
            return elementwise(features, func, args, kwargs)
        if nodes is None or dims is None or isinstance(dims, torch.dtype):
            return opaque(features, func, args, kwargs)
        mixed = sorted({dim % nodes.ndim for dim in ([dims] if isinstance(dims, int) else dims)})
        features.join_along(nodes, mixed)
        result = func(*args, **kwargs)
        for dim in reversed(mixed):
            nodes = nodes.narrow(dim, 0, 1)
        for out in tensors(result):
            left = nodes if out.ndim == nodes.ndim else nodes.squeeze(tuple(mixed))
            set_nodes(out, left)
        return result

    return rule


def glu(features: Features, func: Func, args: Any, kwargs: Any) -> Any:
    """The first half of a dim, gated by the second."""
    nodes, dim = nodes_of(args[0]), kwargs.get("dim", args[1] if len(args) > 1 else -1)
    if nodes is None:
        return opaque(features, func, args, kwargs)
    first, second = nodes.chunk(2, dim)
    features.join(first, second)
    result = func(*args, **kwargs)
    set_nodes(result, first)
    return result


def norm(features: Features, func: Func, args: Any, kwargs: Any) -> Any:
    nodes, shape = nodes_of(args[0]), kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
    if nodes is None:
        return opaque(features, func, args, kwargs)
    features.join_along(nodes, range(nodes.ndim - len(shape), nodes.ndim))
    result = func(*args, **kwargs)
    set_nodes(result, nodes)
    return result


def contract(features: Features, func: Func, args: Any, kwargs: Any) -> Any:
    """Matrix products: the rows of the first, the columns of the second, and what is added."""
    *added, left, right = tensors((args, kwargs))
    if min(left.ndim, right.ndim) < 2 or any(nodes_of(value) is not None for value in added):
        return opaque(features, func, args, kwargs)
    result = func(*args, **kwargs)
    rows, columns = _summed(features, left, right, -1), _summed(features, right, left, -2)
    _combine(features, [result], [nodes for nodes in (rows, columns) if nodes is not None])
    return result


def _summed(features: Features, value: Tensor, other: Tensor, dim: int) -> Tensor | None:
    """Names of an operand after the sum over ``dim``, which becomes 1."""
    nodes = nodes_of(value)
    if nodes is None:
        return None
    features.join_along(nodes, [dim])
    if nodes_of(other) is None:  # a whole factor for each feature isn't narrowed
        features.join_along(nodes, [at for at in shared(other, nodes) if at < nodes.ndim - 2])
    return nodes.narrow(dim, 0, 1)


def _combine(features: Features, results: list[Tensor], have: list[Tensor]) -> None:
    for other in have[1:]:
        features.join(have[0], other)
    for out in results:
        set_nodes(out, have[0].expand(shape_of(have)))


def einsum(features: Features, func: Func, args: Any, kwargs: Any) -> Any:
    equation, operands = str(args[0]).replace(" ", ""), list(tensors(args[1:]))
    inputs, arrow, output = equation.partition("->")
    if "." in equation or not arrow or any(len(set(part)) < len(part) for part in inputs.split(",")):
        return opaque(features, func, args, kwargs)
    have = []
    for letters, value in zip(inputs.split(","), operands, strict=True):
        if (nodes := nodes_of(value)) is not None:
            gone = [at for at, letter in enumerate(letters) if letter not in output]
            features.join_along(nodes, gone)
            for at in reversed(gone):
                nodes = nodes.select(at, 0)
            kept = [letter for letter in letters if letter in output]
            nodes = nodes.permute([kept.index(letter) for letter in output if letter in kept])
            have.append(nodes[tuple(slice(None) if letter in kept else None for letter in output)])
    others = [value for value in operands if nodes_of(value) is None]
    result = func(*args, **kwargs)
    _combine(features, [result], have)
    if others:
        # a whole factor that has the letter of the features would have to be cut
        shared = {
            letter
            for part, value in zip(inputs.split(","), operands, strict=True)
            if nodes_of(value) is None
            for letter in part
        }
        features.join_along(
            have[0], [at for at, letter in enumerate(output) if letter in shared and have[0].shape[at] > 1]
        )
    return result


def attention(features: Features, func: Func, args: Any, kwargs: Any) -> Any:
    """Each head by itself."""
    given = dict(zip(("query", "key", "value"), args[:3], strict=False)) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    result = func(*args, **kwargs)
    have = []
    for each in (query, key, value):
        if (nodes := nodes_of(each)) is not None:
            features.join_along(nodes, [-1, -2])
            heads = nodes[..., :1, :1]
            if each.ndim > 2 and each.shape[-3] not in (1, query.shape[-3]):
                heads = heads.repeat_interleave(query.shape[-3] // each.shape[-3], -3)
            have.append(heads)
    _combine(features, [result], have)
    return result


def rule_of(func: Func) -> Rule:
    return _RULES.get(func, opaque)


_RULES: dict[Func, Rule] = {
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
