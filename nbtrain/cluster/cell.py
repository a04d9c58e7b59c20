"""One cell on some ranks: who still runs it, what each rank answered, and a handle for one that does not block."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from nbtrain.cluster.failures import Death, Failure, group, ranks_text, render, replace_advice, summary
from nbtrain.cluster.output import CellOutput, Publisher
from nbtrain.cluster.prompts import Prompts
from nbtrain.errors import CellError, RankDiedError

FOLLOW_S = 1.0  # between two states of a handle that is shown
POLL_S = 0.5  # Windows cannot interrupt a wait without a timeout


class Cell:
    """The state of one cell. The client's IO thread feeds it, the notebook's thread waits for it."""

    def __init__(
        self,
        ranks: Sequence[int],
        output: CellOutput,
        publisher: Publisher,
        number: int,
        name: str = "",
        label: str = "",
        *,
        world_size: int,
    ) -> None:
        self._world_size = world_size
        self.ranks = list(ranks)
        self.output = output
        self.number = number
        self.name = name
        self.title = repr(name) if name else label or "another cell"
        self.interrupted = False
        self.prompts = Prompts()
        self.requests: list[str] = []
        self.started = time.monotonic()
        self.heard = self.started  # when a rank last printed something or finished
        self.ended: float | None = None
        self.failures: dict[int, Failure] = {}
        self.deaths: dict[int, Death] = {}
        self.groups: set[str] = set()  # what the ranks say of their process groups at the cell's end
        self.exchanges: dict[int, dict[str, int]] = {}  # by rank, which was its last in each group
        self._replied: set[int] = set()
        self._idle: set[int] = set()
        self._publisher = publisher
        self._lock = threading.Lock()
        self._done = threading.Event()

    @property
    def running(self) -> list[int]:
        """The ranks that have not finished."""
        with self._lock:
            return [r for r in self.ranks if not (r in self.deaths or (r in self._replied and r in self._idle))]

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.started

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every rank has finished; False after ``timeout`` seconds. Ctrl-C ends the wait."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._done.is_set():
            left = POLL_S if deadline is None else min(POLL_S, deadline - time.monotonic())
            if left <= 0:
                return False
            self._done.wait(left)
        return True

    def await_news(self, timeout: float) -> bool:
        """Wait until every rank has finished, or one asks a person, or ``timeout`` seconds; whether it has finished."""
        self.prompts.news.wait(timeout)
        self.prompts.news.clear()
        return self.done

    @property
    def prompting(self) -> list[int]:
        """The ranks that wait for a person: at an ``input()``, or in a debugger."""
        return self.prompts.ranks

    def put_prompts(self) -> float:
        """Put what ranks ask to the person, below what was printed so far; gives the seconds that it took."""
        if not self.prompting:
            return 0.0
        return self.prompts.put(lambda: self.output.publish(final=True), num_ranks=len(self.running))

    def error(self) -> Exception | None:
        """What the notebook raises: the first death, else the errors of the ranks, else nothing."""
        if self.deaths:
            return self._death()
        if not self.failures:
            return None
        groups = group(self.failures)
        was_quit = groups[0].first["chain"][-1]["ename"] == "BdbQuit"  # on purpose: what it did to others is no news
        return CellError(summary(groups), groups, [summary(groups)] if was_quit else render(groups))

    def on_output(self, rank: int, kind: str, content: dict[str, Any]) -> None:
        self.heard = time.monotonic()
        if kind == "nbtrain_prompt":
            self.prompts.on_message(rank, content)
            return
        self.output.feed(rank, kind, content)
        self._publisher.touch(self.output)

    def on_reply(self, rank: int, content: dict[str, Any]) -> None:
        self.heard = time.monotonic()
        if content["status"] != "ok":
            self.failures[rank] = content.get("nbtrain", {}).get("failure") or _bare(content)
        told = content.get("nbtrain", {})
        self.groups.add(told.get("groups", "kept"))
        self.exchanges[rank] = told.get("exchanges", {})
        self._advance(self._replied, rank)

    def on_idle(self, rank: int) -> None:
        self._advance(self._idle, rank)

    def on_death(self, rank: int, death: Death) -> None:
        with self._lock:
            if rank in self._replied and rank in self._idle:
                return  # it had finished this cell
            self.deaths[rank] = death
        self._finish(rank)

    def _advance(self, stage: set[int], rank: int) -> None:
        with self._lock:
            stage.add(rank)
            finished = rank in self._replied and rank in self._idle
        if finished:
            self._finish(rank)

    def _finish(self, rank: int) -> None:
        self.output.finish(rank)
        self.prompts.drop(rank)
        self._publisher.touch(self.output)
        if self.running:
            return
        with self._lock:
            if self._done.is_set():
                return
            self.ended = time.monotonic()
            self._done.set()
        self.prompts.news.set()

    def _death(self) -> RankDiedError:
        how = "; ".join(death.told(rank) for rank, death in sorted(self.deaths.items()))
        others = [rank for rank in self.ranks if rank not in self.deaths]
        own = "its" if len(others) == 1 else "their"
        kept = f" {ranks_text(others).capitalize()} kept {own} state." if others else ""
        advice = replace_advice(self.deaths, self._world_size)
        if all(death.replaced for death in self.deaths.values()):
            advice = "run the cell again"
        return RankDiedError(f"{how} while it ran this cell.{kept} {advice[0].upper()}{advice[1:]}")


class Handle:
    """A cell that runs while the notebook goes on: ``%%distributed --no-block``.

    Await it, `wait` for it, ask for its `result`, or `interrupt` it.
    """

    def __init__(
        self,
        cell: Cell,
        watch: Callable[[float | None], bool],
        interrupt: Callable[[], str],
        values: Callable[[], list[Any]],
    ) -> None:
        self._cell = cell
        self._watch = watch
        self._interrupt = interrupt
        self._values = values
        self._result: list[Any] | None = None

    @property
    def done(self) -> bool:
        """Whether every rank has finished."""
        return self._cell.done

    @property
    def progress(self) -> str:
        """The state of the progress bar that the cell shows, from the slowest rank; empty without one."""
        return self._cell.output.last_bar.strip()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds; whether the cell has finished. Raises its error."""
        finished = self._watch(timeout)
        if finished:
            self._cell.output.publish(final=True)
            self._raise()
        return finished

    join = wait

    def result(self, timeout: float | None = None) -> list[Any]:
        """The last expression's values by rank, as ``-o`` gives them.

        Raises:
            TimeoutError: the cell still runs after ``timeout`` seconds.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"{self!r} still runs; type .interrupt() to end it")
        if self._result is None:
            self._result = self._values()
        return self._result

    def interrupt(self) -> str:
        """Interrupt the ranks that still run the cell; what came of it."""
        return self._interrupt()

    def follow(self, show: Callable[[], None]) -> None:
        """Call ``show`` each second while the cell runs and once when it has ended, from another thread."""

        def watch() -> None:
            while not self._watch(FOLLOW_S):
                show()
            self._cell.output.publish(final=True)
            show()

        threading.Thread(target=watch, name="nbtrain-handle", daemon=True).start()

    def __await__(self) -> Generator[Any, None, list[Any]]:
        import asyncio

        return asyncio.get_running_loop().run_in_executor(None, self.result).__await__()

    def _raise(self) -> None:
        error = self._cell.error()
        if error is not None:
            raise error

    def __repr__(self) -> str:
        name = f" {self._cell.name!r}" if self._cell.name else ""
        return f"<cell{name} on {ranks_text(self._cell.ranks)}: {self._state()}>"

    def _state(self) -> str:
        spent = f"{self._cell.seconds:.1f} s"
        if not self.done:
            bar = f", {self.progress}" if self.progress else ""
            return f"{ranks_text(self._cell.running)} running for {spent}{bar}"
        if self._cell.interrupted:
            return f"interrupted after {spent}"
        return f"failed after {spent}" if self._cell.error() else f"done in {spent}"


def _bare(content: dict[str, Any]) -> Failure:
    """A failure from a reply without our description: the request never reached the cell."""
    link = {"ename": content.get("ename", "Aborted"), "evalue": content.get("evalue", content["status"]), "frames": []}
    return {"time": time.time(), "consequence": False, "chain": [link]}
