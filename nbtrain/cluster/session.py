"""The session: ranks that stay alive between cells, and everything that is asked of them."""

from __future__ import annotations

import ast
import atexit
import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from nbtrain.cluster.client import Bound
from nbtrain.cluster.failures import ranks_text
from nbtrain.cluster.hang import Where
from nbtrain.cluster.hangwatch import HANG_AFTER_S
from nbtrain.cluster.live import LiveRanks
from nbtrain.cluster.options import Options
from nbtrain.cluster.prompts import first_failed, require_input
from nbtrain.cluster.ranks import parse
from nbtrain.cluster.report import Holdings, Status
from nbtrain.errors import NbtrainError, NotStartedError, SessionError, StartError, UsageError
from nbtrain.plan import Plan

NOTHING_RUNS = "no ranks run; type %distributed start -n 4"
_DEBUG = "get_ipython().debugger(force=True)"


_current: Session | None = None


def session() -> Session:
    """The session that runs in this kernel.

    Raises:
        NotStartedError: none runs.
    """
    if _current is None or not _current.started:
        raise NotStartedError("no ranks run; type %distributed start -n 4, or just run a %%distributed cell")
    return _current


def current_or_new() -> Session:
    """The session that runs, or one that has not started: for the magics, whose first cell starts it."""
    global _current
    if _current is None:
        _current = Session()
    return _current


