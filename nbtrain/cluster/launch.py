"""What starting a controller and engines needs, in either of two ways.

`nbtrain.cluster.fork`: on Linux, local engines forked from the fork server. `nbtrain.cluster.spawn`: the same engines
by any of ipyparallel's launchers, where fork is not safe or the ranks live elsewhere.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from nbtrain.errors import StartError
from nbtrain.events import TRAIL_VARIABLE

LOOPBACK = "127.0.0.1"
CLUSTER_ID = "nbtrain"
# A rank registers when its first heartbeat was answered, so the period is what registration waits for. Deaths are
# reported by the fork server; a rank that computes with the interpreter lock held may miss beats for a minute.
HEARTBEAT_MS = 100
CONTROLLER_ARGS = [
    f"--ip={LOOPBACK}",
    f"--location={LOOPBACK}",
    "--IPController.use_threads=True",  # one process instead of nine
    f"--HeartMonitor.period={HEARTBEAT_MS}",
    "--HeartMonitor.max_heartmonitor_misses=600",
    "--log-level=40",
]
ENGINE_ARGS = ["--IPEngine.enable_nanny=False", "--IPEngine.timeout=30", "--log-level=40"]


@dataclass(frozen=True)
class Request:
    """What to start. ``gpus`` are CUDA_VISIBLE_DEVICES names, one a rank, or empty for CPU ranks."""

    num_ranks: int
    gpus: tuple[str, ...]
    threads: int
    backend: str

    def environment(self, rank: int, store_port: int, folder: Path) -> dict[str, str]:
        """torchrun's variables for ``rank`` on this host, and where it leaves its trail."""
        return {
            **self.common_environment(),
            TRAIL_VARIABLE: str(folder / f"rank-{rank}.trail"),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(store_port),
            # The store at MASTER_PORT is the session's: rank 0 connects to it instead of serving another.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def common_environment(self) -> dict[str, str]:
        """What must be set before a process imports torch."""
        return {
            "OMP_NUM_THREADS": str(self.threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # ranks share cores: a spinning rank steals a computing one's time
            **_on_loopback(),
            # The flight recorder tells which collective a rank waits in; 2,000 entries take 0.2 s to read.
            "TORCH_FR_BUFFER_SIZE": "256",
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus),
        }


# rank, and how its process ended: an exit code, words, or None where that is not known
OnExit = Callable[[int, int | str | None], None]


class ForkUnsafe(StartError):
    """The fork server cannot fork engines; they can be spawned."""


class Launch(Protocol):
    """A running controller with its ranks."""

    def start_engines(self) -> None: ...

    def connection_info(self) -> dict[str, Any]: ...

    def require_replaceable(self) -> None:
        """Raises StartError where ranks cannot be replaced one by one."""

    def replace(self, rank: int) -> None:
        """Start a process in the place of one that has ended."""

    def processes(self) -> dict[int, psutil.Process]: ...

    def stop(self) -> None: ...


def controller_argv(folder: Path) -> list[str]:
    """The controller's command line."""
    return [*profile_args(folder), *CONTROLLER_ARGS]


def profile_args(folder: Path) -> list[str]:
    """Where controller and engines find each other's files."""
    return [f"--profile-dir={folder}", f"--cluster-id={CLUSTER_ID}"]


def read_connection_files(folder: Path, check: Callable[[], None]) -> dict[str, Any]:
    """What the controller has written: how to connect, for a "client" and for an "engine"."""
    info = {}
    for kind in ("client", "engine"):
        path = wait_for(folder / "security" / f"ipcontroller-{CLUSTER_ID}-{kind}.json", check)
        info[kind] = _load_when_complete(path)
    return info


def _load_when_complete(path: Path) -> Any:
    """The controller writes in place: a file may be seen half written."""
    for _ in range(200):
        try:
            return json.loads(path.read_text())
        except json.JSONDecodeError:
            time.sleep(0.005)
    raise StartError(f"{path} is not complete after a second")


def wait_for(path: Path, check: Callable[[], None], timeout: float = 60.0) -> Path:
    """Wait until another process has written ``path``; ``check`` raises if that process has ended."""
    deadline = time.monotonic() + timeout
    while not path.exists():
        check()
        if time.monotonic() > deadline:
            raise StartError(f"{path.name} did not come in {timeout:.0f} s; see the logs in {path.parent}")
        time.sleep(0.005)  # files cannot be awaited portably
    return path


def _on_loopback() -> dict[str, str]:
    """What makes gloo and TensorPipe listen on loopback only, where its interface has a name."""
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    found = next((name for name in ("lo", "lo0") if name in names), None)
    return {} if found is None else {"GLOO_SOCKET_IFNAME": found, "TP_SOCKET_IFNAME": found}
