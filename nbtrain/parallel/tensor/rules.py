"""How each torch function passes a mark on, and how the sizes that it is given are read.

A rule is called as ``rule(marks, func, args, kwargs)`` and returns what ``func`` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from nbtrain.errors import ModelError
from nbtrain.parallel.tensor import operations as known
from nbtrain.parallel.tensor.marks import Mark, Marks, mark, mark_of
from nbtrain.parallel.tensor.sizes import reshape, span

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[Marks, Func, Args, Kwargs], Any]


def rule_of(func: Func) -> Rule:
    return _RULES.get(func, unknown)


def unknown(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Right only for what gives no tensor: a shape, a dtype."""
    result = func(*args, **kwargs)
    if any(True for _ in _tensors(result)):
        raise marks.lost(func)
    return result


# What treats each element by itself


def elementwise(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Inputs align from the right, as broadcasting does."""
    found = {value.ndim - have.dim: have for value in _tensors((args, kwargs)) if (have := mark_of(value))}
    if len(found) > 1:
        raise marks.lost(func, "meets")
    ((back, have),) = found.items()
    args, kwargs = _narrowed(marks, back, have, args, kwargs)
    return _marked(marks, func, func(*args, **kwargs), lambda out: (out.ndim - back, have.segments))


def _narrowed(marks: Marks, back: int, have: Mark, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Whole tensors among the operands are entered; those as large as the whole become this rank's part."""

    def narrow(value: Any) -> Any:
        if isinstance(value, Tensor) and mark_of(value) is None and _meets(value, back, have):
            return take(marks, value, value.ndim - back, have)
        return _entered(marks, value)

    return tuple(map(narrow, args)), {name: narrow(value) for name, value in kwargs.items()}


def _entered(marks: Marks, value: Any) -> Any:
    """A whole tensor of which each rank will have a part of the gradient. Leaves are in `TensorPlan.partial`."""
    if (
        not isinstance(value, Tensor)
        or mark_of(value)
        or not value.requires_grad
        or value.is_leaf
        or not torch.is_grad_enabled()
    ):
        return value
    if marks.enter is None:
        raise ModelError("a whole tensor meets cut features; its gradient would be a rank's part: Marks needs `enter`")
    return marks.enter(value)


def _meets(value: Tensor, back: int, have: Mark) -> bool:
    return value.ndim >= back and value.shape[value.ndim - back] == have.size


def take(marks: Marks, value: Tensor, dim: int, have: Mark) -> Tensor:
    """This rank's part of a whole tensor."""
    if marks.part is None:
        raise ModelError("a whole tensor meets cut features: Marks needs `part`")
    value = _entered(marks, value)
    pieces = [segment.chunk(marks.degree, dim)[marks.part] for segment in torch.split(value, list(have.segments), dim)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _marked(marks: Marks, func: Func, result: Any, place: Callable[[Tensor], tuple[int, tuple[int, ...]]]) -> Any:
    """Marks the tensors of a result; one that does not have the cut dim any more is an error."""
    for out in _tensors(result):
        dim, segments = place(out)
        if dim < 0 or out.shape[dim] * marks.degree != sum(segments):
            if out.dtype is torch.bool and out.ndim == 0:
                continue  # isinf(x).any(): a look at the numbers, not a value
            raise marks.lost(func)
        mark(out, Mark(dim, segments))
    return result


def random(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    with marks.random() if marks.random else nullcontext():
        return elementwise(marks, func, args, kwargs)


def unmarked(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Its result has nothing of its input's features."""
    return func(*args, **kwargs)


# What moves elements


def move(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Views whose arguments hold no size of the cut dim: a stand-in that has a stride in that dim only shows where it
    goes."""
    tensor, have = args[0], cast(Mark, mark_of(args[0]))
    stand_in = _stand_in(tensor, have)
    result = func(*args, **kwargs)
    for out, shown in zip(_tensors(result), _tensors(func(stand_in, *args[1:], **kwargs)), strict=True):
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
        return elementwise(marks, func, args, kwargs)
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
    start, stop = (_argument(args, kwargs, at, name, default) for at, name, default in _FLATTEN)
    sizes = tuple(tensor.flatten(start, stop).shape)  # the part's own
    return _reshaped(marks, func, tensor, have, sizes)


_FLATTEN = ((1, "start_dim", 0), (2, "end_dim", -1))


def unflatten(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tensor, have = args[0], cast(Mark, mark_of(args[0]))
    dim = _argument(args, kwargs, 1, "dim", 0) % tensor.ndim
    sizes = _argument(args, kwargs, 2, "sizes", ())
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
    repeats, dim = _argument(args, kwargs, 1, "repeats", None), _argument(args, kwargs, 2, "dim", None)
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
    dim = _argument(args, kwargs, 2, "dim", 0) % tensor.ndim
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
    dim = _argument(args, kwargs, 2, "dim", 0) % tensor.ndim
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
    dim, start, length = (_argument(args, kwargs, at, name, 0) for at, name in enumerate(("dim", "start", "length"), 1))
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
    dim = _argument(args, kwargs, 1, "dim", 0) % parts[0].ndim
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
    dim = _argument(args, kwargs, 1, "dim", 0) % (parts[0].ndim + 1)
    found = cast(Mark, first)
    return mark(func(*args, **kwargs), Mark(found.dim + (dim <= found.dim), found.segments))


# What mixes along one dim


def along(at: int, *names: str, default: Any = None) -> Rule:
    """A function whose ``dim`` is its argument number ``at``: fine for every other dim than the cut one."""

    def rule(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
        tensor, have = args[0], mark_of(args[0])
        dims = next((kwargs[name] for name in names if name in kwargs), args[at] if len(args) > at else default)
        if have is None or dims is None or isinstance(dims, torch.dtype):
            return elementwise(marks, func, args, kwargs)
        mixed = {dim % tensor.ndim for dim in ([dims] if isinstance(dims, int) else dims)}
        if have.dim in mixed:
            raise marks.lost(func)
        result = func(*args, **kwargs)
        first = next(iter(_tensors(result)))
        gone = sum(dim < have.dim for dim in mixed) if first.ndim < tensor.ndim else 0
        return _marked(marks, func, result, lambda out: (have.dim - gone, have.segments))

    return rule


def glu(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    tensor, have = args[0], cast(Mark, mark_of(args[0]))
    dim = _argument(args, kwargs, 1, "dim", -1) % tensor.ndim
    half = len(have.segments) // 2
    if dim == have.dim and have.segments[:half] != have.segments[half:]:
        raise marks.lost(func)
    segments = have.segments[:half] if dim == have.dim else have.segments
    return mark(func(*args, **kwargs), Mark(have.dim, segments))


def norm(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Over the last dims."""
    tensor, have = args[0], mark_of(args[0])
    shape = _argument(args, kwargs, 1, "normalized_shape", ())
    if have is None or have.dim >= tensor.ndim - len(shape):
        raise marks.lost(func, "normalises over")
    args = (args[0], *(_entered(marks, each) for each in args[1:]))
    return mark(func(*args, **kwargs), have)


# What contracts


def linear(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Over cut features it gives a partial sum, which a row layer adds up: only a cut weight fits them."""
    tensor, have = args[0], mark_of(args[0])
    out = func(*args, **kwargs)
    if have is None:
        raise marks.lost(func, "has a weight made of")
    return out if have.dim == tensor.ndim - 1 else mark(out, have)


def matmul(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Cut in a batch dim, in rows of the first or in columns of the second; never in what is summed."""
    operands = list(_tensors((args, kwargs)))[-2:]
    backs = {back for value, own in zip(operands, (1, 2), strict=True) if (back := _back(marks, func, value, own))}
    if len(backs) != 1:
        raise marks.lost(func)
    (back,) = backs
    have = next(found for value in operands if (found := mark_of(value)))
    if func in known.ADDED:
        args = (*_narrowed(marks, back, have, args[:1], {})[0], *args[1:])
    args, kwargs = tuple(_entered(marks, each) for each in args), {key: _entered(marks, kwargs[key]) for key in kwargs}
    return _marked(marks, func, func(*args, **kwargs), lambda out: (out.ndim - back, have.segments))


def _back(marks: Marks, func: Func, value: Tensor, summed: int) -> int | None:
    """The cut dim counted from the back."""
    have = mark_of(value)
    if have is None:
        return None
    if value.ndim - have.dim == summed or value.ndim < 2:
        raise marks.lost(func, "sums over")
    return value.ndim - have.dim


def einsum(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    equation, operands = args[0].replace(" ", ""), list(_tensors(args[1:]))
    inputs, _, output = equation.partition("->")
    cut = {
        (letters[have.dim], have)
        for letters, value in zip(inputs.split(","), operands, strict=True)
        if (have := mark_of(value)) and "." not in letters
    }
    letters = {letter for letter, _ in cut}
    if "." in equation or len(letters) != 1 or not (letters & set(output)):
        raise marks.lost(func)
    ((letter, have), *_) = sorted(cut, key=lambda pair: pair[1].segments)
    args = (args[0], *(_entered(marks, value) for value in operands))
    return mark(func(*args, **kwargs), Mark(output.index(letter), have.segments))


def attention(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`F.scaled_dot_product_attention`, cut by heads."""
    query = args[0] if args else kwargs["query"]
    have = mark_of(query)
    if have is None or have.dim >= query.ndim - 2:
        raise marks.lost(func)
    args, kwargs = _narrowed(marks, query.ndim - have.dim, have, args, kwargs)
    draws = _argument(args, kwargs, 4, "dropout_p", 0.0) > 0
    with marks.random() if marks.random and draws else nullcontext():
        return mark(func(*args, **kwargs), have)


def _argument(args: Args, kwargs: Kwargs, at: int, name: str, default: Any) -> Any:
    return kwargs[name] if name in kwargs else args[at] if len(args) > at else default


def _tensors(value: Any) -> Iterable[Tensor]:
    """Tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


_RULES: dict[Func, Rule] = {
    **dict.fromkeys(known.ELEMENTWISE, elementwise),
    **dict.fromkeys(known.RANDOM, random),
    **dict.fromkeys(known.NEW, unmarked),
    **dict.fromkeys(known.PERMUTE, move),
    **dict.fromkeys(known.GATHER, gather),
    **dict.fromkeys(known.VIEW, view),
    **dict.fromkeys(known.LIKE, view_as),
    **dict.fromkeys(known.FLATTEN, flatten),
    **dict.fromkeys(known.UNFLATTEN, unflatten),
    **dict.fromkeys(known.EXPAND, expand),
    **dict.fromkeys(known.EXPAND_AS, expand_as),
    **dict.fromkeys(known.REPEAT_INTERLEAVE, repeat_interleave),
    **dict.fromkeys(known.REPEAT, repeat),
    **dict.fromkeys(known.SPLIT, split),
    **dict.fromkeys(known.CHUNK, chunk),
    **dict.fromkeys(known.NARROW, narrow),
    **dict.fromkeys(known.INDEX, index),
    **dict.fromkeys(known.CAT, cat),
    **dict.fromkeys(known.STACK, stack),
    **{func: along(at, *names, default=default) for func, (at, names, default) in known.ALONG.items()},
    **dict.fromkeys(known.GLU, glu),
    **dict.fromkeys(known.NORMS, norm),
    **dict.fromkeys([F.linear], linear),
    **dict.fromkeys(known.MATMUL, matmul),
    **dict.fromkeys(known.EINSUM, einsum),
    **dict.fromkeys(known.ATTENTION, attention),
}
