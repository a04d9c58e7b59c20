"""The engine: an ipyparallel engine that knows its rank.

It is the same program however it starts: forked by the fork server, spawned by ipyparallel's local launcher, or
launched by Slurm, MPI or SSH. Its rank comes from its environment, and the engine id that it requests is its rank.
"""

from __future__ import annotations

import contextvars
import functools
import importlib.util
import os
import threading
import warnings
from typing import Any

import ipyparallel.engine.app as upstream
from ipykernel.iostream import IOPubThread, OutStream
from traitlets import Type

from nbtrain.engine import trail
from nbtrain.engine.kernel import RankKernel

# In the order of preference: ours, then what the launchers' own systems set.
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def rank_from_environment(environ: dict[str, str] | os._Environ[str] = os.environ) -> int | None:
    """This process's rank, or None where nothing tells."""
    for name in RANK_VARIABLES:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


# ipyparallel names both classes in its module and takes no configuration for them. The pipe carries the output of
# forked children (DataLoader workers), whose writes would otherwise go to a thread that the fork did not copy.
upstream.Kernel = RankKernel
upstream.IOPubThread = functools.partial(IOPubThread, pipe=True)


SHELL_ARGS = (
    "--HistoryManager.enabled=False",  # every rank of every notebook would write one file
    "--InteractiveShell.cache_size=0",  # `Out` would keep the memory of every result
    "--IPCompleter.use_jedi=False",  # completion answers while a cell runs: it must be quick
)


class RankStream(OutStream):
    """A rank's standard output or error."""

    # seconds; well below the time for which the notebook holds a line to see whether other ranks print it too
    flush_interval = 0.05

    def write(self, string: str) -> int | None:
        if isinstance(string, str) and not string.isascii():
            string = string.encode("utf-8", "backslashreplace").decode()  # lone surrogates cannot be sent
        return super().write(string)


class RankEngine(upstream.IPEngine):
    """An engine whose id is its rank."""

    out_stream_factory = Type(RankStream)

    def initialize(self, argv: list[str] | None = None) -> None:
        super().initialize(argv)
        rank = rank_from_environment()
        if rank is not None:
            self.id = rank

    async def complete_registration(self, msg: Any, connect: Any, maybe_tunnel: Any) -> None:
        await super().complete_registration(msg, connect, maybe_tunnel)
        # Libraries (tqdm.auto among them) take this entry for a page that can show widgets.
        self.kernel.shell.config.pop("IPKernelApp", None)
        warnings.filterwarnings("ignore", message="To exit: use 'exit'")  # a rank does not exit from a cell
        trail.begin()  # behind ipykernel's own faulthandler
        _threads_inherit_their_cell()
        _bars_are_text()


def run(argv: list[str]) -> None:
    """Run an engine until it is stopped."""
    RankEngine.launch_instance(argv=[*argv, *SHELL_ARGS])


def _threads_inherit_their_cell() -> None:
    """Make a thread print into the cell that started it, also when a later cell runs.

    ipykernel keeps the cell in a context variable, and threads start with an empty context before Python 3.14.
    """
    start = threading.Thread.start

    @functools.wraps(start)
    def start_in_context(self: threading.Thread) -> None:
        self.run = functools.partial(contextvars.copy_context().run, self.run)  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = start_in_context  # type: ignore[method-assign]


def _bars_are_text() -> None:
    """Make tqdm's notebook bars text: their widgets would live on the rank, where no page finds them."""
    if importlib.util.find_spec("tqdm") is None:
        return
    import tqdm
    import tqdm.notebook

    tqdm.notebook.tqdm = tqdm.notebook.tqdm_notebook = tqdm.tqdm
    tqdm.notebook.trange = tqdm.notebook.tnrange = tqdm.trange
