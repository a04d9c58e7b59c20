"""The live ranks of a session: started together, called by name, signalled by process, and missed when they die."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from pickle import PickleError
from typing import Any

import psutil

from nbtrain.cluster import launch, runtime
from nbtrain.cluster.client import CallFailed, RankClient
from nbtrain.cluster.failures import as_error, death
from nbtrain.errors import RankDiedError, StartError, UsageError
from nbtrain.interrupts import uninterrupted

START_TIMEOUT_S = 120.0
SEED = 0  # rank r's random state starts from SEED + r


class Members:
    """Starts ``request.num_ranks`` ranks and holds what belongs to them: processes, connections, a private folder.

    ``on_death(rank, how)`` is called from another thread when a rank's process ends.
    """

    def __init__(self, launcher: str, request: launch.Request, on_death: Callable[[int, str], None]) -> None:
        self.world_size = request.num_ranks
        self.folder = runtime.create()
        self.dead: dict[int, str] = {}
        self.processes: dict[int, psutil.Process] = {}
        self.info: list[dict[str, Any]] = []
        self._generation = 0
        self._request = request
        self._on_death = on_death
        self._stopping = False
        self._launch: launch.Launch | None = None
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
        targets = list(ranks)
        client = self._need_client()
        try:
            with uninterrupted():  # ranks may wait for each other in the call
                answers = [client.call(rank, name, *args, **kwargs) for rank in targets]
        except (TypeError, ValueError, AttributeError, PickleError) as problem:
            raise UsageError(f"{name}: a value cannot be sent to the ranks: {problem}") from problem
        try:
            return [_result(answer) for answer in answers]
        except CallFailed as failed:
            raise as_error(failed.rank, failed.failure) from None
        except ConnectionError as lost:
            raise RankDiedError(str(lost)) from None

    def forget(self, requests: Iterable[str]) -> None:
        """No longer listen to what comes late for these cells."""
        for request in requests:
            self._need_client().forget(request)

    def rejoin(self) -> None:
        """Form the process groups again, under a new generation."""
        self._generation += 1
        everyone = range(self.world_size)
        common = min(self.call("num_formed", everyone))
        self.call("rejoin", everyone, f"rejoin{self._generation}", common)

    def ask(self, rank: int, name: str, timeout: float, **args: Any) -> Any:
        """Ask a rank's control thread, which answers while a cell runs; None if it does not within ``timeout`` s."""
        if rank in self.dead:
            return None
        try:
            return self._need_client().ask(rank, name, **args).result(timeout)
        except (TimeoutError, OSError, RuntimeError):
            return None

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
            backend=self._request.backend,
            threads=self._request.threads,
            seed=SEED,
            generation="start",
            path=sys.path,
        )

    def _launched(self, launcher: str) -> launch.Launch:
        """A launch whose engines are starting: forked where that is safe, else spawned."""
        self._launch = launch.start(launcher, self._request, self.folder, self._exited)
        try:
            self._launch.start_engines()
        except launch.ForkUnsafe:
            self._launch.stop()
            self.folder = runtime.create()
            self._launch = launch.start("spawn", self._request, self.folder, self._exited)
            self._launch.start_engines()
        return self._launch

    def _wait_for_ranks(self, client: RankClient) -> None:
        arrived = threading.Event()

        def check(_: Any = None) -> None:
            if len(client.ids) >= self.world_size:
                arrived.set()

        client.on_membership(check)
        check()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not arrived.wait(0.05):
            if self.dead:
                rank, how = next(iter(self.dead.items()))
                raise StartError(f"rank {rank} ended at its start ({how}); its log ends with:\n{self._log_tail(rank)}")
            if time.monotonic() > deadline:
                raise StartError(f"{len(client.ids)} of {self.world_size} ranks came in {START_TIMEOUT_S:.0f} s")

    def _log_tail(self, rank: int) -> str:
        path: Path = self.folder / f"rank-{rank}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-15:]) if path.exists() else ""

    def _need_client(self) -> RankClient:
        if self.client is None:
            raise StartError("the ranks are still starting")
        return self.client

    def _exited(self, rank: int, code: int) -> None:
        if self._stopping:
            return
        self.dead[rank] = death(code)
        if self.client is not None:
            self.client.abandon(rank, f"rank {rank} died ({death(code)}); type %distributed restart to start again")
        self._on_death(rank, death(code))


def _result(answer: Future[Any]) -> Any:
    """Wait for an answer in steps that Ctrl-C can end on every platform."""
    while True:
        try:
            return answer.result(0.5)
        except TimeoutError:
            if answer.done():
                raise
