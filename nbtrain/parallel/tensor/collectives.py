"""What cut layers communicate, forward and backward.

::

    function           forward                 backward                 Megatron-LM
    enter              identity                all-reduce               f
    leave              all-reduce              identity                 g
    gather_last        all-gather, last dim    take the own part
    split_last         take the own part       all-gather, last dim
    gather_sequence    all-gather, dim 1       reduce-scatter, dim 1    g, with sequence parallelism
    scatter_sequence   reduce-scatter, dim 1   all-gather, dim 1        g-bar, with sequence parallelism
    cut_sequence       take the own part       all-gather, dim 1
    join_sequence      all-gather, dim 1       take the own part

Of arXiv 1909.08053 (section 3) and arXiv 2205.05198 (section 4.2.2). Tensors of any floating dtype and strides;
"whole" ones are equal on all peers, and so are their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from nbtrain.events import EventKind
from nbtrain.parallel.tensor.peers import Peers
from nbtrain.telemetry.timeline import recorder

# torch 2.13 renamed them
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_SEQUENCE = 1
_ENTERED = "_nbtrain_entered"


def enter(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """What column layers take: ``x``, whose gradient is the sum of all peers' gradients.

    Layers that take the same tensor share it (q, k and v, or gate and up), so that backward sums once for all.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _shared(x, peers, lambda: _applied(_Enter, x, peers))


def enter_sequence(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """`gather_sequence`, shared by the layers that take the same tensor."""
    return _shared(x, peers, lambda: gather_sequence(x, peers))


def _shared(x: torch.Tensor, peers: Peers, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What was made of this very tensor, while it is as it was; it lives as long as the tensor."""
    if not torch.is_grad_enabled() or not x.requires_grad or x.is_leaf:
        return make()  # a leaf is held by its graph: an attribute would close a cycle that nothing frees
    held: tuple[int, Peers, torch.Tensor] | None = vars(x).get(_ENTERED)
    if held is None or held[:2] != (x._version, peers):
        held = vars(x)[_ENTERED] = x._version, peers, make()
    return held[2]


def leave(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """The sum of all peers' ``x``; a new tensor, since selective recomputation keeps ``x`` to use it again."""
    return _applied(_Leave, x, peers)


def gather_last(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Parts (..., d/t) of all peers, in order: (..., d)."""
    return _applied(_Gather, x, peers, x.dim() - 1)


def split_last(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """This rank's part (..., d/t) of a whole (..., d)."""
    return _applied(_Split, x, peers, x.dim() - 1)


def gather_sequence(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Parts (B, T/t, ...) of all peers: (B, T, ...), for layers that each have a part of its gradient."""
    return _applied(_GatherSum, x, peers, _SEQUENCE)


def scatter_sequence(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """This rank's part (B, T/t, ...) of the sum of all peers' (B, T, ...)."""
    return _applied(_ScatterSum, x, peers, _SEQUENCE)


def cut_sequence(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """This rank's part (B, T/t, ...) of a whole (B, T, ...)."""
    return _applied(_Split, x, peers, _SEQUENCE)


def join_sequence(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Parts (B, T/t, ...) of all peers: a whole (B, T, ...), of which all peers compute the same."""
    return _applied(_Gather, x, peers, _SEQUENCE)


def all_reduced(x: torch.Tensor, peers: Peers, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """A new tensor; no gradient."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    with recorder().span(EventKind.COLLECTIVE, name="all-reduce"):
        dist.all_reduce(total, op, group=peers.group)
    return total


def all_gathered(x: torch.Tensor, peers: Peers, dim: int) -> torch.Tensor:
    """All peers' ``x`` one behind the other along ``dim``; no gradient."""
    parts = x.new_empty((peers.degree, *x.shape))
    with recorder().span(EventKind.COLLECTIVE, name="all-gather"):
        _all_gather(parts.view(-1), x.detach().contiguous().view(-1), group=peers.group)
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def reduce_scattered(x: torch.Tensor, peers: Peers, dim: int) -> torch.Tensor:
    """This rank's part along ``dim`` of the sum of all peers' ``x``; no gradient."""
    parts = torch.stack(x.detach().chunk(peers.degree, dim))
    own = x.new_empty(parts.shape[1:])
    with recorder().span(EventKind.COLLECTIVE, name="reduce-scatter"):
        _reduce_scatter(own.view(-1), parts.view(-1), group=peers.group)
    return own


def own_part(x: torch.Tensor, peers: Peers, dim: int) -> torch.Tensor:
    """This rank's part along ``dim``: a copy, so that the whole can be freed."""
    size = x.shape[dim] // peers.degree
    return x.narrow(dim, peers.rank * size, size).clone(memory_format=torch.contiguous_format)


def _applied(function: Any, *args: Any) -> torch.Tensor:
    output: torch.Tensor = function.apply(*args)
    return output


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, peers: Peers) -> torch.Tensor:
        ctx.peers = peers
        # not a view, which would hold the tensor that holds it
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduced(gradient, ctx.peers), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, peers: Peers) -> torch.Tensor:
        return all_reduced(x, peers)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Along(torch.autograd.Function):
    """Forward and backward are collectives along a dim: ``(x, peers, dim)``."""

    there: Any
    back: Any

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, peers: Peers, dim: int) -> torch.Tensor:
        ctx.peers, ctx.dim = peers, dim
        return cls.there(x, peers, dim)  # type: ignore[no-any-return]

    @classmethod
    @once_differentiable
    def backward(cls, ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return cls.back(gradient, ctx.peers, ctx.dim), None, None


class _Gather(_Along):
    there, back = staticmethod(all_gathered), staticmethod(own_part)


class _Split(_Along):
    there, back = staticmethod(own_part), staticmethod(all_gathered)


class _GatherSum(_Along):
    there, back = staticmethod(all_gathered), staticmethod(reduce_scattered)


class _ScatterSum(_Along):
    there, back = staticmethod(reduce_scattered), staticmethod(all_gathered)
