"""Starting a controller and engines, in one of two ways.

`ForkLaunch`: on Linux, local engines forked from the fork server. `ClusterLaunch`: the same engines by any of
ipyparallel's launchers, where fork is not safe or the ranks live elsewhere.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ipyparallel as ipp
import psutil
from ipyparallel.cluster.launcher import LocalEngineLauncher, LocalEngineSetLauncher
from traitlets.config import Config

from nbtrain.cluster.forkserver import ForkServer
from nbtrain.errors import StartError

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

    def environment(self, rank: int, store_port: int) -> dict[str, str]:
        """torchrun's variables for ``rank`` on this host."""
        return {
            **self.common_environment(),
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


class ForkUnsafe(StartError):
    """The fork server cannot fork engines; they can be spawned."""


class Launch(Protocol):
    """A running controller with its ranks."""

    def start_engines(self) -> None: ...

    def connection_info(self) -> dict[str, Any]: ...

    def processes(self) -> dict[int, psutil.Process]: ...

    def stop(self) -> None: ...


def start(launcher: str, request: Request, runtime: Path, on_exit: Callable[[int, int], None]) -> Launch:
    """Start by ``launcher``: "local" forks where that is safe and spawns elsewhere.

    ``on_exit(rank, code)`` is called when a rank's process ends, from another thread.
    """
    if launcher == "local" and sys.platform == "linux":
        return ForkLaunch(request, runtime, on_exit)
    return ClusterLaunch("local" if launcher == "spawn" else launcher, request, runtime)


class ForkLaunch:
    """Engines forked from a server that has imported torch. The controller starts while it imports."""

    def __init__(self, request: Request, runtime: Path, on_exit: Callable[[int, int], None]) -> None:
        self._on_exit = on_exit
        self._runtime = runtime
        self._ranks: dict[int, Future[int]] = {}
        self._server = ForkServer(runtime, request.common_environment(), self._exited)
        try:
            self._server.fork("controller", "nbtrain.engine.forkserver:run_controller", _controller_argv(runtime))
            self._server.preload()
            self._request = request
            self._info = _read_connection_files(runtime, self._server.check)
        except BaseException:
            self.stop()
            raise

    def start_engines(self) -> None:
        """Fork the ranks, once the server is ready."""
        if not self._server.ready.result(timeout=120)["fork_safe"]:
            raise ForkUnsafe("importing torch initialised CUDA, so engines cannot be forked; type --launcher spawn")
        port_file = self._runtime / "store-port"
        self._server.fork("store", "nbtrain.engine.store:serve", str(port_file))
        port = int(_wait_for(port_file, self._server.check).read_text())
        for rank in range(self._request.num_ranks):
            env = {
                **self._request.environment(rank, port),
                "IPP_CONNECTION_INFO": json.dumps(self._info["engine"]),
                "IPP_PROFILE_DIR": str(self._runtime),
            }
            argv = [*_profile_args(self._runtime), *ENGINE_ARGS, "--IPEngine.max_heartbeat_misses=0"]
            self._ranks[rank] = self._server.fork(f"rank-{rank}", "nbtrain.engine.app:run", argv, env=env)

    def connection_info(self) -> dict[str, Any]:
        return self._info["client"]

    def processes(self) -> dict[int, psutil.Process]:
        found = {}
        for rank, pid in self._ranks.items():
            try:
                found[rank] = psutil.Process(pid.result(timeout=10))
            except psutil.NoSuchProcess:
                continue
        return found

    def stop(self) -> None:
        self._server.stop()

    def _exited(self, name: str, pid: int, code: int) -> None:
        kind, _, number = name.partition("-")
        if kind == "rank":
            self._on_exit(int(number), code)


class ClusterLaunch:
    """Engines by one of ipyparallel's launchers."""

    def __init__(self, launcher: str, request: Request, runtime: Path) -> None:
        self._request = request
        self._runtime = runtime
        self._store: subprocess.Popen[bytes] | None = None
        environment = request.common_environment()
        port = self._serve_store(runtime, environment)
        config = Config()
        config.EngineLauncher.engine_cmd = [sys.executable, "-m", "nbtrain.engine"]
        config.EngineLauncher.engine_args = [*ENGINE_ARGS]
        config.LocalEngineSetLauncher.delay = 0
        self._cluster = ipp.Cluster(
            n=request.num_ranks,
            engines=_RankLauncher.bind(request, port) if launcher == "local" else launcher,
            controller_args=CONTROLLER_ARGS,
            cluster_id=CLUSTER_ID,
            profile_dir=str(runtime),
            delay=0,
            log_level=40,
            config=config,
            shutdown_atexit=True,
        )

    def _serve_store(self, runtime: Path, environment: dict[str, str]) -> int:
        port_file = runtime / "store-port"
        with (runtime / "store.log").open("ab") as log:
            self._store = subprocess.Popen(
                [sys.executable, "-m", "nbtrain.engine.store", str(port_file)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        return int(_wait_for(port_file, self._check_store).read_text())

    def _check_store(self) -> None:
        if self._store is not None and self._store.poll() is not None:
            said = (self._runtime / "store.log").read_text(errors="replace")
            raise StartError(f"the rendezvous store ended; its log ends with:\n{said[-2000:]}")

    def start_engines(self) -> None:
        """Start the controller and the engines."""
        self._cluster.start_cluster_sync()

    def connection_info(self) -> dict[str, Any]:
        return _read_connection_files(self._runtime, self._check_store)["client"]

    def processes(self) -> dict[int, psutil.Process]:
        engines = next(iter(self._cluster.engines.values()))
        launchers = getattr(engines, "launchers", {})
        return {int(i): one.process for i, one in launchers.items() if one.process.is_running()}

    def stop(self) -> None:
        self._cluster.stop_cluster_sync()
        if self._store is not None:
            self._store.communicate()  # closes its standard input, which ends it


class _RankLauncher(LocalEngineSetLauncher):
    """ipyparallel's local launcher, with torchrun's variables for each engine."""

    @classmethod
    def bind(cls, request: Request, port: int) -> type[_RankLauncher]:
        class Engine(LocalEngineLauncher):
            def get_env(self) -> dict[str, str]:
                return {**super().get_env(), **request.environment(int(self.identifier), port)}

        return type("RankEngineSetLauncher", (cls,), {"launcher_class": Engine})


def _controller_argv(runtime: Path) -> list[str]:
    return [*_profile_args(runtime), *CONTROLLER_ARGS]


def _profile_args(runtime: Path) -> list[str]:
    return [f"--profile-dir={runtime}", f"--cluster-id={CLUSTER_ID}"]


def _read_connection_files(runtime: Path, check: Callable[[], None]) -> dict[str, Any]:
    info = {}
    for kind in ("client", "engine"):
        path = _wait_for(runtime / "security" / f"ipcontroller-{CLUSTER_ID}-{kind}.json", check)
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


def _wait_for(path: Path, check: Callable[[], None], timeout: float = 60.0) -> Path:
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
