"""The live ranks of a session: started together, called by name, signalled by process, and missed when they die."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from pickle import PickleError
from typing import Any

import psutil

from nbtrain.cluster import runtime
from nbtrain.cluster.arrivals import Arrivals
from nbtrain.cluster.client import CallFailed, RankClient
from nbtrain.cluster.failures import Death, as_error, exit_text, replace_advice
from nbtrain.cluster.fork import ForkLaunch
from nbtrain.cluster.launch import ForkUnsafe, Launch, Request
from nbtrain.cluster.memory import OutOfMemory
from nbtrain.cluster.spawn import ClusterLaunch
from nbtrain.cluster.trail import last_line
from nbtrain.errors import RankDiedError, SessionError, StartError, UsageError
from nbtrain.interrupts import uninterrupted

END_TIMEOUT_S = 10.0
PEERS_GRACE_S = 1.0  # what the others of a call get to fail by themselves, once one has failed
FREE_TIMEOUT_S = 0.5
SEED = 0  # rank r's random state starts from SEED + r


class Members:
    """Starts ``request.num_ranks`` ranks and holds what belongs to them: processes, connections, a private folder.

    ``on_death(rank, death)`` is called from another thread when a rank's process ends.

    Attributes:
        dead: How each rank ended that was not replaced.
        groups_lost: Whether process groups must be formed again before the next cell: ranks were cut out of them, a
            cell has destroyed them, or an interrupt may have left trainers a step apart (they agree when it is done).
        newcomers: Ranks that took a dead one's place, and do not yet hold what it held.
    """

    def __init__(self, launcher: str, request: Request, on_death: Callable[[int, Death], None]) -> None:
        self.world_size = request.num_ranks
        self.folder = runtime.create()
        self.dead: dict[int, Death] = {}
        self.processes: dict[int, psutil.Process] = {}
        self.info: list[dict[str, Any]] = []
        self.groups_lost = False
        self._exchanges: dict[int, Mapping[str, int]] = {}
        self.newcomers: tuple[int, ...] = ()
        self._ending: set[int] = set()  # ranks that are being ended, to be replaced
        self._unanswered: dict[int, Future[Any]] = {}  # the last call's
        self._generation = 0
        self._request = request
        self._on_death = on_death
        self._stopping = False
        self._memory = OutOfMemory()
        self._launch: Launch | None = None
        self.client: RankClient | None = None
        try:
            self._open(launcher)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the ranks; no process, socket or file is left."""
        self._stopping = True
        if self.client is not None:
            self.client.close(linger=0)
        if self._launch is not None:
            self._launch.stop()
        runtime.remove(self.folder)

    def call(self, name: str, ranks: Iterable[int], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function of `nbtrain.engine.calls` on each of ``ranks``; its values, in their order.

        Raises:
            RankDiedError: a rank's process ended.
            Exception: what the function raised, if it is one of `nbtrain.errors`; else a CellError.
        """
        return self._call_each(name, {rank: (args, kwargs) for rank in ranks})

    def _call_each(self, name: str, arguments: Mapping[int, tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        """`call` with arguments for each rank."""
        client = self._need_client()
        try:
            with uninterrupted():  # ranks may wait for each other in the call
                answers = {rank: client.call(rank, name, *args, **kw) for rank, (args, kw) in arguments.items()}
        except (TypeError, ValueError, AttributeError, PickleError) as problem:
            raise UsageError(f"{name}: a value cannot be sent to the ranks: {problem}") from problem
        self._unanswered = answers
        for rank in set(answers) & set(self.dead):  # it died while this was sent
            client.abandon(rank, f"{self.dead[rank].told(rank)}; {self.replace_advice()}")
        self._wait_for(answers)
        if dead := sorted(set(answers) & set(self.dead)):  # what others say of it is a consequence
            raise RankDiedError(f"{self.dead[dead[0]].told(dead[0])}; {self.replace_advice()}")
        problems = [answer.exception() for answer in answers.values()]
        failed = [one for one in problems if isinstance(one, CallFailed)]
        if failed:
            first = min(failed, key=lambda one: (one.failure["consequence"], one.failure["time"]))
            raise as_error(first.rank, first.failure)
        try:
            return [answer.result() for answer in answers.values()]
        except ConnectionError as lost:
            raise RankDiedError(str(lost)) from None

    def unanswered(self, timeout: float) -> list[int]:
        """The ranks that have not answered the last call within ``timeout`` seconds."""
        futures.wait(self._unanswered.values(), timeout)
        return [rank for rank, answer in self._unanswered.items() if not answer.done()]

    def _wait_for(self, answers: dict[int, Future[Any]]) -> None:
        """Wait for all; where one has failed, the others may wait for it and are freed."""
        waiting = set(answers.values())
        failed = False
        while waiting:  # in steps that Ctrl-C can end on every platform
            step = PEERS_GRACE_S if failed else 0.5
            done, waiting = futures.wait(waiting, step, return_when=futures.FIRST_EXCEPTION)
            if failed and waiting:
                self.free(rank for rank, answer in answers.items() if answer in waiting)
            failed = failed or any(answer.exception() for answer in done)

    def replace(self, ranks: Collection[int]) -> None:
        """New processes for ``ranks``; those that live are ended first. They form no groups yet: see `heal`.

        Raises:
            StartError: a process did not come, or a launcher cannot replace one.
        """
        assert self._launch is not None
        client, launched = self._need_client(), self._launch
        launched.require_replaceable()
        with uninterrupted(), Arrivals(client) as arrivals:  # a rank is dead, or new: never in between
            self._end(ranks)
            for rank in ranks:
                client.unregister(rank)
            arrivals.wait_until_gone(ranks)
            for rank in ranks:
                launched.replace(rank)
                self.dead.pop(rank)
            self.processes = launched.processes()
            self.newcomers = tuple(sorted({*self.newcomers, *ranks}))
            arrivals.wait_for(ranks, lambda: self._check_started(ranks))
        self.call("prepare", ranks, **self._preparations())

    def heal(self, define: Callable[[int], None]) -> list[dict[str, Any]]:
        """Form the groups with the newcomers, and give them what the dead ranks held; what came of it, by rank.

        ``define(rank)`` replays definitions there, once the rank's groups stand.
        """
        newcomers = self.newcomers
        [recipe] = self.call("recipe", [self._survivors()[0]])
        self.rejoin(recipe)
        for rank in newcomers:
            define(rank)
        [*self.info] = self.call("describe", range(self.world_size))
        reports = self.call("heal", range(self.world_size), newcomers)
        self.newcomers = ()
        return reports

    def replace_advice(self) -> str:
        """What to type now that ranks have died."""
        return replace_advice(self.dead, self.world_size)

    def renew(self, define: Callable[[int], None]) -> None:
        """`heal` where nothing is left: all ranks are new."""
        everyone = range(self.world_size)
        self._generation += 1
        self.info = self.call("join", everyone, generation=f"renew{self._generation}", **self._preparations())
        self.newcomers, self.groups_lost, self._exchanges = (), False, {}
        for rank in everyone:
            define(rank)

    def _survivors(self) -> list[int]:
        survivors = [rank for rank in range(self.world_size) if rank not in (*self.newcomers, *self.dead)]
        if not survivors:
            raise SessionError("no rank is left that holds anything; type %distributed restart to start again")
        return survivors

    def _end(self, ranks: Iterable[int]) -> None:
        """Kill those of ``ranks`` that still live, and wait until they are gone."""
        for rank in ranks:
            if rank not in self.dead:
                self._ending.add(rank)
                self.signal(rank, getattr(signal, "SIGKILL", signal.SIGTERM))
        deadline = time.monotonic() + END_TIMEOUT_S
        while any(rank not in self.dead for rank in ranks):
            if time.monotonic() > deadline:
                raise StartError(f"a process did not end in {END_TIMEOUT_S:.0f} s; type %distributed restart")
            time.sleep(0.005)  # the fork server tells another thread

    def _check_started(self, ranks: Iterable[int]) -> None:
        for rank in set(ranks) & set(self.dead):
            how = self.dead[rank].how
            raise StartError(f"rank {rank} ended at its start ({how}); its log ends with:\n{self._log_tail(rank)}")

    def forget(self, requests: Iterable[str]) -> None:
        """No longer listen to what comes late for these cells."""
        for request in requests:
            self._need_client().forget(request)

    def rejoin(self, recipe: bytes | None = None) -> None:
        """Form the process groups again, under a new generation. Newcomers need the survivors' ``recipe``."""
        self._generation += 1
        common = min(self.call("num_formed", self._survivors()))
        options = {"generation": f"rejoin{self._generation}", "num_groups": common, "newcomers": self.newcomers}
        self._call_each(
            "rejoin",
            {
                rank: ((), {**options, "recipe": recipe if rank in self.newcomers else None})
                for rank in range(self.world_size)
            },
        )
        self.groups_lost, self._exchanges = False, {}

    def note(self, groups: Collection[str], exchanges: Mapping[int, Mapping[str, int]]) -> None:
        """What a cell has left of the groups.

        Args:
            groups: What its ranks say of them.
            exchanges: By rank, which exchange of each group was its last, by the group's name. Ranks of which some have
                begun more, since an exception kept others from it, would wait for each other ever after.
        """
        self._exchanges |= exchanges
        names = {name for own in self._exchanges.values() for name in own}
        apart = any(len({own[name] for own in self._exchanges.values() if name in own}) > 1 for name in names)
        self.groups_lost |= apart or "lost" in groups

    def free(self, ranks: Iterable[int]) -> None:
        """Cut ``ranks`` out of the collectives that they wait in."""
        stuck = list(ranks)
        self.groups_lost |= bool(stuck)
        self.ask_all(stuck, "free", FREE_TIMEOUT_S)

    def ask_all(self, ranks: Iterable[int], name: str, timeout: float, **args: Any) -> dict[int, Any]:
        """`ask` of several ranks at once; None for those that do not answer within ``timeout`` seconds."""
        asked = {}
        for rank in ranks:
            with contextlib.suppress(KeyError, OSError, RuntimeError):  # it ends just now
                if rank not in self.dead:
                    asked[rank] = self._need_client().ask(rank, name, **args)
        futures.wait(asked.values(), timeout)
        return {
            rank: answer.result() if answer.done() and not answer.exception() else None
            for rank, answer in asked.items()
        }

    def ask(self, rank: int, name: str, timeout: float, **args: Any) -> Any:
        """Ask a rank's control thread, which answers while a cell runs; None if it does not within ``timeout`` s."""
        return self.ask_all([rank], name, timeout, **args).get(rank)

    def answer(self, rank: int, **reply: Any) -> None:
        """Answer a rank's prompt, without waiting for the rank. From any thread."""
        with contextlib.suppress(OSError, KeyError):  # its process has ended meanwhile
            self._need_client().ask(rank, "answer", **reply)

    def signal(self, rank: int, number: int) -> None:
        """Signal a rank's process: ours by pid and create time, another host's through ipyparallel."""
        process = self.processes.get(rank)
        if process is None:
            self._need_client().send_signal(number, targets=[rank], block=False)
            return
        try:
            process.send_signal(number)  # psutil compares the create time first
        except psutil.NoSuchProcess:
            return  # its death is reported by itself

    def memory_bytes(self, rank: int) -> int | None:
        """Memory of a local rank's process: its proportional share where the system tells it, else resident."""
        process = self.processes.get(rank)
        if process is None or rank in self.dead:
            return None
        try:
            full = process.memory_full_info()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return None
        return int(getattr(full, "pss", full.rss))

    def _open(self, launcher: str) -> None:
        self._launch = self._launched(launcher)
        self.client = RankClient(self._launch.connection_info())
        self._wait_for_ranks(self.client)
        self.processes = self._launch.processes()
        self.info = self.call(
            "join",
            range(self.world_size),
            generation="start",
            **self._preparations(),
        )

    def _preparations(self) -> dict[str, Any]:
        return {
            "backend": self._request.backend,
            "threads": self._request.threads,
            "seed": SEED,
            "path": sys.path,
        }

    def _start(self, launcher: str) -> Launch:
        """ "local" forks where that is safe and spawns elsewhere."""
        if launcher == "local" and sys.platform == "linux":
            return ForkLaunch(self._request, self.folder, self._exited)
        return ClusterLaunch("local" if launcher == "spawn" else launcher, self._request, self.folder, self._exited)

    def _launched(self, launcher: str) -> Launch:
        """A launch whose engines are starting: forked where that is safe, else spawned."""
        self._launch = self._start(launcher)
        try:
            self._launch.start_engines()
        except ForkUnsafe:
            self._launch.stop()
            self.folder = runtime.create()
            self._launch = self._start("spawn")
            self._launch.start_engines()
        return self._launch

    def _wait_for_ranks(self, client: RankClient) -> None:
        with Arrivals(client) as arrivals:
            everyone = range(self.world_size)
            arrivals.wait_for(everyone, lambda: self._check_started(everyone))

    def _log_tail(self, rank: int) -> str:
        path: Path = self.folder / f"rank-{rank}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-15:]) if path.exists() else ""

    def _need_client(self) -> RankClient:
        if self.client is None:
            raise StartError("the ranks are still starting")
        return self.client

    def _exited(self, rank: int, code: int | str | None) -> None:
        if self._stopping or rank in self.dead:
            return
        death = self._death(rank, code)
        self.dead[rank] = death
        if self.client is not None:
            self.client.abandon(rank, f"{death.told(rank)}; {self.replace_advice()}")
        self._on_death(rank, death)

    def _death(self, rank: int, code: int | str | None) -> Death:
        how = exit_text(code)
        if how == "SIGKILL" and self._memory.ran_out():
            how = "SIGKILL: the memory of this machine or container ran out"
        replaced = rank in self._ending
        self._ending.discard(rank)
        return Death(how, last_line(self.folder / f"rank-{rank}.trail"), replaced)
