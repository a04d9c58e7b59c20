"""Regions: forwards that enclose cut layers, and whose code may write sizes of whole tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from nbtrain.errors import ModelError
from nbtrain.parallel.tensor.collectives import enter, gather_sequence
from nbtrain.parallel.tensor.marks import Marks
from nbtrain.parallel.tensor.peers import Peers
from nbtrain.parallel.tensor.random import sharded
from nbtrain.parallel.tensor.swap import swap_class


class _Depth(threading.local):
    marks = 0


_depth = _Depth()


def marking() -> bool:
    """Whether a region runs that reads sizes: column layers then mark their outputs."""
    return _depth.marks > 0


@contextmanager
def whole_sizes(peers: Peers, sums: bool = True) -> Iterator[None]:
    """Sizes inside are written for whole tensors. One region in another changes nothing.

    Args:
        peers: Who has the other parts.
        sums: Whether the gradient of a whole tensor, of which a rank takes its part inside, is summed over tp. Where it
            is not, whole parameters have partial gradients.
    """
    if marking():
        yield
        return

    def entering(x: torch.Tensor) -> torch.Tensor:
        return enter(x, peers) if sums else x

    def random() -> AbstractContextManager[None]:
        return sharded(peers)

    _depth.marks += 1
    try:
        with Marks(peers.degree, part=peers.rank, enter=entering, random=random):
            yield
    finally:
        _depth.marks -= 1


class WholeSizes:
    """A module whose code writes sizes of whole tensors."""

    _nbtrain_peers: Peers
    _nbtrain_sums: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with whole_sizes(self._nbtrain_peers, self._nbtrain_sums):
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # of the model's class


class WholeSequence:
    """A module that is given parts (B, T/t, ...) and computes with the whole sequence; its rows give parts again."""

    _nbtrain_peers: Peers
    _nbtrain_gathered: tuple[int | str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        once: dict[int, torch.Tensor] = {}
        _check_given(self, self._nbtrain_gathered, args, kwargs)

        def whole(key: int | str, value: Any) -> Any:
            if key not in self._nbtrain_gathered or not isinstance(value, torch.Tensor):
                return value
            if id(value) not in once:
                once[id(value)] = gather_sequence(value, self._nbtrain_peers)
            return once[id(value)]

        args = tuple(whole(index, value) for index, value in enumerate(args))
        kwargs = {name: whole(name, value) for name, value in kwargs.items()}
        return super().forward(*args, **kwargs)  # type: ignore[misc]  # of the model's class


def _check_given(module: Any, inputs: tuple[int | str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What is not gathered would be taken for the whole sequence."""
    for key in inputs:
        if not (key in kwargs if isinstance(key, str) else key < len(args)):
            raise ModelError(
                f"sequence_parallel gathers argument {key!r} of {type(module).__name__}, and it was called with "
                f"{len(args)} positions and {', '.join(kwargs) or 'no keywords'}; call it as when the plan was made, "
                "or type sequence_parallel=False"
            )


def read_sizes_as_whole(module: nn.Module, peers: Peers, *, sums: bool) -> None:
    """Makes the forward of ``module`` a region whose sizes are written for whole tensors; see `whole_sizes`."""
    swap_class(module, WholeSizes, _nbtrain_peers=peers, _nbtrain_sums=sums)


def gather_inputs(module: nn.Module, inputs: tuple[int | str, ...], peers: Peers) -> None:
    """Makes ``module`` gather its arguments ``inputs``, positions and keywords, along the sequence."""
    swap_class(module, WholeSequence, _nbtrain_peers=peers, _nbtrain_gathered=inputs)
