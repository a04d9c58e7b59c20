"""nbtrain: interactive distributed training from a Jupyter notebook.

``import nbtrain as nt`` costs milliseconds and does not import torch: each name below is imported from its
module when it is first used, so that the notebook's kernel stays small and never initialises CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nbtrain._version import __version__

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbtrain.cluster.session import Session, session
    from nbtrain.parallel.deferred import meta_init
    from nbtrain.parallel.loader import loader
    from nbtrain.parallel.parallelize import parallelize
    from nbtrain.parallel.trainer import Trainer
    from nbtrain.parallel.verify import verify
    from nbtrain.plan import Plan
    from nbtrain.telemetry.progress import progress

_HOME = {
    "Plan": "nbtrain.plan",
    "Session": "nbtrain.cluster.session",
    "Trainer": "nbtrain.parallel.trainer",
    "errors": "nbtrain",
    "loader": "nbtrain.parallel.loader",
    "meta_init": "nbtrain.parallel.deferred",
    "parallelize": "nbtrain.parallel.parallelize",
    "progress": "nbtrain.telemetry.progress",
    "session": "nbtrain.cluster.session",
    "verify": "nbtrain.parallel.verify",
}

__all__ = [
    "Plan",
    "Session",
    "Trainer",
    "__version__",
    "errors",
    "load_ipython_extension",
    "loader",
    "meta_init",
    "parallelize",
    "progress",
    "session",
    "unload_ipython_extension",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("nbtrain.errors")
    if name not in _HOME:
        raise AttributeError(f"module 'nbtrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """``%load_ext nbtrain``: registers ``%distributed`` and ``%%distributed``."""
    from nbtrain.magics import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """``%unload_ext nbtrain``: removes the magics. The ranks go on."""
    from nbtrain.magics import unload

    unload(shell)
