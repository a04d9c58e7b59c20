"""Marks of what only moves elements, and the sizes that such functions are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from nbtrain.parallel.tensor import operations as known
from nbtrain.parallel.tensor.marks import Mark, Marks, mark, mark_of
from nbtrain.parallel.tensor.names import tensors
from nbtrain.parallel.tensor.operands import Args, Func, Kwargs, argument
from nbtrain.parallel.tensor.sizes import reshape, span


def move(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Views whose arguments hold no size of the cut dim: a stand-in that has a stride in that dim only shows where it
    goes."""
    tensor, have = args[0], cast(Mark, mark_of(args[0]))
    stand_in = _stand_in(tensor, have)
    result = func(*args, **kwargs)
    for out, shown in zip(tensors(result), tensors(func(stand_in, *args[1:], **kwargs)), strict=True):
        dims = [dim for dim, stride in enumerate(shown.stride()) if stride]
        if len(dims) != 1 or shown.shape[dims[0]] != tensor.shape[have.dim]:
            raise marks.lost(func, "takes some of the")
        mark(out, Mark(dims[0], have.segments))
    return result


def _stand_in(tensor: Tensor, have: Mark) -> Tensor:
    size = tensor.shape[have.dim]
    strides = [int(dim == have.dim) for dim in range(tensor.ndim)]
    return torch.empty(size, dtype=torch.bool).as_strided(tensor.shape, strides)


