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
    """Remove what `load` registered. Ranks go on: ``%reload_ext`` unloads first, and must not lose what they hold."""
    if sessions._current is not None and sessions._current.started:
        print(f"{sessions._current.headline()} go on; nbtrain.session().stop() ends them")
    auto.remove(shell)
    completion.remove(shell)
    shell.magics_manager.magics["line"].pop("distributed", None)
    for name in ("distributed", "local"):
        shell.magics_manager.magics["cell"].pop(name, None)