class Session:
    """Ranks on this machine, or wherever ``launcher`` puts them.

    Args:
        n: number of ranks; by default one a GPU, and 4 where there is no GPU.
        gpus: which GPUs, by position ("0,1"); "none" for CPU ranks.
        backend: "auto" (nccl with GPUs, gloo without), "gloo" or "nccl".
        threads: intra-operation CPU threads a rank; by default cores / ranks, at least 1.
        launcher: "local" forks engines where that is safe; "spawn" starts them as separate programs; any other name
            is one of ipyparallel's launchers.
        hang_after: seconds of silence after which a card below the cell says which ranks wait for which.

    It starts with its first use, or with `start`, or as a context manager, which also stops it.

    Raises:
        UsageError: a value that cannot be.
    """

    def __init__(
        self,
        n: int | None = None,
        *,
        gpus: str | None = None,
        backend: str = "auto",
        threads: int | None = None,
        launcher: str = "local",
        hang_after: float = HANG_AFTER_S,
    ) -> None:
        self._options = Options(n, gpus, backend, threads, launcher, hang_after)
        self._live: LiveRanks | None = None
        self.start_seconds = 0.0

    # -- life ----------------------------------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether ranks run."""
        return self._live is not None

    @property
    def world_size(self) -> int:
        """How many ranks there are; 0 before the start."""
        return self._live.members.world_size if self._live else 0

    def start(self, n: int | None = None, **options: Any) -> Session:
        """Start the ranks; ``options`` are the constructor's. If they run already so, nothing changes.

        Raises:
            UsageError: a value that cannot be.
            SessionError: ranks with other options run.
            StartError: the ranks did not start; what did is gone again.
        """
        wanted = self._options.updated({"n": n, **options})
        if self.started:
            return self._already(wanted)
        _refuse_second(self)
        began = time.monotonic()
        try:
            self._live = LiveRanks(wanted)
        except (NbtrainError, KeyboardInterrupt):
            raise
        except Exception as problem:
            raise StartError(f"the ranks did not start: {type(problem).__name__}: {problem}") from problem
        self._options = wanted.updated({"n": self.world_size})
        self.start_seconds = time.monotonic() - began
        atexit.register(self.stop)
        _make_current(self)
        return self

    def stop(self) -> None:
        """End every rank. No process, socket or file is left. Stopping what does not run is allowed."""
        atexit.unregister(self.stop)
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def restart(
        self, n: int | None = None, *, ranks: str | None = None, replay: bool = False, **options: Any
    ) -> Session:
        """Stop and start again, with the same options but for those given. What the ranks held is lost.

        With ``ranks`` only these are replaced, whether they live or have died, and all others keep what they hold.
        Trainers go on where another rank holds what the lost ones held: see `nbtrain.Trainer`. With ``replay`` the
        definitions of earlier cells (imports, functions, classes, plain constants) run on the new ranks.

        Raises:
            UsageError: a value that cannot be; the ranks go on.
            StartError: a process did not come, or a launcher cannot replace one.
        """
        if ranks is not None:
            if n is not None or options:
                raise UsageError("restart: --ranks replaces ranks as they are; leave the other options away")
            self._ready().replace(parse(ranks, self.world_size), replay)
            return self
        if replay:
            raise UsageError("restart: --replay is for the ranks of --ranks, e.g. --ranks 2 --replay")
        self._options.updated({"n": n, **options}).request()
        self.stop()
        return self.start(n, **options)

    def __enter__(self) -> Session:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Session: {self.headline()}>"

    def headline(self) -> str:
        """One line: what runs."""
        return self._live.headline() if self._live else "no ranks run"

    # -- cells ---------------------------------------------------------------------------------------------------------

    def run(
        self,
        source: str,
        ranks: str = "all",
        *,
        plan: Plan | str | None = None,
        parallelize: Sequence[str] = (),
        push: Mapping[str, Any] | None = None,
        block: bool = True,
        name: str = "",
        timeout: float | None = None,
        values: bool = True,
        label: str = "",
        offset: int = 0,
    ) -> Any:
        """Run ``source`` as a cell on ``ranks``; output and errors appear in the cell that calls.

        ``plan``, ``parallelize``, ``push``, ``name`` and ``timeout`` (seconds) are the options of ``%%distributed``.
        ``label`` is what errors call the cell, ``offset`` the number of its lines before ``source``.

        Returns:
            The last expression's values, a list by rank; None with ``values=False``; a `Handle` with ``block=False``.

        Raises:
            SyntaxError: the source is not Python. Nothing was sent.
            BusyError: the ranks still run another cell.
            CellError: it raised on some rank.
            CellTimeoutError: it ran longer than ``timeout`` seconds, and was interrupted.
            RankDiedError: a rank's process ended.
        """
        code = check_syntax(source)
        if parallelize and not block:
            raise UsageError("--parallelize needs a blocking cell; leave --no-block away")
        live = self._ready()
        targets = live.targets(ranks)
        if parallelize and len(targets) < self.world_size:
            raise UsageError(f"--parallelize needs all {self.world_size} ranks; run the cell without -r")
        if plan is not None:
            live.bind_plan(plan)
        if push:
            self.push(push, ranks)
        begun = live.num_cells
        try:
            cell = live.send(source, targets, name, label, offset, keep=values or not block, attended=block)
            live.replay.remember(targets, code, label, offset)
            if not block:
                return live.handle(cell)
            live.wait_for(cell, timeout)
        except KeyboardInterrupt as interrupt:
            raise live.interrupted(begun, interrupt) from None
        if parallelize:
            holdings = live.call("parallelize_names", targets, list(parallelize))
            Holdings(dict(zip(targets, holdings, strict=True))).show()
        return live.values(cell) if values else None

    def debug(self, ranks: str | int = "all") -> None:
        """A debugger on the last error's frames, on the one of ``ranks`` that failed first. It asks in this cell.

        Raises:
            UsageError: none of them had an error.
        """
        live = self._ready()
        targets = live.targets(str(ranks))
        rank = first_failed({rank: self.ask(rank, "last_error", 1.0) for rank in targets})
        if rank is None:
            raise UsageError(f"{ranks_text(targets)} had no error to debug; type it after a cell that failed")
        require_input("%distributed debug")
        begun = live.num_cells
        try:  # the groups are left as the error left them
            live.wait_for(live.send(_DEBUG, [rank], "", "the debugger", 0, keep=False, mend=False), None)
        except KeyboardInterrupt as interrupt:
            raise live.interrupted(begun, interrupt) from None

    def interrupt(self, ranks: str = "all") -> list[int]:
        """Interrupt the cells that run on ``ranks``, as Ctrl-C would; returns the ranks that ran them.

        All ranks of a cell are interrupted: they may wait for each other. Ranks that did not answer an interrupt are
        replaced by the next one.
        """
        return self._live.interrupt(parse(ranks, self.world_size)) if self._live else []

    # -- values --------------------------------------------------------------------------------------------------------

    def push(self, values: Mapping[str, Any], ranks: str = "all") -> None:
        """Bind ``values`` by name in the ranks' namespaces.

        A function sees the rank's names as its globals. An object's class must be known on the ranks.
        """
        live = self._ready()
        targets = live.targets(ranks)
        for name, value in values.items():
            if isinstance(value, ModuleType):
                raise UsageError(f"push: {name!r} is a module; import it in a %%distributed cell")
            try:
                live.call("push", targets, name, Bound(value))
            except UsageError as problem:
                raise UsageError(f"push: {name!r} ({type(value).__name__}) cannot be sent: {problem}") from None

    def pull(self, name: str, ranks: str = "all") -> list[Any]:
        """The value of ``name`` on each of ``ranks``. Tensors arrive as NumPy arrays, 0-d ones as numbers."""
        live = self._ready()
        return [found[name] for found in live.call("pull", live.targets(ranks), [name])]

    def ask(self, rank: int, name: str, timeout: float, **args: Any) -> Any:
        """Ask a rank's control thread, which answers while a cell runs; None if it does not within ``timeout`` s."""
        return self._live.members.ask(rank, name, timeout, **args) if self._live else None

    def status(self) -> Status:
        """What runs where, as a table."""
        return self._live.status() if self._live else Status(NOTHING_RUNS, [])

    def where(self) -> Where:
        """Where every rank is now, and which collective it waits in: while cells run, and also if ranks are stuck."""
        return self._live.where() if self._live else Where(NOTHING_RUNS, (), [])

    def guard(self, mode: str) -> None:
        """Compare what ranks are about to call before each collective: "cells" (what cells call), "on" (all), "off".

        Raises:
            UsageError: another mode.
        """
        self._ready().guard(mode)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _already(self, wanted: Options) -> Session:
        difference = self._options.differences(wanted)
        if difference:
            raise SessionError(
                f"{self.headline()} run already; type %distributed restart {difference}, which loses what they hold"
            )
        return self

    def _ready(self) -> LiveRanks:
        """The ranks, started if need be."""
        if self._live is None:
            self.start()
        assert self._live is not None
        return self._live


def check_syntax(source: str) -> str:
    """Raise what Python would for a source that is not Python, before any rank sees it; the source without magics.

    Raises:
        SyntaxError: with the line of the source.
    """
    code: str = TransformerManager().transform_cell(source)  # not the shell's own: `auto` would transform it again
    compile(code, "<cell>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return code


def _refuse_second(new: Session) -> None:
    """One session a kernel: the magics, and the person, speak of *the* ranks."""
    if _current is not None and _current is not new and _current.started:
        raise SessionError(f"{_current.headline()} run in this kernel already; type %distributed stop first")


def _make_current(new: Session) -> None:
    global _current
    _current = new
