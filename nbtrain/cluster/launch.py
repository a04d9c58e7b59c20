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
import threading
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

from nbtrain.cluster import runtime
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

    def environment(self, rank: int, store_port: int, folder: Path) -> dict[str, str]:
        """torchrun's variables for ``rank`` on this host, and where it leaves its trail."""
        return {
            **self.common_environment(),
            "NBTRAIN_TRAIL": str(folder / f"rank-{rank}.trail"),
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


# rank, and its process's exit code where that is known
OnExit = Callable[[int, int | None], None]


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


def start(launcher: str, request: Request, folder: Path, on_exit: OnExit) -> Launch:
    """Start by ``launcher``: "local" forks where that is safe and spawns elsewhere.

    ``on_exit(rank, code)`` is called when a rank's process ends, from another thread; None is a code that is not known.
    """
    if launcher == "local" and sys.platform == "linux":
        return ForkLaunch(request, folder, on_exit)
    return ClusterLaunch("local" if launcher == "spawn" else launcher, request, folder, on_exit)


class ForkLaunch:
    """Engines forked from a server that has imported torch. The controller starts while it imports."""

    def __init__(self, request: Request, folder: Path, on_exit: OnExit) -> None:
        self._on_exit = on_exit
        self._folder = folder
        self._ranks: dict[int, Future[int]] = {}
        self._server = ForkServer(folder, request.common_environment(), self._exited)
        try:
            self._server.fork("controller", "nbtrain.engine.forkserver:run_controller", _controller_argv(folder))
            self._server.preload()
            self._request = request
            self._info = _read_connection_files(folder, self._server.check)
        except BaseException:
            self.stop()
            raise

    def start_engines(self) -> None:
        """Fork the ranks, once the server is ready."""
        if not self._server.ready.result(timeout=120)["fork_safe"]:
            raise ForkUnsafe("importing torch initialised CUDA, so engines cannot be forked; type --launcher spawn")
        port_file = self._folder / "store-port"
        self._server.fork("store", "nbtrain.engine.store:serve", str(port_file))
        self._store_port = int(_wait_for(port_file, self._server.check).read_text())
        for rank in range(self._request.num_ranks):
            self.replace(rank)

    def require_replaceable(self) -> None:
        """Forked ranks are."""

    def replace(self, rank: int) -> None:
        env = {
            **self._request.environment(rank, self._store_port, self._folder),
            "IPP_CONNECTION_INFO": json.dumps(self._info["engine"]),
            "IPP_PROFILE_DIR": str(self._folder),
        }
        argv = [*_profile_args(self._folder), *ENGINE_ARGS, "--IPEngine.max_heartbeat_misses=0"]
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

    def __init__(self, launcher: str, request: Request, folder: Path, on_exit: OnExit) -> None:
        self._request = request
        self._folder = folder
        self._on_exit = on_exit
        self._local = launcher == "local"
        self._store: subprocess.Popen[bytes] | None = None
        environment = request.common_environment()
        port = self._serve_store(folder, environment)
        config = Config()
        config.EngineLauncher.engine_cmd = [sys.executable, "-m", "nbtrain.engine"]
        config.EngineLauncher.engine_args = [*ENGINE_ARGS]
        config.LocalEngineSetLauncher.delay = 0
        self._cluster = ipp.Cluster(
            n=request.num_ranks,
            engines=_RankLauncher.bind(request, port, folder) if self._local else launcher,
            controller_args=CONTROLLER_ARGS,
            cluster_id=CLUSTER_ID,
            profile_dir=str(folder),
            delay=0,
            log_level=40,
            config=config,
            shutdown_atexit=True,
        )

    def _serve_store(self, folder: Path, environment: dict[str, str]) -> int:
        port_file = folder / "store-port"
        with (folder / "store.log").open("ab") as log:
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
            said = (self._folder / "store.log").read_text(errors="replace")
            raise StartError(f"the rendezvous store ended; its log ends with:\n{said[-2000:]}")

    def start_engines(self) -> None:
        """Start the controller and the engines."""
        self._cluster.start_controller_sync()
        self._register()
        self._cluster.start_engines_sync()
        for rank in self.processes():
            self._report_exit(rank)
        self._register()

    def _register(self) -> None:
        controller = getattr(self._cluster.controller, "process", None)
        runtime.register(self._folder, [*([controller] if controller else []), *self.processes().values()])

    def require_replaceable(self) -> None:
        if not self._local:
            raise StartError(
                "ranks that another launcher has started cannot be replaced one by one; type %distributed restart, "
                "which loses what they hold"
            )

    def replace(self, rank: int) -> None:
        engines = self._engine_set()
        # a fresh name: the late stop of the dead one would remove the new one
        name = f"{rank}-{time.monotonic_ns()}"
        engine = engines.launcher_class(
            work_dir=engines.work_dir,
            parent=engines,
            log=engines.log,
            profile_dir=engines.profile_dir,
            cluster_id=engines.cluster_id,
            environment=engines.environment,
            identifier=name,
            output_file=str(self._folder / f"rank-{name}.log"),
        )
        engine.engine_cmd, engine.engine_args = list(engines.engine_cmd), list(engines.engine_args)
        engines.launchers[name] = engine
        engine.on_stop(engines._notice_engine_stopped)
        engine.start()
        self._report_exit(rank)
        self._register()

    def _report_exit(self, rank: int) -> None:
        """Call back when the process that is ``rank`` now has ended: without a nanny ipyparallel does not say so."""
        process = self.processes()[rank]

        def wait() -> None:
            # ipyparallel waits for it too, and only one of us learns how it ended
            self._on_exit(rank, process.wait())

        threading.Thread(target=wait, name=f"nbtrain-rank-{rank}", daemon=True).start()

    def _engine_set(self) -> Any:
        return next(iter(self._cluster.engines.values()))

    def connection_info(self) -> dict[str, Any]:
        return _read_connection_files(self._folder, self._check_store)["client"]

    def processes(self) -> dict[int, psutil.Process]:
        launchers = getattr(self._engine_set(), "launchers", {}) if self._cluster.engines else {}
        alive = {name: one.process for name, one in launchers.items() if one.process and one.process.is_running()}
        return {rank_of(name): process for name, process in alive.items()} if self._local else {}

    def stop(self) -> None:
        self._cluster.stop_cluster_sync()
        if self._store is not None:
            self._store.communicate()  # closes its standard input, which ends it


class _RankLauncher(LocalEngineSetLauncher):
    """ipyparallel's local launcher, with torchrun's variables for each engine."""

    @classmethod
    def bind(cls, request: Request, port: int, folder: Path) -> type[_RankLauncher]:
        class Engine(LocalEngineLauncher):
            def get_env(self) -> dict[str, str]:
                return {**super().get_env(), **request.environment(rank_of(self.identifier), port, folder)}

        return type("RankEngineSetLauncher", (cls,), {"launcher_class": Engine})


def rank_of(identifier: Any) -> int:
    """The rank of a local launcher's engine: "2", or "2-1" for the first that took its place."""
    return int(str(identifier).partition("-")[0])


def _controller_argv(folder: Path) -> list[str]:
    return [*_profile_args(folder), *CONTROLLER_ARGS]


def _profile_args(folder: Path) -> list[str]:
    return [f"--profile-dir={folder}", f"--cluster-id={CLUSTER_ID}"]


def _read_connection_files(folder: Path, check: Callable[[], None]) -> dict[str, Any]:
    info = {}
    for kind in ("client", "engine"):
        path = _wait_for(folder / "security" / f"ipcontroller-{CLUSTER_ID}-{kind}.json", check)
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
