"""Ranks started by one of ipyparallel's launchers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ipyparallel as ipp
import psutil
from ipyparallel.cluster.launcher import LocalEngineLauncher, LocalEngineSetLauncher
from traitlets.config import Config

from nbtrain.cluster import runtime
from nbtrain.cluster.launch import (
    CLUSTER_ID,
    CONTROLLER_ARGS,
    ENGINE_ARGS,
    OnExit,
    Request,
    read_connection_files,
    wait_for,
)
from nbtrain.errors import StartError


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
        return int(wait_for(port_file, self._check_store).read_text())

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
        return read_connection_files(self._folder, self._check_store)["client"]

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
