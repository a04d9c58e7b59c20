"""The same mistakes under nbtrain's peers: does the prompt come back, and do the ranks go on?

Every mistake gets fresh ranks: most of them cost a peer its session. A person waits for ``PATIENCE_S``, interrupts, and
interrupts again.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from contenders import Contender, NbDistributed, NbTrain, Stock

PATIENCE_S = 5.0
GIVEN_UP_S = 20.0  # after an interrupt that was not answered
MISTAKES = {
    "an error on one rank, the others in a barrier": "if rank == 1: raise ValueError('left')\ndist.barrier()",
    "a collective that one rank does not join": "if rank != 1: dist.all_reduce(torch.ones(2))",
    "an endless loop on one rank, the others in a barrier": "while rank == 1: pass\ndist.barrier()",
    "SIGKILL of one rank, the others in a barrier": "if rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()",
    "different shapes in an all-reduce": "dist.all_reduce(torch.ones(3 if rank == 1 else 2))",
    "one rank in C code that holds the GIL": "if rank == 1: sum(range(10**13))\ndist.barrier()",
}
KEPT = "kept = rank + 10"
AFTER = "t = torch.ones(1); dist.all_reduce(t); print(f'<{rank}:{t.item():g}:{kept}>')"


@dataclass(frozen=True)
class Outcome:
    """What became of a mistake.

    Attributes:
        back_s: Until the prompt was back, from the first interrupt or, without one, from the start; None if never.
        interrupts: How many it took.
        good: How many ranks run an all-reduce rightly afterwards, and hold what they held.
    """

    back_s: float | None
    interrupts: int
    good: int

    def __str__(self) -> str:
        if self.back_s is None:
            return "no prompt, session lost"
        how = f" ({self.interrupts} interrupt{'s' * (self.interrupts > 1)})" if self.interrupts else ""
        after = (
            "all 4 ranks go on" if self.good == 4 else f"{self.good or 'no'} rank{'s' * (self.good != 1)} of 4 go on"
        )
        return f"prompt after {self.back_s:.1f} s{how}; {after}"


def outcome(kind: type[Contender], code: str) -> Outcome:
    """Let a fresh ``kind`` make the mistake ``code``."""
    contender = kind()
    children = []
    try:
        contender.start()
        contender.cell(f"import os, torch\nimport torch.distributed as dist\n{KEPT}")
        if _good_ranks(contender) != 4:
            raise RuntimeError(f"{contender.name}: its ranks are not read rightly before anything went wrong")
        children = psutil.Process(contender.kernel.manager.provisioner.pid).children(recursive=True)
        back_s, interrupts = _suffer(contender, code)
        good = _good_ranks(contender) if back_s is not None else 0
        return Outcome(back_s, interrupts, good)
    finally:
        _end(contender, children)


def _suffer(contender: Contender, code: str) -> tuple[float | None, int]:
    kernel = contender.kernel
    began = time.monotonic()
    request = kernel.send(f"{contender.magic}\n{code}")
    for interrupts in range(3):
        patience = PATIENCE_S if not interrupts else 1.0 if interrupts == 1 else GIVEN_UP_S
        with contextlib.suppress(TimeoutError):
            kernel.wait(request, timeout=patience)
            return time.monotonic() - began, interrupts
        if not interrupts:
            began = time.monotonic()
        kernel.interrupt()
    return None, 2


def _good_ranks(contender: Contender) -> int:
    """Also gives a peer that offers a repair of one rank the chance to use it."""
    if isinstance(contender, NbTrain) and contender.kernel(f"{contender.magic}\n1").ename == "RankDiedError":
        contender.kernel("%distributed restart --ranks 1 --replay")
    with contextlib.suppress(TimeoutError):
        said = str([m["content"] for m in contender.kernel(f"{contender.magic}\n{AFTER}", timeout=20).messages])
        return sum(f"<{rank}:4:{rank + 10}>" in said for rank in range(4))
    return 0


def _end(contender: Contender, children: list[psutil.Process]) -> None:
    """By pid: what is stuck does not end by itself."""
    with contextlib.suppress(Exception):  # a lost session may fail in any way
        contender.kernel.client.stop_channels()
    contender.kernel.manager.shutdown_kernel(now=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=10)


def table(kinds: tuple[type[Contender], ...] = (NbTrain, Stock, NbDistributed)) -> str:
    """A Markdown table: a row a mistake."""
    titles = {NbTrain: "nbtrain", Stock: "`%%px`", NbDistributed: "nbdistributed"}
    lines = [("", *(titles[kind] for kind in kinds)), ("---",) * (len(kinds) + 1)]
    for mistake, code in MISTAKES.items():
        print(f"{mistake} ...", file=sys.stderr, flush=True)
        lines.append((mistake, *(str(outcome(kind, code)) for kind in kinds)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