def view(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tensor, have = args[0], cast(Mark, mark_of(args[0]))
    sizes = kwargs.pop("size", None) or kwargs.pop("shape", None) or args[1:]
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        sizes = sizes[0]
    if isinstance(sizes, torch.dtype):
        return mark(func(*args, **kwargs), have)
    return _reshaped(marks, func, tensor, have, tuple(sizes))


def _reshaped(marks: Marks, func: Func, tensor: Tensor, have: Mark, sizes: tuple[int, ...]) -> Tensor:
    found = reshape(tuple(tensor.shape), have.place, sizes, marks.degree)
    if found is None:
        raise marks.lost(func, f"to {list(sizes)} mixes")
    own, place = found
    out = tensor.view(own) if func is Tensor.view else tensor.reshape(own)
    return mark(out, Mark(*place))


def view_as(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tensor, have = args[0], mark_of(args[0])
    if have is None:
        raise marks.lost(func, "meets")
    return _reshaped(marks, Tensor.reshape, tensor, have, tuple(args[1].shape))


def flatten(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tensor, have = args[0], cast(Mark, mark_of(args[0]))
    start, stop = (argument(args, kwargs, at, name, default) for at, name, default in _FLATTEN)
    sizes = tuple(tensor.flatten(start, stop).shape)  # the part's own
    return _reshaped(marks, func, tensor, have, sizes)


_FLATTEN = ((1, "start_dim", 0), (2, "end_dim", -1))


def unflatten(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tensor, have = args[0], cast(Mark, mark_of(args[0]))
    dim = argument(args, kwargs, 1, "dim", 0) % tensor.ndim
    sizes = argument(args, kwargs, 2, "sizes", ())
    return _reshaped(marks, func, tensor, have, (*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :]))


def expand(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tensor, have = args[0], cast(Mark, mark_of(args[0]))
    sizes = kwargs["size"] if "size" in kwargs else args[1:]
    sizes = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    at = have.dim + len(sizes) - tensor.ndim
    if sizes[at] == have.size:
        sizes[at] = tensor.shape[have.dim]
    return mark(tensor.expand(sizes), Mark(at, have.segments))


def expand_as(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tensor, other = args[0], args[1]
    found = [(have.dim - value.ndim, have.segments) for value in (tensor, other) if (have := mark_of(value))]
    dim, segments = found[0]
    if mark_of(tensor) is None and tensor.ndim >= -dim and tensor.shape[dim] != 1:
        raise marks.lost(func, "meets")
    return mark(tensor.expand_as(other), Mark(other.ndim + dim, segments))


def gather(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Other dims than the cut one, or that in the same order."""
    tensor, have = args[0], mark_of(args[0])
    dims = kwargs.get("dim", kwargs.get("dims", args[-1] if func in _LAST else args[1] if len(args) > 1 else None))
    dims = [dims] if isinstance(dims, int) else dims
    if have is None or not dims or have.dim in [dim % tensor.ndim for dim in dims]:
        raise marks.lost(func, "takes some of the")
    return mark(func(*args, **kwargs), have)


_LAST = set(known.functions("roll"))


def repeat_interleave(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tensor, have = args[0], mark_of(args[0])
    repeats, dim = argument(args, kwargs, 1, "repeats", None), argument(args, kwargs, 2, "dim", None)
    if have is None or dim is None or (dim % tensor.ndim == have.dim and not isinstance(repeats, int)):
        raise marks.lost(func)
    times = repeats if dim % tensor.ndim == have.dim else 1
    return mark(func(*args, **kwargs), Mark(have.dim, tuple(segment * times for segment in have.segments)))


def repeat(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tensor, have = args[0], cast(Mark, mark_of(args[0]))
    times = args[1:] if len(args) > 2 or isinstance(args[1], int) else args[1]
    at = have.dim + len(times) - tensor.ndim
    return mark(func(*args, **kwargs), Mark(at, have.segments * times[at]))


# What takes a part of a dim


def split(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tensor, have = args[0], cast(Mark, mark_of(args[0]))
    given = args[1] if len(args) > 1 else next(iter(kwargs.values()))
    dim = argument(args, kwargs, 2, "dim", 0) % tensor.ndim
    if dim != have.dim:
        return move(marks, func, args, kwargs)
    sizes = list(given) if not isinstance(given, int) else _pieces(marks, have, given)
    ends = [sum(sizes[: count + 1]) for count in range(len(sizes))]
    return tuple(
        _slice(marks, func, tensor, have, (start, stop)) for start, stop in zip((0, *ends), ends, strict=False)
    )


def _pieces(marks: Marks, have: Mark, size: int) -> list[int]:
    """Of ``split(size)``, which was written for the whole or for a part of it."""
    whole = have.size if size in have.segments else have.size // marks.degree
    return [min(size, whole - start) for start in range(0, whole, size)]


def chunk(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Into so many pieces, or at these indices."""
    tensor, have = args[0], cast(Mark, mark_of(args[0]))
    given = args[1] if len(args) > 1 else next(kwargs[name] for name in _COUNTS if name in kwargs)
    dim = argument(args, kwargs, 2, "dim", 0) % tensor.ndim
    if dim != have.dim:
        return move(marks, func, args, kwargs)
    if isinstance(given, int):
        whole = torch.empty(have.size, dtype=torch.bool)
        ends = torch.tensor([len(piece) for piece in getattr(whole, func.__name__)(given)]).cumsum(0).tolist()
    else:
        ends = [*given, have.size if any(edge in _edges(have) for edge in given) else have.size // marks.degree]
    return tuple(_slice(marks, func, tensor, have, at) for at in zip((0, *ends), ends, strict=False))


_COUNTS = ("chunks", "indices_or_sections", "sections", "indices", "tensor_indices_or_sections")


def _edges(have: Mark) -> list[int]:
    return [sum(have.segments[:count]) for count in range(len(have.segments) + 1)]


def _slice(marks: Marks, func: Func, tensor: Tensor, have: Mark, at: tuple[int, int]) -> Tensor:
    found = span(have.segments, *at, marks.degree)
    if found is None:
        raise marks.lost(func, "splits")
    start, stop, segments = found
    return mark(tensor.narrow(have.dim, start, stop - start), Mark(have.dim, segments))


def narrow(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tensor, have = args[0], cast(Mark, mark_of(args[0]))
    dim, start, length = (argument(args, kwargs, at, name, 0) for at, name in enumerate(("dim", "start", "length"), 1))
    if dim % tensor.ndim != have.dim:
        return move(marks, func, args, kwargs)
    return _slice(marks, func, tensor, have, (int(start), int(start + length)))


def index(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tensor, have = args[0], mark_of(args[0])
    keys = args[1] if isinstance(args[1], tuple) else (args[1],)
    if have is None:
        raise marks.lost(func, "is indexed by")
    if any(isinstance(key, Tensor | list) for key in keys):
        return _gathered(marks, func, tensor, have, keys)
    at = _key_of(tensor, have.dim, keys)
    key = keys[at] if at is not None else slice(None)
    if not isinstance(key, slice) or key == slice(None):
        return move(marks, func, args, kwargs)
    tensor = _slice(marks, func, tensor, have, _bounds(marks, have, key))
    return move(marks, func, (tensor, (*keys[:at], slice(None), *keys[cast(int, at) + 1 :])), {})


def _key_of(tensor: Tensor, dim: int, keys: Sequence[Any]) -> int | None:
    """Position of the key that indexes ``dim``."""
    taken = [key is not None and key is not Ellipsis for key in keys]
    before = 0
    for at, key in enumerate(keys):
        if key is Ellipsis:
            before = tensor.ndim - sum(taken[at:])
            if dim < before:
                return None
        elif taken[at]:
            if before == dim:
                return at
            before += 1
    return None


def _bounds(marks: Marks, have: Mark, key: slice) -> tuple[int, int]:
    """``start`` and ``stop`` of a slice, which are written for the whole dim if its segments begin or end there."""
    if key.step not in (None, 1):
        raise marks.lost(Tensor.__getitem__, "takes some of the")
    whole = slice(key.start, key.stop).indices(have.size)[:2]
    part = slice(key.start, key.stop).indices(have.size // marks.degree)[:2]
    return whole if span(have.segments, *whole, 1) else part


def _gathered(marks: Marks, func: Func, tensor: Tensor, have: Mark, keys: Sequence[Any]) -> Any:
    """An index by tensors: numbers of the cut dim show where they go."""
    numbers = torch.arange(tensor.shape[have.dim], device=tensor.device)
    shape = [-1 if dim == have.dim else 1 for dim in range(tensor.ndim)]
    shown = numbers.view(shape).expand(tensor.shape)[tuple(keys)]
    size = len(numbers)
    for dim in range(shown.ndim):
        row = [-1 if at == dim else 1 for at in range(shown.ndim)]
        if shown.shape[dim] == size and bool((shown == numbers.view(row)).all()):
            return mark(tensor[tuple(keys)], Mark(dim, have.segments))
    raise marks.lost(func, "takes some of the")


# What joins


def cat(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    parts = [part for part in (args[0] if args else kwargs["tensors"]) if part.numel()]  # a cache that is empty yet
    have = [mark_of(part) for part in parts]
    dims = {found.dim if found else None for found in have}
    if len(dims) > 1 or None in dims:
        raise marks.lost(func, "meets")
    first = cast(Mark, have[0])
    dim = argument(args, kwargs, 1, "dim", 0) % parts[0].ndim
    segments = first.segments
    if dim == first.dim:
        segments = tuple(size for found in have if found for size in found.segments)
    return mark(func(*args, **kwargs), Mark(first.dim, segments))


def stack(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    parts = list(args[0] if args else kwargs["tensors"])
    have = {mark_of(part) for part in parts}
    if len(have) > 1 or None in have:
        raise marks.lost(func, "meets")
    (first,) = have
    dim = argument(args, kwargs, 1, "dim", 0) % (parts[0].ndim + 1)
    found = cast(Mark, first)
    return mark(func(*args, **kwargs), Mark(found.dim + (dim <= found.dim), found.segments))
