"""The kernel's side of the fork server: start it, ask it for children, hear of their ends."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import nbtrain
from nbtrain.errors import StartError

MODULE = "nbtrain.engine.forkserver"


class ForkServer:
    """A fresh process that forks engines. It ends, with its children, when this process does."""

    def __init__(
        self,
        runtime: Path,
        env: dict[str, str],
        on_exit: Callable[[str, int, int], None],
        on_end: Callable[[], None],
    ) -> None:
        self.log = runtime / "forkserver.log"
        self.runtime = runtime
        self.ready: Future[dict[str, Any]] = Future()
        self._on_exit = on_exit
        self._on_end = on_end
        self._stopping = False
        self._forked: dict[str, Future[int]] = {}
        self._link, theirs = socket.socketpair()
        with theirs, self.log.open("ab") as log:
            # -P: a file of the user's that is called random.py must not be what the server imports
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), str(runtime)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **env, "PYTHONPATH": _python_path()},
                start_new_session=True,  # Jupyter interrupts the kernel's whole process group
            )
        self._listener = threading.Thread(target=self._listen, name="nbtrain-forkserver", daemon=True)
        self._listener.start()

    def preload(self) -> None:
        """Import what engines need; ``ready`` resolves when that is done."""
        self._send(op="preload")

    def fork(self, name: str, target: str, *args: Any, env: dict[str, str] | None = None) -> Future[int]:
        """Fork a child that calls ``target`` ("module:function"); the future gives its pid."""
        pid: Future[int] = Future()
        self._forked[name] = pid
        self._send(op="fork", name=name, target=target, args=args, env=env or {}, log=str(self.runtime / f"{name}.log"))
        return pid

    def stop(self, timeout: float = 10.0) -> None:
        """End the server and all its children, and wait until they are gone."""
        self._stopping = True
        if self.process.poll() is None:
            with contextlib.suppress(StartError):  # it has ended by itself
                self._send(op="shutdown")
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._listener.join(timeout=2)
        self._link.close()

    def _epitaph(self) -> str:
        said = self.log.read_text(errors="replace").splitlines()[-15:] if self.log.exists() else []
        return "\n".join(["the fork server ended; its log ends with:", *said])

    def check(self) -> None:
        """Raises StartError, with the end of its log, if the server has ended."""
        if self.process.poll() is not None:
            raise StartError(self._epitaph())

    def _send(self, **request: Any) -> None:
        try:
            self._link.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            self.process.wait(timeout=5)
            raise StartError(self._epitaph()) from None

    def _listen(self) -> None:
        with self._link.makefile("rb") as events, contextlib.suppress(ConnectionResetError):
            for line in events:
                event = json.loads(line)
                self._heard(event.pop("event"), event)
        gone = StartError(self._epitaph())
        waiting: list[Future[Any]] = [self.ready, *self._forked.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(gone)
        if not self._stopping:
            self._on_end()

    def _heard(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "ready":
            self.ready.set_result(event)
        elif kind == "forked":
            self._forked[event["name"]].set_result(event["pid"])
        elif kind == "exit":
            self._on_exit(event["name"], event["pid"], event["code"])


def _python_path() -> str:
    """The child finds this very nbtrain, installed or not."""
    own = str(Path(nbtrain.__file__).parents[1])
    rest = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([own, rest] if rest else [own])
