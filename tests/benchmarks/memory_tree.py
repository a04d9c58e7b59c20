"""The memory of everything that a notebook user's machine runs: JupyterLab's server, a kernel, and four ranks after
FSDP2 steps. It is what has to fit in a Binder.

``python tests/benchmarks/memory_tree.py`` prints it by role.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from contenders import NUM_RANKS, AttachedNotebook
from measure import Row, pss_bytes

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MIB = 2**20
TRAIN = """
import torch
torch.manual_seed(0)
trainer = nt.Trainer(GPT(), nt.Plan(zero=3), optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
                     loss_fn=token_mean)
for _ in range(5):
    trainer.step(*make_batch(rank))
"""


def run() -> list[Row]:
    held = measure()
    total = sum(held.values())
    parts = ", ".join(f"{role} {round(size / MIB)}" for role, size in held.items())
    return [
        Row(
            what=f"memory (PSS) of server, kernel and {NUM_RANKS} ranks after FSDP2 steps",
            ours=f"{total / MIB:.0f} MiB",
            peers=parts,
            result=f"{total / 2**30:.2f} GiB",
            target="under 1 GB",
            met=total < 10**9,
        )
    ]


def measure() -> dict[str, int]:
    """PSS in bytes by role, of a server started as Binder starts it."""
    with _running_server() as server:
        notebook = server.start_kernel()
        for cell in ("%load_ext nbtrain", f"%distributed start -n {NUM_RANKS}", _on_ranks(TRAIN)):
            output = notebook(cell, timeout=180)
            assert output.status == "ok", output.error
        notebook("%%distributed -o pids\nimport os\nos.getpid()")
        held = _by_role(server.root, notebook.value("pids"))
        notebook("%distributed stop")
        notebook.close()
    return held


def _on_ranks(code: str) -> str:
    return "%%distributed\n" + (HERE / "gpt.py").read_text() + code


def _by_role(server: psutil.Process, ranks: list[int]) -> dict[str, int]:
    held: Counter[str] = Counter()
    for process in [server, *server.children(recursive=True)]:
        held[_role(process, server, ranks)] += pss_bytes([process.pid])[0]
    return dict(held)


def _role(process: psutil.Process, server: psutil.Process, ranks: list[int]) -> str:
    if process.pid in ranks:
        return f"{NUM_RANKS} ranks"
    if process == server:
        return "Jupyter server"
    command = " ".join(process.cmdline())
    return "kernel" if "ipykernel_launcher" in command else "fork server, controller, store"


def _answer(request: urllib.request.Request) -> Any:
    """The server writes its file before it listens."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return urllib.request.urlopen(request, timeout=30)
        except urllib.error.URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


class _Server:
    """JupyterLab behind binder/start, with a home of its own."""

    def __init__(self, home: Path) -> None:
        private = {f"JUPYTER_{kind}_DIR": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
        options = ["--no-browser", "--allow-root", "--ServerApp.port=0", f"--ServerApp.root_dir={home}"]
        self._runtime = home / "runtime"
        self._process = subprocess.Popen(
            [str(ROOT / "binder" / "start"), sys.executable, "-m", "jupyterlab", *options],
            env={
                **os.environ,
                **private,
                "HOME": str(home),
                "IPYTHONDIR": str(home / "ipython"),
                "PYTHONPATH": str(ROOT),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=home,
        )
        self.root = psutil.Process(self._process.pid)
        self._info: dict[str, Any] = json.loads(self._file("jpserver-*.json").read_text())

    def start_kernel(self) -> AttachedNotebook:
        request = urllib.request.Request(
            f"{self._info['url']}api/kernels",
            data=b'{"name": "python3"}',
            headers={"Authorization": f"token {self._info['token']}", "Content-Type": "application/json"},
        )
        with _answer(request) as answer:
            identity = json.load(answer)["id"]
        return AttachedNotebook(self._file(f"kernel-{identity}.json"))

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)

    def _file(self, pattern: str) -> Path:
        """A file that the server writes to its runtime folder, once it is complete."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for path in self._runtime.glob(pattern):
                if path.read_text().rstrip().endswith("}"):
                    return path
            time.sleep(0.05)
        raise TimeoutError(f"JupyterLab wrote no {pattern}")


@contextmanager
def _running_server() -> Iterator[_Server]:
    with tempfile.TemporaryDirectory(prefix="nbtrain-benchmark-") as home:
        server = _Server(Path(home))
        try:
            yield server
        finally:
            server.stop()


if __name__ == "__main__":
    for role, size in measure().items():
        print(f"{size / MIB:7.0f} MiB  {role}")
