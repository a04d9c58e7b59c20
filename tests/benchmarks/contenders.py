"""nbtrain and its peers, each in a real kernel, with one interface: start four ranks, run a cell on them, end.

nbdistributed's shutdown and reset magics kill every process whose command line looks like a worker, so they are never
called: its workers end here, by pid.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from os import environ, pathsep
from pathlib import Path

import psutil
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

sys.path.append(str(Path(__file__).parents[1]))

from notebook import Notebook, Output

NUM_RANKS = 4
NBDISTRIBUTED = "nbdistributed==0.1.0"
FIRST_COLLECTIVE = "dist.all_reduce(torch.ones(1))"


class Contender:
    """Four ranks behind a kernel.

    Attributes:
        magic: The first line of a cell that runs on every rank.
        starting: Cells from a fresh kernel to live ranks.
    """

    name: str
    magic: str
    starting: tuple[str, ...]
    stopping: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.kernel = self.make_kernel()

    def make_kernel(self) -> Notebook:
        return Notebook(load=False)

    def start(self) -> float:
        """Seconds from the first cell of a fresh kernel to the end of the first collective."""
        began = time.monotonic()
        for cell in self.starting:
            self.local(cell)
        self.before_first_cell()
        self.cell(FIRST_COLLECTIVE)
        return time.monotonic() - began

    def before_first_cell(self) -> None:
        """What a user would have to wait for before a cell works."""

    def cell(self, code: str) -> Output:
        """Run ``code`` on every rank."""
        return self.local(f"{self.magic}\n{code}")

    def local(self, code: str) -> Output:
        output = self.kernel(code, timeout=240)
        said = output.error or output.stdout
        if output.status != "ok" or "Error executing" in said:
            raise RuntimeError(f"{self.name}: {code!r} failed:\n{said[-2000:]}")
        return output

    def rank_pids(self) -> list[int]:
        """The processes that hold the ranks."""
        said = str([message["content"] for message in self.cell("import os\nprint(f'pid={os.getpid()}.')").messages])
        return sorted({int(pid) for pid in re.findall(r"pid=(\d+)\.", said)})

    def close(self) -> None:
        for cell in self.stopping:
            self.local(cell)
        self.kernel.close()


class NbTrain(Contender):
    name = "nbtrain"
    magic = "%%distributed"
    starting = (f"%load_ext nbtrain\n%distributed start -n {NUM_RANKS}",)
    stopping = ("%distributed stop",)


class Stock(Contender):
    """ipyparallel as it comes; torch and the group are the user's to set up."""

    name = "ipyparallel"
    magic = "%%px"
    starting = (
        f"import ipyparallel as ipp\ncluster = ipp.Cluster(n={NUM_RANKS})\nrc = cluster.start_and_connect_sync()",
        "for i in rc.ids: rc[i].push({'rank': i})",
        "import socket\nprobe = socket.create_server(('127.0.0.1', 0)); port = probe.getsockname()[1]; probe.close()",
        "rc[:].push({'port': port}, block=True)",
        "%%px\nimport torch\nimport torch.distributed as dist\n"
        f"dist.init_process_group('gloo', f'tcp://127.0.0.1:{{port}}', rank=rank, world_size={NUM_RANKS})",
    )
    stopping = ("cluster.stop_cluster_sync()",)


class NbDistributed(Contender):
    name = "nbdistributed"
    magic = "%%distributed"
    starting = (f"%load_ext nbdistributed\n%dist_init -n {NUM_RANKS}",)
    folder: Path

    def make_kernel(self) -> Notebook:
        return ForeignNotebook(self.folder)

    def before_first_cell(self) -> None:
        """Wait until every worker has connected.

        nbdistributed itself doesn't: a cell that is sent sooner is lost, and gives up after 30 s.
        """
        while not all(_is_connected(worker) for worker in self._workers()):
            time.sleep(0.02)

    def close(self) -> None:
        workers = self._workers()
        self.kernel.close()
        for worker in workers:
            if worker.is_running():
                worker.kill()
        psutil.wait_procs(workers, timeout=10)

    def _workers(self) -> list[psutil.Process]:
        kernel = psutil.Process(self.kernel.manager.provisioner.pid)
        return [child for child in kernel.children() if any("worker.py" in word for word in child.cmdline())]


def _is_connected(worker: psutil.Process) -> bool:
    port = int(worker.cmdline()[6])
    return any(c.raddr and c.raddr.port == port and c.status == "ESTABLISHED" for c in worker.net_connections())


class ForeignNotebook(Notebook):
    """A kernel of another environment, whose programs come first on PATH: nbdistributed starts a bare ``python``."""

    def __init__(self, folder: Path) -> None:
        programs = folder / "bin"
        self.manager = KernelManager(kernel_name="python3")
        self.manager._kernel_spec = KernelSpec(
            argv=[str(programs / "python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name=folder.name,
            language="python",
        )
        self.manager.start_kernel(env={**environ, "PATH": f"{programs}{pathsep}{environ['PATH']}"})
        self._open(self.manager.client())

    def _open(self, client: BlockingKernelClient) -> None:
        self.client = client
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.by_request, self.last_id = {}, ""


class AttachedNotebook(ForeignNotebook):
    """A kernel that a Jupyter server has started."""

    def __init__(self, connection_file: Path) -> None:
        client = BlockingKernelClient()
        client.load_connection_info(json.loads(connection_file.read_text()))
        self._open(client)

    def close(self) -> None:
        self.client.stop_channels()


def install_nbdistributed(folder: Path, torch_version: str) -> str:
    """Put nbdistributed into an environment of its own, once; returns why that failed, or nothing."""
    NbDistributed.folder = folder
    if (folder / "installed").exists():
        return ""
    packages = [NBDISTRIBUTED, "pyzmq", "ipykernel>=7,<8", f"torch=={torch_version.partition('+')[0]}"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True, text=True)
        install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(install, check=True, capture_output=True, text=True, timeout=1200)
    except (subprocess.SubprocessError, OSError) as problem:
        said = (getattr(problem, "stderr", "") or str(problem)).strip().splitlines()
        return f"cannot be installed: {said[-1] if said else problem}"
    (folder / "installed").touch()
    return ""


@contextmanager
def running(kind: type[Contender]) -> Iterator[Contender]:
    """A contender whose ranks have run their first collective."""
    contender = kind()
    try:
        contender.start()
        yield contender
    finally:
        contender.close()
