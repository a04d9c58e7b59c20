"""The live ranks of a session, and the cells that they run."""

from __future__ import annotations

import _thread
import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from nbtrain.cluster import hang, sinks
from nbtrain.cluster.cell import Cell, Handle
from nbtrain.cluster.failures import Death, ranks_text, restart_command, were
from nbtrain.cluster.hang import Where
from nbtrain.cluster.hangwatch import HangWatch
from nbtrain.cluster.members import Members
from nbtrain.cluster.options import Options
from nbtrain.cluster.output import CellOutput, Publisher
from nbtrain.cluster.ranks import parse
from nbtrain.cluster.replay import Replay
from nbtrain.cluster.report import Healing, Status
from nbtrain.cluster.supervisor import Supervisor
from nbtrain.errors import (
    BusyError,
    CellInterrupted,
    CellTimeoutError,
    NotStartedError,
    RankDiedError,
    SessionError,
    UsageError,
    nearest,
)
from nbtrain.interrupts import uninterrupted
from nbtrain.plan import Plan
from nbtrain.plan.footprint import format_bytes

GUARD_MODES = ("cells", "on", "off")
LISTENED_CELLS = 200  # so many ended cells still show what their threads print


class LiveRanks:
    """Starts ranks as ``options`` say, sends them cells, ends cells, and replaces ranks, until `stop`.

    Attributes:
        members: The ranks' processes and connections.
        cells: Those that some rank still runs.
        num_cells: How many were sent.
        replay: What cells have defined.
    """

    def __init__(self, options: Options) -> None:
        self.cells: list[Cell] = []
        self.num_cells = 0
        self.replay = Replay()
        self.members = Members(options.launcher, options.request(), self._died)
        self._supervisor = Supervisor(self.members)
        self._publisher = Publisher()
        self._hangs = HangWatch(self.members, options.hang_after, self._asked)
        self._ended: deque[Cell] = deque()
        self._awaited: Cell | None = None
        self._wanted_restarts: set[int] = set()  # ranks that a card's button asks to replace
        self._plan: dict[str, Any] | None = None
        self._guard = GUARD_MODES[0]
        self._stopped = False

    def stop(self) -> None:
        """End the ranks; no process, socket or file is left."""
        self._stopped = True
        self._hangs.stop()
        self.members.stop()
        for cell in self.cells:
            for rank in cell.running:
                cell.on_death(rank, Death("the session was stopped"))
        self._publisher.stop()

    def headline(self) -> str:
        """One line: what runs."""
        members = self.members
        first = members.info[0]
        kind = "GPU" if first["device"].startswith("cuda") else "CPU"
        dead = f", {ranks_text(members.dead)} dead" if members.dead else ""
        threads = f"{first['threads']} thread{'s' if first['threads'] > 1 else ''} each"
        ranks = f"{members.world_size} {kind} rank{'s' if members.world_size > 1 else ''}"
        return f"{ranks} ({first['backend']}, {threads}{dead})"

    def status(self) -> Status:
        """What runs where, as a table."""
        busy = self.busy()
        return Status(self.headline(), [self._row(info, busy.get(info["rank"])) for info in self.members.info])

    def where(self) -> Where:
        """Where every rank is now."""
        self.busy()
        return hang.where(self.members, self.headline(), self.cells)

    def guard(self, mode: str) -> None:
        """See `nbtrain.Session.guard`."""
        if mode not in GUARD_MODES:
            raise UsageError(f"guard {mode!r}: {nearest(mode, GUARD_MODES)}")
        self.call("set_guard", range(self.members.world_size), mode)
        self._guard = mode

    def interrupt(self, ranks: Iterable[int]) -> list[int]:
        """Interrupt the cells that run on ``ranks``; the ranks that ran them."""
        wanted = set(ranks)
        cells = [cell for cell in self.cells if wanted & set(cell.running)]
        running = sorted({rank for cell in cells for rank in cell.running})
        for cell in cells:
            self.end(cell)
        return running

    def targets(self, spec: str) -> list[int]:
        """The ranks that ``spec`` names, all of them alive."""
        members = self.members
        targets = parse(spec, members.world_size)
        for rank in targets:
            if rank in members.dead:
                raise RankDiedError(f"{members.dead[rank].told(rank)}; {members.replace_advice()}")
            if rank in members.newcomers:
                again = restart_command(members.newcomers)
                raise SessionError(f"rank {rank} is new and does not yet hold what it should; type {again} once more")
        return targets

    def send(
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
        members = self.members
        assert members.client is not None
        self.num_cells += 1
        output = CellOutput(targets, sinks.current(), members.folder / f"output-of-cell-{self.num_cells}.txt")
        size = members.world_size
        cell = Cell(targets, output, self._publisher, self.num_cells, name, label, world_size=size)
        cell.prompts.open(members.answer, attended=attended)
        about = {"number": cell.number, "label": label, "offset": offset, "keep": keep, "ranks": targets}
        with uninterrupted():  # a cell that only some ranks got would never end
            self.cells.append(cell)
            for rank in targets:
                with contextlib.suppress(ConnectionError):  # it died just now: its death is told below
                    cell.requests.append(members.client.execute(rank, source, cell, about))
        for rank in set(targets) & set(members.dead):
            cell.on_death(rank, members.dead[rank])
        self._hangs.watch(cell)
        return cell

    def wait_for(self, cell: Cell, timeout: float | None) -> None:
        hangs = self._hangs
        self._awaited = cell
        try:
            finished = self._supervisor.watch(cell, timeout)
            if not finished:
                cell.output.publish()
                hangs.show(cell)
        finally:
            self._awaited = None
            cell.output.publish(final=cell.done)
            if cell.done:
                hangs.close(cell)
        if not finished:
            raise CellTimeoutError(f"the cell ran longer than {timeout:g} s; {self.end(cell)}")
        error = cell.error()
        if error is not None:
            raise error

    def end(self, cell: Cell) -> str:
        """Interrupt a cell; what came of it. Ranks that answer neither this nor an earlier interrupt are replaced."""
        again = cell.interrupted
        try:
            if not again:
                self._supervisor.end(cell)
        except KeyboardInterrupt:
            again = True
        if again:
            self._supervisor.end_hard(cell)
        stuck = set(cell.running) if again else set()
        wanted, self._wanted_restarts = stuck | (self._wanted_restarts & set(cell.ranks)), set()
        if not wanted:
            return self._supervisor.verdict(cell)
        self.replace(wanted, replay=True)
        why = " did not answer, and" if stuck else ""
        return f"interrupted; {ranks_text(wanted)}{why} {were(wanted)} replaced"

    def interrupted(self, begun: int, interrupt: KeyboardInterrupt) -> KeyboardInterrupt:
        """End what was sent since cell number ``begun``: an interrupt may fall before the cell is waited for."""
        if isinstance(interrupt, CellInterrupted):
            return interrupt
        verdict = "interrupted before the cell was sent; the ranks kept their state"
        for cell in [cell for cell in self.cells if cell.number > begun]:
            verdict = self.end(cell)
        return CellInterrupted(verdict)

    def handle(self, cell: Cell) -> Handle:
        def values() -> list[Any]:
            if self._stopped:
                raise NotStartedError("the ranks that ran this cell have stopped, and what it gave is gone")
            return self.values(cell)

        return Handle(cell, lambda timeout: self._supervisor.watch(cell, timeout), lambda: self.end(cell), values)

    def values(self, cell: Cell) -> list[Any]:
        return self.call("take_result", cell.ranks, cell.number)

    def call(self, name: str, ranks: Iterable[int], *args: Any) -> list[Any]:
        targets = list(ranks)
        self._refuse_if_busy(targets)
        with self._supervisor.interruptible():
            return self.members.call(name, targets, *args)

    def bind_plan(self, plan: Plan | str) -> None:
        checked = Plan.parse(plan) if isinstance(plan, str) else plan
        checked.require_supported()
        resolved = checked.resolve(self.members.world_size).to_dict()
        self.call("bind_plan", range(self.members.world_size), resolved)
        self._plan = resolved

    def replace(self, ranks: Iterable[int], replay: bool) -> None:
        """New processes for ``ranks``, and for those that have died besides; what they held, as far as it can be."""
        members = self.members
        wanted = sorted({*ranks, *members.dead, *members.newcomers})
        for cell in set(self.busy().values()):
            if not set(cell.running) <= set(wanted):
                self._supervisor.end(cell)
        self._refuse_if_busy(rank for rank in range(members.world_size) if rank not in wanted)
        began = time.monotonic()
        try:
            members.replace(wanted)
            notes: list[str] = []
            reports: list[dict[str, Any]] = []
            if len(wanted) == members.world_size:
                members.renew(lambda rank: notes.extend(self._define(rank, replay)))
            else:
                reports = members.heal(lambda rank: notes.extend(self._define(rank, replay)))
        except KeyboardInterrupt:
            self._supervisor.end_call()
            text = f"{ranks_text(wanted)} {were(wanted)} being replaced; type {restart_command(wanted)} once more"
            raise CellInterrupted(text) from None
        Healing(wanted, time.monotonic() - began, reports, notes, replay).show()

    def _define(self, rank: int, replay: bool) -> list[str]:
        """Tell a newcomer the plan, and with ``replay`` what earlier cells defined; what failed there, a line each."""
        members = self.members
        members.call("set_guard", [rank], self._guard)
        if self._plan is not None:
            members.call("bind_plan", [rank], self._plan)
        cells = self.replay.on(rank) if replay else []
        [failed] = members.call("define", [rank], cells)
        return [f"rank {rank}: {line}" for line in failed]

    def _mend_groups(self) -> None:
        """Form the session's groups again where ranks were cut out of them or a cell has destroyed them."""
        members = self.members
        if self.busy() or members.dead or members.newcomers or not members.groups_lost:
            return
        with self._supervisor.interruptible():
            members.rejoin()

    def busy(self) -> dict[int, Cell]:
        """The cell that each busy rank runs."""
        for cell in self.cells:
            if cell.done:
                self.members.note(cell.groups, cell.exchanges)
                self._ended.append(cell)
        self.cells = [cell for cell in self.cells if not cell.done]
        while len(self._ended) > LISTENED_CELLS:
            self.members.forget(self._ended.popleft().requests)
        return {rank: cell for cell in self.cells for rank in cell.running}

    def _refuse_if_busy(self, targets: Iterable[int]) -> None:
        busy = self.busy()
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

    def _asked(self, verb: str, rank: int) -> None:
        """A button of a hang card was pressed. On the control thread, while the main thread may run a cell."""
        if verb == "restart":
            self._request_restart(rank)
        elif self._awaited is not None:
            _thread.interrupt_main()
        else:
            everyone = range(self.members.world_size)
            threading.Thread(target=self.interrupt, args=[everyone], name="nbtrain-interrupt", daemon=True).start()

    def _request_restart(self, rank: int) -> None:
        """Remember that ``rank`` is to be replaced, and interrupt what it runs."""
        self._wanted_restarts.add(rank)
        self._asked("interrupt", rank)

    def _died(self, rank: int, death: Death) -> None:
        for cell in self.cells:
            if rank in cell.running:
                cell.on_death(rank, death)

    def _row(self, info: dict[str, Any], cell: Cell | None) -> dict[str, str]:
        members, rank = self.members, info["rank"]
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
