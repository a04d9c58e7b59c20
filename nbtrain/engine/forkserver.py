"""The fork server: one process that has imported torch once, and forks every engine of a local session.

::

    notebook kernel ──socketpair──> fork server ──fork──> controller          (before torch is imported)
                                               ├─fork──> rendezvous store
                                               └─fork──> rank 0 .. rank n-1

It is started fresh, never forked from the kernel, so that it does not matter what the kernel imported or whether
CUDA runs there. It imports and never computes: a child of a process that ran a threaded kernel hangs or is killed.
It holds no thread. When the kernel's end of the socket closes, however the kernel ended, everything here ends.

The protocol is one JSON object a line: requests ("preload", "fork", "shutdown") one way, events ("ready", "forked",
"exit") the other. `nbtrain.cluster.forkserver` is the kernel's side.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

# What a forked engine would otherwise import by itself, in the order in which it is needed. Names that are missing
# on a platform or in a torch version are skipped: they only cost time.
ENGINE_MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
    "torch.utils.data",
    "nbtrain.engine.app",
    "nbtrain.engine.groups",
    "nbtrain.engine.calls",
    "nbtrain.parallel.parallelize",
    "nbtrain.parallel.trainer",
    "nbtrain.parallel.heal",
    "nbtrain.parallel.loader",
    "nbtrain.telemetry.progress",
    "torch._dynamo",  # the first optimizer imports it: 1.4 s and 40 MB on each of four ranks
    # loaded lazily by ipykernel and IPython, when an engine starts and in its first cell
    "ipykernel.debugger",
    "tqdm.notebook",
    "ipykernel.iostream",
    "ipykernel.displayhook",
    "IPython.core.completer",
    "IPython.core.payloadpage",
    "IPython.core.pylabtools",
    "IPython.core.magics",
)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 2.0  # between SIGTERM and SIGKILL at the end


def main(fd: int, folder: str) -> None:
    """Serve the requests that come over the inherited socket ``fd`` until it closes, then remove ``folder``."""
    Server(socket.socket(fileno=fd), folder).run()


@dataclass
class Server:
    """The one loop. ``children`` maps a live child's pid to its name."""

    link: socket.socket
    folder: str
    children: dict[int, str] = field(default_factory=dict)
    buffer: bytes = b""

    def run(self) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphaned DataLoader workers come to us instead of to init
        wake = self._watch_children()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._shutdown())
        with selectors.DefaultSelector() as selector:
            selector.register(self.link, selectors.EVENT_READ, self._receive)
            selector.register(wake, selectors.EVENT_READ, lambda: self._reap(wake))
            while True:
                for key, _ in selector.select():
                    key.data()

    def _watch_children(self) -> socket.socket:
        """A socket that becomes readable when a child ends."""
        read, write = socket.socketpair()
        read.setblocking(False)
        write.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        self._wake = (read, write)
        return read

    def _receive(self) -> None:
        chunk = self.link.recv(1 << 16)
        if not chunk:  # the kernel has ended
            self._shutdown()
        *lines, self.buffer = (self.buffer + chunk).split(b"\n")
        for line in lines:
            self._handle(json.loads(line))

    def _handle(self, request: dict[str, Any]) -> None:
        operations: dict[str, Callable[..., None]] = {
            "preload": self._preload,
            "fork": self._fork,
            "shutdown": self._shutdown,
        }
        operations[request.pop("op")](**request)

    def _preload(self) -> None:
        started = time.monotonic()
        for name in ENGINE_MODULES:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)
        gc.collect()
        gc.freeze()  # the collector must not write to pages that the children share
        self._send(event="ready", seconds=time.monotonic() - started, fork_safe=_fork_safe())

    def _fork(self, name: str, target: str, args: list[Any], env: dict[str, str], log: str) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._become(target, args, env, log)
        self.children[pid] = name
        self._send(event="forked", name=name, pid=pid)

    def _become(self, target: str, args: list[Any], env: dict[str, str], log: str) -> NoReturn:
        """Turn this fresh fork into the child: its own session, log file, environment and random state."""
        status = 1
        try:
            os.setsid()
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            for end in (self.link, *self._wake):
                end.close()
            _redirect(log)
            os.environ.update(env)
            resolve(target)(*args)
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _reap(self, wake: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while wake.recv(4096):
                pass
        while (ended := _next_ended()) is not None:
            # Its pid is still ours until we wait for it, so its process group is too: workers that it left end here.
            _kill_group(ended)
            _, status = os.waitpid(ended, 0)
            name = self.children.pop(ended, None)
            if name is not None:
                self._send(event="exit", name=name, pid=ended, code=os.waitstatus_to_exitcode(status))

    def _send(self, **event: Any) -> None:
        with contextlib.suppress(OSError):  # the kernel may be gone; the next receive ends us
            self.link.sendall(json.dumps(event).encode() + b"\n")

    def _shutdown(self) -> NoReturn:
        """End every child, politely and then not, and this process."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGCONT)  # a stopped process gets the signal only when it goes on
        deadline = time.monotonic() + GRACE_S
        while self.children and time.monotonic() < deadline:
            self._collect()
            time.sleep(0.005)
        for pid in self.children:
            _kill_group(pid)
        while self.children:
            self._collect()
            time.sleep(0.001)
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)

    def _collect(self) -> None:
        while (ended := _next_ended()) is not None:
            _kill_group(ended)
            os.waitpid(ended, 0)
            self.children.pop(ended, None)


def resolve(target: str) -> Callable[..., Any]:
    """The function that ``"package.module:name"`` names."""
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def run_controller(argv: list[str]) -> None:
    """A child that is ipyparallel's controller."""
    from ipyparallel.controller.app import IPController

    # its own child, which beats the hearts, must not outlive it
    os.register_at_fork(after_in_child=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))
    IPController.launch_instance(argv=argv)


def _fork_safe() -> bool:
    torch = sys.modules.get("torch")
    return torch is None or not torch.cuda.is_initialized()


def _next_ended() -> int | None:
    """The pid of a child that has ended and was not waited for yet."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return ended.si_pid if ended else None


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _redirect(log: str) -> None:
    """Send what C++ code prints to ``log``; Python's own output goes to the notebook."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
