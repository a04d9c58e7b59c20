"""`Disk`: what a trainer remembers for its checkpoints."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nbtrain.parallel.loader import Loader

if TYPE_CHECKING:
    from nbtrain.parallel.checkpoint.saving import Saving


class Disk:
    """Of one trainer. A rank that takes a lost one's place begins with an empty one.

    Attributes:
        saving: The last checkpoint that was begun and of which the ranks have not agreed that it is there; or None.
    """

    def __init__(self) -> None:
        self.saving: Saving | None = None
        self._loaders: list[weakref.ref[Loader]] = []
        self._positions: list[Mapping[str, int]] = []

    def __reduce__(self) -> Any:
        return Disk, ()

    def know(self, loader: Loader) -> Loader:
        """Its position is saved; where a checkpoint was loaded before it was made, it goes on where one like it was."""
        self._loaders.append(weakref.ref(loader))
        size = {"batch_size": loader.batch_size, "length": len(loader)}
        for position in self._positions:
            if size.items() <= position.items():
                self._positions.remove(position)
                loader.load_state_dict(position)
                break
        return loader

    def living_loaders(self) -> list[Loader]:
        """Those that somebody holds, in the order in which they were made."""
        if len(self._loaders) > 1:
            gc.collect()  # one of a cell that ran again may be garbage
        living = [loader for reference in self._loaders if (loader := reference()) is not None]
        self._loaders = [weakref.ref(loader) for loader in living]
        return living

    def take_positions(self, positions: list[Mapping[str, int]]) -> None:
        """Gives them to the loaders, and to those that are made later."""
        living = self.living_loaders()
        for loader, position in zip(living, positions, strict=False):
            loader.load_state_dict(position)
        self._positions = list(positions[len(living) :])
