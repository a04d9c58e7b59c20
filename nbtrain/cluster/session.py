"""The session: ranks that stay alive between cells, and everything that is asked of them."""

from __future__ import annotations

import _thread
import ast
import atexit
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from nbtrain.cluster import hang, sinks
from nbtrain.cluster.cell import Cell, Handle
from nbtrain.cluster.client import Bound
from nbtrain.cluster.failures import Death, ranks_text, replace_advice
from nbtrain.cluster.hang import Where
from nbtrain.cluster.hangwatch import HANG_AFTER_S, HangWatch
from nbtrain.cluster.members import Members
from nbtrain.cluster.options import Options
from nbtrain.cluster.output import CellOutput, Publisher
from nbtrain.cluster.prompts import first_failed, require_input
from nbtrain.cluster.ranks import compact, parse
from nbtrain.cluster.replay import Replay
from nbtrain.cluster.report import Healing, Holdings, Status
from nbtrain.cluster.supervisor import INTERRUPT_GRACE_S, Supervisor
from nbtrain.errors import (
    BusyError,
    CellInterrupted,
    CellTimeoutError,
    NbtrainError,
    NotStartedError,
    RankDiedError,
    SessionError,
    StartError,
    UsageError,
    nearest,
)
from nbtrain.interrupts import uninterrupted
from nbtrain.plan import Plan
from nbtrain.plan.footprint import format_bytes

