"""Where each element of a trainer's state lies on this rank, for every layout.

::

    whole tensor, by its canonical name
      tp       take_part: ranges along one dim (of a fused QKV weight: one of each segment)
      zero 2+  FSDP's shard: rows of that part
      zero 1   a flat range of that part, in the order of its memory (the optimizer's state; weights are whole)

Every one of them is a few boxes of the whole tensor. What lies on several ranks has the same boxes on each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer

from nbtrain.errors import OptimizerError
from nbtrain.parallel import shard
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.local import local
from nbtrain.parallel.tensor.cuts import Cut
from nbtrain.parallel.update import ShardedUpdate

_PLAIN = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True)
class Box:
    """A range along each dim of a whole tensor; () of a 0-d one."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True, eq=False)
class Piece:
    """What of a tensor lies in one place of this rank's memory.

    Attributes:
        box: Where it lies in the whole tensor.
        view: Of shape ``box.sizes``, detached: what is written to it is written to the model or the optimizer.
    """

    box: Box
    view: torch.Tensor


@dataclass(frozen=True, eq=False)
class Held:
    """What this rank has of one tensor.

    Attributes:
        name: Canonical: of the model before it was laid out.
        shape: Of the whole tensor.
        dtype: Of its elements.
        pieces: Without overlap; none where it lies on other ranks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class HeldGroup:
    """A parameter group: canonical names of those of its parameters that this rank knows, and its options."""

    names: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class HeldOptimizer:
    """An optimizer's state on this rank.

    Attributes:
        state: ``{parameter name: {key: Held | plain value}}``; a parameter without state is left out.
        groups: In the optimizer's order.
    """

    state: Mapping[str, Mapping[str, Any]]
    groups: tuple[HeldGroup, ...]


def canonical_names(model: nn.Module, layout: Layout) -> dict[str, str]:
    """The first name of each parameter and buffer, by each of its names.

    Parameters that are tied in the whole model have one name on every rank, also where they lie on different ones.
    """
    blueprint = layout.blueprint.module if layout.blueprint is not None else None
    whole = model if blueprint is None else blueprint
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(parameter), name)
        for name, parameter in whole.named_parameters(remove_duplicate=False)
    }
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names[name] = first.setdefault(id(buffer), name)
    return names


def aliases(model: nn.Module, layout: Layout) -> dict[str, str]:
    """``{other name: canonical name}`` of tied tensors."""
    return {name: first for name, first in canonical_names(model, layout).items() if name != first}


def held_parameters(model: nn.Module, layout: Layout) -> dict[str, Held]:
    """This rank's part of each parameter, and of each buffer that a state dict has, by canonical name.

    Moves nothing. With ``zero=1`` weights must not be owed (`Stepper.require_whole`).
    """
    if layout.shards:
        shard.reshard(model)
    names = canonical_names(model, layout)
    found: dict[str, Held] = {}
    for own, value in model.state_dict(keep_vars=True).items():
        name = names.get(own, own)
        if isinstance(value, torch.Tensor) and not is_extra(own) and name not in found:
            found[name] = _held(name, value, _Dense(layout, layout.cuts.get(own)))
    return found


def extra_states(model: nn.Module) -> dict[str, Any]:
    """What modules of the model keep beside tensors, by the name that a state dict gives it (``get_extra_state``)."""
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if is_extra(name)}


def is_extra(name: str) -> bool:
    """Whether a state dict's entry is what ``get_extra_state`` gave."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def held_optimizer(optimizer: Optimizer, model: nn.Module, layout: Layout) -> HeldOptimizer:
    """This rank's part of the optimizer's state, under the canonical names of the parameters. Moves nothing.

    Raises:
        OptimizerError: Some of the state is neither a tensor that lies as its parameter does or as a DTensor, nor a
            plain value, or belongs to no parameter; all of it is told.
    """
    names, canonical = optimizer_names(model, layout), canonical_names(model, layout)
    places = state_places(model, layout)
    state: dict[str, dict[str, Any]] = {}
    problems = _strangers(optimizer, names)
    for parameter, entries in optimizer.state.items():
        if (own := names.get(id(parameter))) is None or not entries:
            continue
        name = canonical.get(own, own)
        state[name] = {}
        for key, value in entries.items():
            try:
                state[name][key] = held_state(name, value, parameter, places[own])
            except OptimizerError as problem:
                problems.append(f"state '{key}' of '{name}' {problem}")
    if problems:
        kind = type(optimizer).__name__
        raise OptimizerError(f"the state of {kind} cannot be described by names: {'; '.join(problems)}")
    return HeldOptimizer(state, tuple(_groups(optimizer, names, canonical)))


