"""Random numbers under tensor parallelism: equal on all peers where activations are whole, others where they are cut.

::

    root forward      generators seeded by (seed, data coordinate, step, forward of the step): the same on tp peers
      whole tensors   draw from them: equal masks
      cut tensors     `sharded`: seeded by (a number drawn from them, tp rank): other masks on each rank
    afterwards        generators as the user left them

Nothing is remembered between operations: recomputation in backward, for which torch puts the generators back, draws
the same numbers again.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.parallel.tensor.peers import Peers
from nbtrain.parallel.tensor.swap import swap_class


@dataclass(eq=False)
class Draws:
    """What the generators of a model's forwards are seeded by.

    Attributes:
        seed: The same on tp peers; `agreed_seed`.
        coordinate: Of this rank in data parallelism: other samples get other masks.
        step: `begin` sets it, so that peers who lost count in an interrupted step agree again.
        forwards: Since then.
    """

    seed: int
    coordinate: int
    step: int = 0
    forwards: int = 0

    def begin(self, step: int) -> None:
        """The next forward is the first one of ``step``."""
        self.step, self.forwards = step, 0

    @contextmanager
    def next(self) -> Iterator[None]:
        """The default generators inside one forward, whatever the user seeded; they are put back."""
        seed = _mixed(self.seed, self.coordinate, self.step, self.forwards)
        self.forwards += 1
        with _seeded(seed), _seeded_elsewhere(seed):
            yield

    @contextmanager
    def at(self, microbatch: int, call: int) -> Iterator[None]:
        """The same inside one call of a microbatch's forward, whatever ran before it; -1: around all of them."""
        seed = _mixed(self.seed, self.coordinate, self.step, microbatch, call)
        with _seeded(seed), _seeded_elsewhere(seed) if call < 0 else nullcontext():
            yield

    def __deepcopy__(self, memo: dict[int, Any]) -> Draws:
        return Draws(self.seed, self.coordinate, self.step, self.forwards)


def agreed_seed(group: dist.ProcessGroup, device: torch.device | None = None) -> int:
    """A seed that tp rank 0 chose by its ``torch.manual_seed``. Collective; changes no generator.

    Args:
        group: Of the tensor-parallel ranks.
        device: What the group moves; None: the CPU.
    """
    seed = torch.tensor(_mixed(torch.initial_seed()), dtype=torch.int64, device=device)
    dist.broadcast(seed, group=group, group_src=0)
    return int(seed)


@contextmanager
def sharded(peers: Peers) -> Iterator[None]:
    """Random numbers of this rank's own, for a tensor of which each peer has a part.

    One number is drawn from the default CPU generator, on all peers the same.
    """
    number = int(torch.randint(2**62, ()))
    with _seeded(_mixed(number, peers.rank)):
        yield


class Drawing:
    """The root of a model: each forward begins with generators that are the same on tp peers."""

    _nbtrain_draws: Draws

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._nbtrain_draws.next():
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # of the model's class


def seed_forwards(model: nn.Module, draws: Draws) -> None:
    """Makes each forward of ``model`` draw by ``draws``; in place, by class."""
    swap_class(model, Drawing, _nbtrain_draws=draws)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    generators = _generators()
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def _seeded_elsewhere(seed: int) -> Iterator[None]:
    """Python's and NumPy's random numbers, by which some models choose layers: peers must choose the same."""
    numpy: Any = sys.modules.get("numpy.random")
    states = random.getstate(), None if numpy is None else numpy.get_state()
    random.seed(seed)
    if numpy is not None:
        numpy.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.set_state(states[1])


def _generators() -> list[torch.Generator]:
    """The default ones of the CPU and, where it is used, of the current GPU."""
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators


def _mixed(*numbers: int) -> int:
    """A seed below 2**62 in which each of ``numbers`` changes every bit."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