SECOND_GRACE_S = 0.5  # what ranks get after a second interrupt: they may be on their way back
GUARD_MODES = ("cells", "on", "off")
_DEBUG = "get_ipython().debugger(force=True)"
LISTENED_CELLS = 200  # so many ended cells still show what their threads print

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
        self._members: Members | None = None
        self._supervisor: Supervisor | None = None
        self._publisher: Publisher | None = None
        self._hangs: HangWatch | None = None
        self._awaited: Cell | None = None
        self._wanted_restarts: set[int] = set()  # ranks that a card's button asks to replace
        self._cells: list[Cell] = []
        self._num_cells = 0
        self._ended: deque[Cell] = deque()
        self._replay = Replay()
        self._plan: dict[str, Any] | None = None
        self._guard = GUARD_MODES[0]
        self.start_seconds = 0.0

    # -- life ----------------------------------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether ranks run."""
        return self._members is not None

    @property
    def world_size(self) -> int:
        """How many ranks there are; 0 before the start."""
        return self._members.world_size if self._members else 0

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
            self._members = Members(wanted.launcher, wanted.request(), self._died)
        except (NbtrainError, KeyboardInterrupt):
            raise
        except Exception as problem:
            raise StartError(f"the ranks did not start: {type(problem).__name__}: {problem}") from problem
        self._supervisor = Supervisor(self._members)
        self._options = wanted.updated({"n": self._members.world_size})
        self._publisher = Publisher()
        self._hangs = HangWatch(self._members, wanted.hang_after, self._asked)
        self.start_seconds = time.monotonic() - began
        atexit.register(self.stop)
        _make_current(self)
        return self

    def stop(self) -> None:
        """End every rank. No process, socket or file is left. Stopping what does not run is allowed."""
        atexit.unregister(self.stop)
        if self._hangs is not None:
            self._hangs.stop()
            self._hangs = None
        members, self._members = self._members, None
        if members is not None:
            members.stop()
        for cell in self._cells:
            for rank in cell.running:
                cell.on_death(rank, Death("the session was stopped"))
        self._cells.clear()
        self._ended.clear()
        self._replay = Replay()
        self._plan, self._guard = None, GUARD_MODES[0]
        if self._publisher is not None:
            self._publisher.stop()
            self._publisher = None

    def restart(
        self, n: int | None = None, *, ranks: str | None = None, replay: bool = False, **options: Any
    ) -> Session:
        """Stop and start again, with the same options but for those given. What the ranks held is lost.

        With ``ranks`` only these are replaced, whether they live or have died, and all others keep what they hold.
        Trainers go on where another rank holds what the lost ones held: see `nbtrain.Trainer`. With ``replay`` the
        definitions of earlier cells (imports, functions, classes, plain constants) run on the new ranks.

        Raises:
            UsageError: a value that cannot be; the ranks go on.
            SessionError: no rank would keep anything.
        """
        if ranks is not None:
            if n is not None or options:
                raise UsageError("restart: --ranks replaces ranks as they are; leave the other options away")
            self._ready()
            self._replace(parse(ranks, self.world_size), replay)
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
        if self._members is None:
            return "no ranks run"
        first = self._members.info[0]
        kind = "GPU" if first["device"].startswith("cuda") else "CPU"
        dead = f", {ranks_text(self._members.dead)} dead" if self._members.dead else ""
        threads = f"{first['threads']} thread{'s' if first['threads'] > 1 else ''} each"
        ranks = f"{self.world_size} {kind} rank{'s' if self.world_size > 1 else ''}"
        return f"{ranks} ({first['backend']}, {threads}{dead})"

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
        self._ready()
        targets = self._targets(ranks)
        if parallelize and len(targets) < self.world_size:
            raise UsageError(f"--parallelize needs all {self.world_size} ranks; run the cell without -r")
        if plan is not None:
            self._bind_plan(plan)
        if push:
            self.push(push, ranks)
        begun = self._num_cells
        try:
            cell = self._send(source, targets, name, label, offset, keep=values or not block, attended=block)
            self._replay.remember(targets, code, label, offset)
            if not block:
                return self._handle(cell)
            self._await(cell, timeout)
        except KeyboardInterrupt as interrupt:
            raise self._interrupted(begun, interrupt) from None
        if parallelize:
            holdings = self._call("parallelize_names", targets, list(parallelize))
            Holdings(dict(zip(targets, holdings, strict=True))).show()
        return self._values(cell) if values else None

    def debug(self, ranks: str | int = "all") -> None:
        """A debugger on the last error's frames, on the one of ``ranks`` that failed first. It asks in this cell.

        Raises:
            UsageError: none of them had an error.
        """
        targets = self._targets(str(ranks))
        rank = first_failed({rank: self.ask(rank, "last_error", 1.0) for rank in targets})
        if rank is None:
            raise UsageError(f"{ranks_text(targets)} had no error to debug; type it after a cell that failed")
        require_input("%distributed debug")
        begun = self._num_cells
        try:  # the groups are left as the error left them
            self._await(self._send(_DEBUG, [rank], "", "the debugger", 0, keep=False, mend=False), None)
        except KeyboardInterrupt as interrupt:
            raise self._interrupted(begun, interrupt) from None

    def interrupt(self, ranks: str = "all") -> list[int]:
        """Interrupt the cells that run on ``ranks``, as Ctrl-C would; returns the ranks that ran them.

        All ranks of a cell are interrupted: they may wait for each other. Ranks that did not answer an interrupt are
        replaced by the next one.
        """
        if not self.started:
            return []
        wanted = set(parse(ranks, self.world_size))
        cells = [cell for cell in self._cells if wanted & set(cell.running)]
        running = sorted({rank for cell in cells for rank in cell.running})
        for cell in cells:
            self._end(cell)
        return running

    # -- values --------------------------------------------------------------------------------------------------------

    def push(self, values: Mapping[str, Any], ranks: str = "all") -> None:
        """Bind ``values`` by name in the ranks' namespaces.

        A function sees the rank's names as its globals. An object's class must be known on the ranks.
        """
        self._ready()
        targets = self._targets(ranks)
        for name, value in values.items():
            if isinstance(value, ModuleType):
                raise UsageError(f"push: {name!r} is a module; import it in a %%distributed cell")
            try:
                self._call("push", targets, name, Bound(value))
            except UsageError as problem:
                raise UsageError(f"push: {name!r} ({type(value).__name__}) cannot be sent: {problem}") from None

    def pull(self, name: str, ranks: str = "all") -> list[Any]:
        """The value of ``name`` on each of ``ranks``. Tensors arrive as NumPy arrays, 0-d ones as numbers."""
        self._ready()
        return [found[name] for found in self._call("pull", self._targets(ranks), [name])]

    def ask(self, rank: int, name: str, timeout: float, **args: Any) -> Any:
        """Ask a rank's control thread, which answers while a cell runs; None if it does not within ``timeout`` s."""
        return self._members.ask(rank, name, timeout, **args) if self._members else None

    def status(self) -> Status:
        """What runs where, as a table."""
        if self._members is None:
            return Status("no ranks run; type %distributed start -n 4", [])
        busy = self._busy()
        return Status(self.headline(), [self._row(info, busy.get(info["rank"])) for info in self._members.info])

    def where(self) -> Where:
        """Where every rank is now, and which collective it waits in: while cells run, and also if ranks are stuck."""
        if self._members is None:
            return Where("no ranks run; type %distributed start -n 4", (), [])
        self._busy()
        return hang.where(self._members, self.headline(), self._cells)

    def guard(self, mode: str) -> None:
        """Compare what ranks are about to call before each collective: "cells" (what cells call), "on" (all), "off".

        Raises:
            UsageError: another mode.
        """
        if mode not in GUARD_MODES:
            raise UsageError(f"guard {mode!r}: {nearest(mode, GUARD_MODES)}")
        self._ready()
        self._call("set_guard", range(self.world_size), mode)
        self._guard = mode

    # -- inside --------------------------------------------------------------------------------------------------------

    def _already(self, wanted: Options) -> Session:
        difference = self._options.differences(wanted)
        if difference:
            raise SessionError(
                f"{self.headline()} run already; type %distributed restart {difference}, which loses what they hold"
            )
        return self

    def _ready(self) -> Members:
        """The ranks, started if need be."""
        if self._members is None:
            self.start()
        assert self._members is not None
        return self._members

    def _supervising(self) -> Supervisor:
        self._ready()
        assert self._supervisor is not None
        return self._supervisor

    def _targets(self, spec: str) -> list[int]:
        """The ranks that ``spec`` names, all of them alive."""
        members = self._ready()
        targets = parse(spec, members.world_size)
        for rank in targets:
            if rank in members.dead:
                raise RankDiedError(f"{members.dead[rank].told(rank)}; {replace_advice(members.dead)}")
        return targets

    def _send(
        self,
        source: str,
        targets: list[int],
        name: str,
        label: str,
        offset: int,
        keep: bool,
        *,
        attended: bool = True,
        mend: bool = True,
    ) -> Cell:
        self._refuse_if_busy(targets)
        if mend:
            self._mend_groups()
        members, publisher = self._ready(), self._publisher
        assert publisher is not None
        assert members.client is not None
        self._num_cells += 1
        output = CellOutput(targets, sinks.current(), members.folder / f"output-of-cell-{self._num_cells}.txt")
        cell = Cell(targets, output, publisher, self._num_cells, name, label, alone=len(targets) == self.world_size)
        cell.prompts.open(members.answer, attended=attended)
        about = {"number": cell.number, "label": label, "offset": offset, "keep": keep, "ranks": targets}
        with uninterrupted():  # a cell that only some ranks got would never end
            self._cells.append(cell)
            cell.requests = [members.client.execute(rank, source, cell, about) for rank in targets]
        if self._hangs is not None:
            self._hangs.watch(cell)
        return cell

    def _mend_groups(self) -> None:
        """Form the session's groups again where ranks were cut out of them or a cell has destroyed them."""
        members = self._ready()
        if self._busy() or members.dead or not members.groups_lost:
            return
        with self._supervising().interruptible():
            members.rejoin()

    def _replace(self, ranks: Iterable[int], replay: bool) -> None:
        """New processes for ``ranks``, and for those that have died besides; what they held, as far as it can be."""
        members = self._ready()
        wanted = sorted({*ranks, *members.dead})
        if len(wanted) == self.world_size:
            raise SessionError("no rank would keep anything; type %distributed restart to start again")
        for cell in set(self._busy().values()):
            if not set(cell.running) <= set(wanted):
                self._supervising().end(cell)
        self._refuse_if_busy(rank for rank in range(self.world_size) if rank not in wanted)
        began = time.monotonic()
        try:
            members.replace(wanted)
            notes: list[str] = []
            reports = members.heal(lambda rank: notes.extend(self._define(rank, replay)))
        except KeyboardInterrupt:
            self._supervising().end_call()
            again = f"%distributed restart --ranks {compact(wanted)}"
            raise CellInterrupted(f"{ranks_text(wanted)} were being replaced; type {again} once more") from None
        Healing(wanted, time.monotonic() - began, reports, notes, replay).show()

    def _define(self, rank: int, replay: bool) -> list[str]:
        """Tell a newcomer the plan, and with ``replay`` what earlier cells defined; what failed there, a line each."""
        members = self._ready()
        members.call("set_guard", [rank], self._guard)
        if self._plan is not None:
            members.call("bind_plan", [rank], self._plan)
        cells = self._replay.on(rank) if replay else []
        [failed] = members.call("define", [rank], cells)
        return [f"rank {rank}: {line}" for line in failed]

    def _end(self, cell: Cell) -> str:
        """Interrupt a cell; what came of it. Ranks that answer neither this nor an earlier interrupt are replaced."""
        again = cell.interrupted
        try:
            self._supervising().end(cell, SECOND_GRACE_S if again else INTERRUPT_GRACE_S)
        except KeyboardInterrupt:
            again = not cell.wait(SECOND_GRACE_S)
        stuck = set(cell.running) if again else set()
        wanted, self._wanted_restarts = stuck | (self._wanted_restarts & set(cell.ranks)), set()
        if not wanted:
            return self._supervising().verdict(cell)
        self._replace(wanted, replay=True)
        were = "was" if len(wanted) == 1 else "were"
        why = " did not answer, and" if stuck else ""
        return f"interrupted; {ranks_text(wanted)}{why} {were} replaced"

    def _busy(self) -> dict[int, Cell]:
        """The cell that each busy rank runs."""
        for cell in self._cells:
            if cell.done:
                self._ready().groups_lost |= "lost" in cell.groups
                self._ended.append(cell)
        self._cells = [cell for cell in self._cells if not cell.done]
        while len(self._ended) > LISTENED_CELLS:
            self._ready().forget(self._ended.popleft().requests)
        return {rank: cell for cell in self._cells for rank in cell.running}

    def _refuse_if_busy(self, targets: Iterable[int]) -> None:
        busy = self._busy()
        taken = [rank for rank in targets if rank in busy]
        if taken:
            cell = busy[taken[0]]
            advice = "wait for its handle, or type %distributed interrupt"
            if cell.interrupted:
                advice = "it did not answer an interrupt; wait, or type %distributed interrupt again to replace it"
            raise BusyError(
                f"{ranks_text(taken)} still run{'s' if len(taken) == 1 else ''} {cell.title} "
                f"(for {cell.seconds:.0f} s); {advice}"
            )

    def _await(self, cell: Cell, timeout: float | None) -> None:
        supervisor, hangs = self._supervising(), self._hangs
        assert hangs is not None
        self._awaited = cell
        try:
            finished = supervisor.watch(cell, timeout)
            if not finished:
                cell.output.publish()
                hangs.show(cell)
        finally:
            self._awaited = None
            cell.output.publish(final=cell.done)
            if cell.done:
                hangs.close(cell)
        if not finished:
            raise CellTimeoutError(f"the cell ran longer than {timeout:g} s; {self._end(cell)}")
        error = cell.error()
        if error is not None:
            raise error

    def _asked(self, verb: str, rank: int) -> None:
        """A button of a hang card was pressed. On the control thread, while the main thread may run a cell."""
        if verb == "restart":
            self._request_restart(rank)
        elif self._awaited is not None:
            _thread.interrupt_main()
        else:
            threading.Thread(target=self.interrupt, name="nbtrain-interrupt", daemon=True).start()

    def _request_restart(self, rank: int) -> None:
        """Remember that ``rank`` is to be replaced, and interrupt what it runs."""
        self._wanted_restarts.add(rank)
        self._asked("interrupt", rank)

    def _interrupted(self, begun: int, interrupt: KeyboardInterrupt) -> KeyboardInterrupt:
        """End what was sent since cell number ``begun``: an interrupt may fall before the cell is waited for."""
        if isinstance(interrupt, CellInterrupted):
            return interrupt
        verdict = "interrupted before the cell was sent; the ranks kept their state"
        for cell in [cell for cell in self._cells if cell.number > begun]:
            verdict = self._end(cell)
        return CellInterrupted(verdict)

    def _handle(self, cell: Cell) -> Handle:
        members, supervisor = self._ready(), self._supervising()

        def values() -> list[Any]:
            if self._members is not members:
                raise NotStartedError("the ranks that ran this cell have stopped, and what it gave is gone")
            return self._values(cell)

        return Handle(cell, lambda timeout: supervisor.watch(cell, timeout), lambda: self._end(cell), values)

    def _values(self, cell: Cell) -> list[Any]:
        return self._call("take_result", cell.ranks, cell.number)

    def _bind_plan(self, plan: Plan | str) -> None:
        checked = Plan.parse(plan) if isinstance(plan, str) else plan
        checked.require_supported()
        resolved = checked.resolve(self.world_size).to_dict()
        self._call("bind_plan", range(self.world_size), resolved)
        self._plan = resolved

    def _call(self, name: str, ranks: Iterable[int], *args: Any) -> list[Any]:
        targets = list(ranks)
        self._refuse_if_busy(targets)
        with self._supervising().interruptible():
            return self._ready().call(name, targets, *args)

    def _died(self, rank: int, death: Death) -> None:
        for cell in self._cells:
            if rank in cell.running:
                cell.on_death(rank, death)

    def _row(self, info: dict[str, Any], cell: Cell | None) -> dict[str, str]:
        members, rank = self._ready(), info["rank"]
        state = f"dead ({members.dead[rank].how})" if rank in members.dead else "idle"
        if cell is not None:
            state = f"runs {cell.title} for {cell.seconds:.0f} s"
        used = members.memory_bytes(rank)
        return {
            "rank": str(rank),
            "device": info["device"],
            "state": state,
            "memory": "" if used is None else format_bytes(used),
            "pid": str(info["pid"]),
            "host": info["host"],
        }


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