def optimizer_names(model: nn.Module, layout: Layout) -> dict[int, str]:
    """The name of each tensor that a trainer's optimizer may hold, by id."""
    dealt = isinstance(layout.result, ShardedUpdate) and layout.result.shares
    return layout.names(model, dealt=dealt)


def held_state(name: str, value: Any, parameter: torch.Tensor, place: Place) -> Any:
    """What `held_optimizer` gives for one entry.

    Args:
        name: Canonical, of the parameter.
        value: Of the entry.
        parameter: As the optimizer has it.
        place: Of the parameter's state.

    Raises:
        OptimizerError: The end of a sentence about the entry.
    """
    if isinstance(value, _PLAIN):
        return value
    if not isinstance(value, torch.Tensor):
        raise OptimizerError(f"is a {type(value).__name__}, neither a tensor nor a number")
    if value.ndim == 0:
        return Held(name, (), value.dtype, (Piece(Box((), ()), local(value.detach())),))
    if not isinstance(place, _Dense):
        if value.shape != parameter.shape:
            raise OptimizerError(f"has the shape {tuple(value.shape)}, and its parameter is cut into flat pieces")
        return _held(name, value, place)
    if value.shape == parameter.shape and isinstance(value, DTensor) == isinstance(parameter, DTensor):
        return _held(name, value, place)
    if place.cut is not None:
        raise OptimizerError(f"is {tuple(value.shape)}, and its parameter is cut into {tuple(parameter.shape)}")
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
        raise OptimizerError(f"is a plain tensor of shape {tuple(value.shape)}, and its parameter is sharded")
    return _held(name, value, replace(place, cut=None))


@dataclass(frozen=True)
class _Dense:
    """A tensor that is whole on a rank, a DTensor, or tp's part of either."""

    layout: Layout
    cut: Cut | None

    def shape(self, value: torch.Tensor) -> tuple[int, ...]:
        """Of the whole."""
        return _whole_shape(tuple(value.shape), self.cut)

    def pieces(self, value: torch.Tensor) -> Iterator[Piece]:
        yield from _cut_again([_dense_piece(value)], self.cut, self.layout)


@dataclass(frozen=True)
class _Flat:
    """A flat range of a parameter's memory, as ``zero=1`` deals it out.

    Attributes:
        like: The parameter: its shape, and by its strides the order of its memory.
        start: In elements of it.
    """

    layout: Layout
    cut: Cut | None
    like: torch.Tensor
    start: int

    def shape(self, value: torch.Tensor) -> tuple[int, ...]:
        return _whole_shape(tuple(self.like.shape), self.cut)

    def pieces(self, value: torch.Tensor) -> Iterator[Piece]:
        yield from _cut_again(_flat_pieces(value.detach(), self.like, self.start), self.cut, self.layout)


@dataclass(frozen=True)
class _Elsewhere(_Flat):
    """A whole parameter that ``zero=1`` has dealt to another rank."""

    def pieces(self, value: torch.Tensor) -> Iterator[Piece]:
        yield from ()


Place = _Dense | _Flat
"""How a tensor that is like a parameter, as the optimizer has it, lies in the whole."""


def state_places(model: nn.Module, layout: Layout) -> dict[str, Place]:
    """For each parameter, by its name on this rank, how the optimizer's state of it lies."""
    update = layout.result if isinstance(layout.result, ShardedUpdate) and layout.result.shares else None
    if update is None:
        return {name: _Dense(layout, layout.cuts.get(name)) for name, _ in model.named_parameters()}
    places: dict[str, Place] = {
        name: _Dense(layout, layout.cuts.get(name)) for name, _ in update.module.named_parameters()
    }
    parameters = dict(update.module.named_parameters())
    update.adopt()
    for name, piece in update.named_pieces():
        parameter, cut = parameters[name], layout.cuts.get(name)
        if not update.whole:
            # both are views of one buffer
            start = int(piece.storage_offset()) - int(parameter.storage_offset())
            places[name] = _Flat(layout, cut, parameter, start)
        elif piece.shape != parameter.shape:
            places[name] = _Elsewhere(layout, cut, parameter, 0)
    return places


