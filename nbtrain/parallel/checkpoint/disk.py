"""`Disk`: what a trainer remembers for its checkpoints."""

from __future__ import annotations

import gc
import secrets
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nbtrain.parallel.cell import say
from nbtrain.parallel.loader import Loader

if TYPE_CHECKING:
    from nbtrain.parallel.checkpoint.saving import Saving

Position = Mapping[str, int]
"""Where a loader is, and what tells whether another one is like it."""


class Disk:
    """Of one trainer. A rank that takes a lost one's place begins with an empty one.

    Attributes:
        trainer_id: Tells whose a checkpoint is; rank 0's counts.
        saving: The last checkpoint that was begun and of which the ranks have not agreed that it is there; or None.
    """

    def __init__(self, trainer_id: str = "") -> None:
        self.trainer_id = trainer_id or secrets.token_hex(8)
        self.saving: Saving | None = None
        self._loaders: list[weakref.ref[Loader]] = []
        self._positions: list[Position] = []

    def __reduce__(self) -> Any:
        return Disk, (self.trainer_id,)

    def know(self, loader: Loader) -> Loader:
        """Its position is saved; where a checkpoint was loaded before it was made, it goes on where one like it was."""
        self._loaders.append(weakref.ref(loader))
        if (position := matched([loader], self._positions)[0]) is not None:
            self._positions.remove(position)
            loader.load_state_dict(position)
        elif self._positions:
            say(
                f"a loader with {spelled(loader.traits)} is like none of the checkpoint's that are left; it begins anew"
            )
        return loader

    def living_loaders(self) -> list[Loader]:
        """Those that somebody holds, in the order in which they were made."""
        if len(self._loaders) > 1:
            gc.collect()  # one of a cell that ran again may be garbage
        living = [loader for reference in self._loaders if (loader := reference()) is not None]
        self._loaders = [weakref.ref(loader) for loader in living]
        return living

    def take_positions(self, positions: list[Position]) -> None:
        """Gives them to the loaders that are like those they were saved of, and to those that are made later."""
        living = self.living_loaders()
        left = list(positions)
        for number, (loader, position) in enumerate(zip(living, matched(living, positions), strict=True)):
            if position is not None:
                left.remove(position)
                loader.load_state_dict(position)
            else:
                say(f"the checkpoint has no position of the trainer's loader {number}; it stays where it is")
        if living:
            for position in left:
                say(f"the checkpoint's position {spelled(position)} waits for a loader that is made like that")
        self._positions = left


def matched(loaders: list[Loader], positions: list[Position]) -> list[Position | None]:
    """For each loader the first position that is left of one like it."""
    left = list(positions)
    found: list[Position | None] = []
    for traits in (loader.traits for loader in loaders):
        # an older checkpoint tells less of them
        alike = (one for one in left if all(one.get(key, value) == value for key, value in traits.items()))
        position = next(alike, None)
        if position is not None:
            left.remove(position)
        found.append(position)
    return found


def spelled(things: Mapping[str, int]) -> str:
    return ", ".join(f"{key}={value}" for key, value in things.items())
