"""Cells end: those that a failed rank's peers wait in, those that are interrupted, and those whose time is up."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterable, Iterator

from nbtrain.cluster.cell import Cell
from nbtrain.cluster.failures import ranks_text
from nbtrain.cluster.members import Members
from nbtrain.errors import CellInterrupted

WATCH_S = 0.25  # between two looks at the ranks that still run a cell
WAITS_S = 1.0  # in a collective, while another rank of the cell has failed
DEAD_S = 0.1  # while another has died
PYTHON_GRACE_S = 0.3  # Python code answers SIGINT in well under this
# A rank that was stopped (SIGSTOP, a debugger) hears nothing before it goes on.
_INTERRUPT = [signal.SIGINT, *([signal.SIGCONT] if hasattr(signal, "SIGCONT") else [])]
SECOND_GRACE_S = 0.5  # what a rank gets after a second interrupt, and to say where it is
INTERRUPT_GRACE_S = 3.0  # and a rank that was cut out of a collective well under this


class Supervisor:
    """Watches the cells of ``members``."""

    def __init__(self, members: Members) -> None:
        self.members = members

    def watch(self, cell: Cell, timeout: float | None) -> bool:
        """Wait for ``cell``; whether it has finished. A rank that waits for one that failed is freed meanwhile.

        What ranks ask is put to the person, and the time that this takes does not count.
        """
        with cell.prompts.attended():
            return self._watch(cell, timeout)

    def _watch(self, cell: Cell, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return cell.done
            if cell.await_news(WATCH_S if left is None else min(left, WATCH_S)):
                return True
            asked_s = cell.put_prompts()
            deadline = None if deadline is None else deadline + asked_s
            if cell.failures or cell.deaths:
                # one that died joins nothing any more; one that failed may be waited for on purpose
                self.members.free(self._waiting(cell.running, DEAD_S if cell.deaths else WAITS_S))

    def end(self, cell: Cell, grace_s: float = INTERRUPT_GRACE_S) -> None:
        """Interrupt what still runs the cell, and free what waits in C++, where no interrupt arrives.

        Returns when all ranks have ended it, at the latest after ``grace_s`` seconds.
        """
        self.members.groups_lost = cell.interrupted = True
        self._interrupt(cell.running)
        deadline = time.monotonic() + grace_s
        while not cell.wait(PYTHON_GRACE_S) and time.monotonic() < deadline:
            self.members.free(cell.running)
            self._interrupt(cell.running)  # again: the first may have fallen where Python drops exceptions
        cell.output.publish(final=cell.done)

    def end_hard(self, cell: Cell) -> None:
        """`end` for ranks that are replaced next: brief with those that are deaf, patient with those on their way."""
        deadline = time.monotonic() + INTERRUPT_GRACE_S
        while not cell.done and time.monotonic() < deadline:
            self.end(cell, SECOND_GRACE_S)
            running = cell.running
            answers = self.members.ask_all(running, "where", SECOND_GRACE_S)
            if all(answers.get(rank) is None for rank in running):
                return

    def verdict(self, cell: Cell) -> str:
        """What became of a cell that was ended, in a sentence."""
        stuck = cell.running
        if not stuck:
            return f"interrupted on {ranks_text(cell.ranks)}; they kept their state"
        places: dict[str, list[int]] = {}
        for rank in stuck:
            places.setdefault(self._place(rank), []).append(rank)
        where = "; ".join(f"{ranks_text(ranks)}{place}" for place, ranks in places.items())
        return (
            f"{where} did not answer within {INTERRUPT_GRACE_S:g} s; wait, or type %distributed interrupt again, which "
            f"replaces {'it' if len(stuck) == 1 else 'them'}: what {'it holds' if len(stuck) == 1 else 'they hold'} is "
            "lost, and what the other ranks hold is kept"
        )

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let Ctrl-C end a call of `Members.call`; ranks may wait for each other in it, or not have begun it."""
        try:
            yield
        except KeyboardInterrupt:
            self.end_call()
            raise CellInterrupted("interrupted before the cell was sent; the ranks kept their state") from None

    def end_call(self) -> None:
        """Interrupt the last call until every rank has answered it: a rank that begins it later would wait alone."""
        deadline = time.monotonic() + INTERRUPT_GRACE_S
        left = self.members.unanswered(0.0)
        while left and time.monotonic() < deadline:
            self._interrupt(left)
            self.members.free(left)
            left = self.members.unanswered(PYTHON_GRACE_S)

    def _waiting(self, ranks: Iterable[int], seconds: float) -> list[int]:
        """Those that have waited in a collective for longer than ``seconds``."""
        pending = self.members.ask_all(ranks, "pending", 1.0)
        return [rank for rank, entries in pending.items() if entries and entries[0]["waits_s"] > seconds]

    def _interrupt(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            for number in _INTERRUPT:
                self.members.signal(rank, number)

    def _place(self, rank: int) -> str:
        """Where a rank is, for a sentence; empty if it does not say."""
        answer = self.members.ask(rank, "where", 1.0)
        at = answer and answer["cell"]
        return f" at {at['cell'] or 'the cell'}, line {at['number']} ({at['line'].strip()})" if at else ""
