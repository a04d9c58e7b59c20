"""Looks after cells that have fallen silent, and shows the hang card when ranks wait for others that do not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from nbtrain.cluster import hang
from nbtrain.cluster.card import Card
from nbtrain.cluster.cell import Cell
from nbtrain.cluster.hang import Look
from nbtrain.cluster.members import Members

HANG_AFTER_S = 10.0
BETWEEN_S = 2.0  # two looks that must show the same wait
ASK_S = 1.0  # for a rank's answer: the card is not in a hurry
SLOWER = 0.1  # an old card is brought up to date less often: after this part of its age,
SLOWEST_S = 60.0  # and at least so often


class _Case:
    """A cell that is watched: the last look at it, when the next is due, and its card with what it said last."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.looks: Sequence[Look] = ()
        self.due = 0.0
        self.card: Card | None = None
        self.hung_since = 0.0
        self.said = ""


class HangWatch:
    """The one thread of a session that looks after its silent cells.

    ``after`` is the number of seconds without output from which a cell is looked at. ``ask(verb, rank)`` is called for
    the card's buttons.
    """

    def __init__(self, members: Members, after: float, ask: Callable[[str, int], None]) -> None:
        self.after = after
        self._members = members
        self._ask = ask
        self._cases: dict[int, _Case] = {}
        self._lock = threading.RLock()
        self._wake = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="nbtrain-hang", daemon=True)
        self._thread.start()

    def watch(self, cell: Cell) -> None:
        """Look after ``cell`` until it ends."""
        with self._wake:
            self._cases[cell.number] = _Case(cell)
            self._wake.notify()

    def show(self, cell: Cell) -> None:
        """Show where its ranks are, hung or not: its time is up."""
        looks = self._look()
        with self._lock:
            case = self._cases.get(cell.number)
            if case is not None:
                self._show(case, looks, f"Not done after {cell.seconds:.0f} s:", over=True)

    def close(self, cell: Cell) -> None:
        """The cell has ended: what its card says is the past."""
        with self._lock:
            case = self._cases.pop(cell.number, None)
            if case is not None:
                self._put_away(case)

    def stop(self) -> None:
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join(timeout=5)

    @property
    def _between(self) -> float:
        return min(BETWEEN_S, self.after / 2)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._cases or self._stopped)
                self._wake.wait_for(lambda: self._stopped, timeout=self._between / 2)
                if self._stopped:
                    return
            for case in list(self._cases.values()):
                self._attend(case)

    def _attend(self, case: _Case) -> None:
        now = time.monotonic()
        if case.cell.done:
            self.close(case.cell)
        elif case.cell.prompting:  # others wait for the person, who knows
            case.cell.heard = now
        elif now - case.cell.heard < self.after - self._between:
            with self._lock:
                self._put_away(case)
        elif now >= case.due:
            self._examine(case, now)

    def _examine(self, case: _Case, now: float) -> None:
        before, case.looks = case.looks, self._look()
        silence = time.monotonic() - case.cell.heard
        with self._lock:
            if case.cell.number not in self._cases:  # it ended meanwhile
                return
            if not hang.stuck(before, case.looks):
                self._put_away(case)
            elif silence >= self.after:
                self._show(case, case.looks, f"No output for {silence:.0f} s, and ranks wait for others")
            age = now - case.hung_since if case.card else 0.0
            case.due = now + max(self._between, min(age * SLOWER, SLOWEST_S))

    def _look(self) -> list[Look]:
        return hang.look(self._members, [case.cell for case in list(self._cases.values())], ASK_S)

    def _show(self, case: _Case, looks: Sequence[Look], headline: str, *, over: bool = False) -> None:
        if case.card is None:
            case.card = Card(case.cell.output.sink, self._ask)
            case.hung_since = case.cell.heard
        where = hang.described(looks, headline, self._members.world_size, advice=not over)
        case.said = " ".join(where.findings) or "No rank waited for another."
        case.card.show(where, hang.absent(looks))

    def _put_away(self, case: _Case) -> None:
        if case.card is None:
            return
        age = time.monotonic() - case.hung_since
        case.card.put_away(f"Silent for {age:.0f} s until it went on or ended. Last seen: {case.said}")
        case.card = None
