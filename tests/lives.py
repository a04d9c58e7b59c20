"""Ranks of which one is killed, and a new process that takes its place: what the session does, without a notebook.

The groups are formed as `nbtrain.engine.groups` forms them: under a new generation, all of them, in the same order.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed import distributed_c10d as c10d

from nbtrain.engine import wires
from nbtrain.parallel import live, mesh

_TIMEOUT = timedelta(seconds=60)
_new_group: Any = c10d._new_group_with_tag


class Life:
    """This process's part: which rank it is, and the groups that it formed."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder, self.rank, self.world_size = folder, rank, world_size
        self._formed: list[Any] = []
        c10d._new_group_with_tag = self._form

    def _form(self, *args: Any, **options: Any) -> Any:
        self._formed.append((args, options))
        with wires.recorded():
            return _new_group(*args, **options)

    def join(self, generation: int) -> None:
        """Form the default group."""
        store = dist.FileStore(str(self._folder / str(generation)), self.world_size)
        options = {"store": store, "rank": self.rank, "world_size": self.world_size, "timeout": _TIMEOUT}
        with wires.recorded():
            dist.init_process_group("gloo", **options)
        # who leaves at once would cut off those that still connect
        dist.barrier()

    def rejoin(self, generation: int, newcomers: tuple[int, ...]) -> None:
        """Form all groups again, with a newcomer that has formed none yet. Collective."""
        wires.cut()  # frees ranks that wait for this one: models hold on to groups that are destroyed
        if dist.is_initialized():
            dist.destroy_process_group()
        wires.forget()
        self.join(generation)
        survivor = next(rank for rank in range(self.world_size) if rank not in newcomers)
        recipe = [(self._formed, mesh.constructions())]
        dist.broadcast_object_list(recipe, survivor)
        self._formed, constructions = recipe[0]
        for args, options in self._formed:
            with wires.recorded():
                _new_group(*args, **options)
        if self.rank in newcomers:
            mesh.adopt(constructions)
        live.rebind(newcomers)


def die() -> None:
    """As by the OOM killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_lives(
    live_on: Callable[[Life], Any], begin: Callable[..., Any], world_size: int, dying: tuple[int, ...]
) -> list[Any]:
    """``live_on`` on ranks of which those ``dying`` kill themselves, ``begin`` on the processes in their place.

    They form the further generations themselves, when they know. A rank that is named twice dies twice: its first
    newcomer, too, and ``begin`` gets the generation in which it begins as well.

    Returns:
        What each returned: by rank, then the newcomers; None for those that died.
    """
    one_by_one = len(set(dying)) < len(dying)

    def on_process(folder: Path) -> Any:
        number = int(os.environ["RANK"])
        if number < world_size:
            life = Life(folder, number, world_size)
            life.join(0)
            return live_on(life)
        torch.manual_seed(77)
        index = number - world_size
        life = Life(folder, dying[index], world_size)
        return begin(life, index + 1) if one_by_one else begin(life)

    again = [world_size + index for index, rank in enumerate(dying) if rank in dying[index + 1 :]]
    with tempfile.TemporaryDirectory(prefix="lives-") as folder:
        return run_ranks(
            on_process, world_size + len(dying), Path(folder), group=False, mortal=(*dying, *again), timeout=100.0
        )
