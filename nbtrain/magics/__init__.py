"""``%distributed`` and ``%%distributed``."""

from __future__ import annotations

from typing import Any

from nbtrain.cluster import session as sessions
from nbtrain.magics import auto, completion
from nbtrain.magics.distributed import DistributedMagics


def load(shell: Any) -> None:
    """Register the magics and completion with ``shell``. Loading twice does no harm."""
    shell.register_magics(DistributedMagics)
    completion.install(shell)


def unload(shell: Any) -> None:
    """Stop the ranks and remove what `load` registered."""
    if sessions._current is not None:
        sessions._current.stop()
    auto.remove(shell)
    completion.remove(shell)
    shell.magics_manager.magics["line"].pop("distributed", None)
    for name in ("distributed", "local"):
        shell.magics_manager.magics["cell"].pop(name, None)
