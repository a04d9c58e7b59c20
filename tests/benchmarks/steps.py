"""Step time of `Trainer.step` against a plain script with the same plan under torchrun.

Both are alive at once and train in turn, a few steps each: only one of them computes at any time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from measure import Row, Samples, interleave, ratio

import nbtrain as nt

HERE = Path(__file__).parent
BLOCK = 4  # steps between two turns
WARM_UP = 2  # blocks
OURS = """
import time
torch.manual_seed(0)
trainer = nt.Trainer(
    GPT(), nt.Plan({plan}), optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4, fused=True), loss_fn=token_mean
)
inputs, targets = make_batch(rank // trainer.plan.tp)
def train(num_steps):
    began = time.perf_counter()
    for _ in range(num_steps):
        trainer.step(inputs, targets)
    return (time.perf_counter() - began) / num_steps
"""


def run(rounds: int = 12) -> list[Row]:
    return [
        _compare("DDP", "ddp", "zero=0", rounds),
        _compare("FSDP2", "fsdp", "zero=3", rounds),
        _compare("tensor parallel", "tp", "tp=2", rounds),
        _compare("tensor parallel x FSDP2", "tp_fsdp", "zero=3, tp=2", rounds, num_ranks=4),
    ]


def _compare(label: str, kind: str, plan: str, rounds: int, num_ranks: int = 2) -> Row:
    threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    plain = _Script(kind, num_ranks, threads)
    with nt.Session(num_ranks, gpus="none", threads=threads) as session, plain.running() as script:
        session.run((HERE / "gpt.py").read_text() + OURS.format(plan=plan))

        def ours() -> float:
            session.run(f"seconds = train({BLOCK})")
            return float(session.pull("seconds", "0")[0])

        interleave(WARM_UP, ours, script.train)
        mine, theirs = interleave(rounds, ours, script.train)
    return _row(f"{label}, {num_ranks} ranks", mine, theirs)


def _row(label: str, mine: Samples, theirs: Samples) -> Row:
    throughput = ratio(theirs, mine)  # throughput is the inverse of time
    return Row(
        what=f"step time, {label}",
        ours=mine.text("ms", 0, 1e3),
        peers=f"torchrun script {theirs.text('ms', 0, 1e3)}",
        result=throughput.text("of its throughput", 3),
        target="at least 0.97",
        met=round(throughput.median, 3) >= 0.97,
    )


class _Script:
    """The plain script under torchrun."""

    def __init__(self, kind: str, num_ranks: int, threads: int) -> None:
        self.kind, self.num_ranks = kind, num_ranks
        quiet = {"PYTHONWARNINGS": "ignore"}  # FSDP2 warns of in-place operations that the model does not have
        self.environment = {**os.environ, **quiet, "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
        self.links: list[Any] = []

    @contextmanager
    def running(self) -> Iterator[_Script]:
        with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/socket", "AF_UNIX") as listener:
            process = subprocess.Popen(self._command(f"{folder}/socket"), env=self.environment)
            try:
                self.links = [listener.accept() for _ in range(self.num_ranks)]
                yield self
            finally:
                for link in self.links:
                    link.send(0)
                process.wait(timeout=30)

    def train(self) -> float:
        """Seconds a step; the slower rank's."""
        for link in self.links:
            link.send(BLOCK)
        return max(link.recv() for link in self.links)

    def _command(self, address: str) -> list[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.num_ranks}"]
        return [*launcher, str(HERE / "plain_script.py"), self.kind, address]
