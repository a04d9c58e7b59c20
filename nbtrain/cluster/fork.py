"""Ranks forked from the fork server."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

from nbtrain.cluster.forkserver import ForkServer
from nbtrain.cluster.launch import (
    ENGINE_ARGS,
    ForkUnsafe,
    OnExit,
    Request,
    controller_argv,
    profile_args,
    read_connection_files,
    wait_for,
)


class ForkLaunch:
    """Engines forked from a server that has imported torch. The controller starts while it imports."""

    def __init__(self, request: Request, folder: Path, on_exit: OnExit) -> None:
        self._on_exit = on_exit
        self._folder = folder
        self._ranks: dict[int, Future[int]] = {}
        self._server = ForkServer(
            folder,
            request.common_environment(),
            self._exited,
            self._server_ended,
        )
        try:
            self._server.fork("controller", "nbtrain.engine.forkserver:run_controller", controller_argv(folder))
            self._server.preload()
            self._request = request
            self._info = read_connection_files(folder, self._server.check)
        except BaseException:
            self.stop()
            raise

    def start_engines(self) -> None:
        """Fork the ranks, once the server is ready."""
        if not self._server.ready.result(timeout=120)["fork_safe"]:
            raise ForkUnsafe("importing torch initialised CUDA, so engines cannot be forked; type --launcher spawn")
        port_file = self._folder / "store-port"
        self._server.fork("store", "nbtrain.engine.store:serve", str(port_file))
        self._store_port = int(wait_for(port_file, self._server.check).read_text())
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
        argv = [*profile_args(self._folder), *ENGINE_ARGS, "--IPEngine.max_heartbeat_misses=0"]
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
        elif kind == "controller":
            self._lost("the controller ended, by which ranks are reached")

    def _server_ended(self) -> None:
        self._lost("the fork server ended, and with it all ranks")

    def _lost(self, how: str) -> None:
        """No rank can be reached any more."""
        for rank in self._ranks:
            self._on_exit(rank, how)