def _strangers(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    problems = []
    # a rank whose stages train nothing has an empty one, since optimizers refuse to have none
    if unknown := sum(id(parameter) not in names and parameter.numel() > 0 for parameter in held):
        problems.append(f"{unknown} of its tensors are no parameters of the model")
    ids = set(map(id, held))
    if any(id(key) not in ids for key in optimizer.state):
        problems.append("some belongs to no parameter")
    return problems


def _groups(optimizer: Optimizer, names: Mapping[int, str], canonical: Mapping[str, str]) -> Iterator[HeldGroup]:
    for group in optimizer.param_groups:
        own = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        options = {key: value for key, value in group.items() if key != "params"}
        yield HeldGroup(tuple(canonical.get(name, name) for name in own), options)


def _held(name: str, value: torch.Tensor, place: Place) -> Held:
    pieces = tuple(piece for piece in place.pieces(value) if piece.box.numel)
    return Held(name, place.shape(value), value.dtype, pieces)


def _whole_shape(part: tuple[int, ...], cut: Cut | None) -> tuple[int, ...]:
    if cut is None:
        return part
    return tuple(cut.size if dim == cut.dim else size for dim, size in enumerate(part))


def _dense_piece(value: torch.Tensor) -> Piece:
    if not isinstance(value, DTensor):
        return Piece(Box((0,) * value.ndim, tuple(value.shape)), value.detach())
    sizes, starts = list(value.shape), [0] * value.ndim
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank holds a part"
    for placement, rank, ranks in zip(value.placements, coordinate, value.device_mesh.shape, strict=True):
        if type(placement) is Shard:  # as torch.chunk does
            chunk = -(-sizes[placement.dim] // ranks)
            start = min(rank * chunk, sizes[placement.dim])
            starts[placement.dim] += start
            sizes[placement.dim] = min(chunk, sizes[placement.dim] - start)
        elif not isinstance(placement, Replicate):
            raise OptimizerError(f"is placed as {placement}, and pieces are cut by Shard and Replicate alone")
    return Piece(Box(tuple(starts), tuple(sizes)), local(value.detach()))


def _flat_pieces(flat: torch.Tensor, like: torch.Tensor, start: int) -> Iterator[Piece]:
    """``flat`` is the elements from ``start`` on of ``like``, in the order of its memory."""
    order = sorted(range(like.ndim), key=lambda dim: -int(like.stride()[dim]))
    back = [order.index(dim) for dim in range(like.ndim)]
    shape, first = [like.shape[dim] for dim in order], 0
    for box in flat_boxes(shape, start, start + flat.numel()):
        view = flat[first : first + box.numel].view(box.sizes).permute(back)
        first += box.numel
        yield Piece(Box(tuple(box.starts[dim] for dim in back), tuple(view.shape)), view)


def flat_boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The elements from ``start`` to ``end`` of a row-major tensor, in order: at most ``2 * ndim - 1`` boxes.

    ::

        . . . x x     a row's end
        x x x x x     whole rows
        x x x x x
        x x . . .     a row's beginning
    """
    if start >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, behind = -(-start // row), end // row
    if first > behind:  # within one row
        yield from _in_row(shape, behind, start, end)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < behind:
        inner = tuple(shape[1:])
        yield Box((first, *[0] * len(inner)), (behind - first, *inner))
    yield from _in_row(shape, behind, behind * row, end)


def _in_row(shape: Sequence[int], index: int, start: int, end: int) -> Iterator[Box]:
    row = math.prod(shape[1:])
    for box in flat_boxes(shape[1:], start - index * row, end - index * row):
        yield Box((index, *box.starts), (1, *box.sizes))


def _cut_again(pieces: Iterable[Piece], cut: Cut | None, layout: Layout) -> Iterator[Piece]:
    """Pieces of tp's part as pieces of the whole."""
    if cut is None:
        yield from pieces
        return
    for piece in pieces:
        yield from _in_segments(piece, cut, layout.part, layout.plan.tp)


def _in_segments(piece: Piece, cut: Cut, part: int, degree: int) -> Iterator[Piece]:
    starts, sizes, dim = piece.box.starts, piece.box.sizes, cut.dim
    begin = whole = 0  # of a segment, in the part and in the whole
    for segment in cut.segments:
        width = segment // degree
        low, high = max(starts[dim], begin), min(starts[dim] + sizes[dim], begin + width)
        if low < high:
            start = whole + part * width + low - begin
            box = Box(_with(starts, dim, start), _with(sizes, dim, high - low))
            yield Piece(box, piece.view.narrow(dim, low - starts[dim], high - low))
        begin, whole = begin + width, whole + segment


def _with(numbers: tuple[int, ...], dim: int, number: int) -> tuple[int, ...]:
    return (*numbers[:dim], number, *numbers[dim + 1 :])
