"""Weight-update sharding (``zero=1``) against all-reduce and a full update (``zero=0``), in the same run.

``PYTHONPATH=. python tests/benchmarks/update.py``

Both live in the same ranks at once and train in turn, a few steps each.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from measure import Row, Samples, ratio

import nbtrain as nt

RANKS = (2, 4)
BLOCK = 3  # steps between two turns
SETUP = """
import time

import torch.nn as nn
from nbtrain.parallel.holdings import holdings
from nbtrain.plan.footprint import bytes_moved


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(16)))

    def forward(self, x):
        return self.layers(x)


def make(spec):
    torch.manual_seed(0)
    def adam(params):
        return torch.optim.Adam(params, lr=1e-3)

    return nt.Trainer(Wide(), nt.Plan.parse(spec), optimizer=adam, loss_fn=nn.functional.mse_loss)


trainers = {zero: make(f"zero={zero}") for zero in (0, 1)}
x, y = torch.randn(8, 512), torch.randn(8, 512)


def train(zero, num_steps):
    began = time.perf_counter()
    for _ in range(num_steps):
        trainers[zero].step(x, y)
    return (time.perf_counter() - began) / num_steps


def facts(zero):
    held = holdings(trainers[zero])
    moved = sum(bytes_moved(trainers[zero].plan, held["num_parameters"]).values())
    return held["num_parameters"], held["optimizer_bytes"], moved
"""


def run(rounds: int = 12) -> list[Row]:
    """Rows of the benchmarks' table; no target: these are the method's own numbers."""
    return [row for num_ranks in RANKS for row in _compare(num_ranks, rounds)]


def _compare(num_ranks: int, rounds: int) -> list[Row]:
    threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    with nt.Session(num_ranks, gpus="none", threads=threads) as session:
        session.run(SETUP)
        session.run(f"warm = [train(zero, {BLOCK}) for zero in (0, 1)]")
        turns = (
            "[(train(0, n), train(1, n)) if turn % 2 else (train(1, n), train(0, n))[::-1] for turn in range(rounds)]"
        )
        session.run(f"n, rounds = {BLOCK}, {rounds}\npairs = {turns}\nknown = [facts(zero) for zero in (0, 1)]")
        pairs: list[tuple[float, float]] = session.pull("pairs", "0")[0]
        known: list[tuple[int, int, float]] = session.pull("known", "0")[0]
    full, shared = (Samples(tuple(column)) for column in zip(*pairs, strict=True))
    return [_time_row(num_ranks, known[0][0], full, shared), _held_row(num_ranks, known), _moved_row(num_ranks, known)]


def _row(what: str, ours: str, theirs: str, result: str) -> Row:
    return Row(what=what, ours=ours, peers=f"zero=0: {theirs}", result=result, target="", met=None)


def _time_row(num_ranks: int, num_parameters: int, full: Samples, shared: Samples) -> Row:
    what = f"step time, zero=1, Adam, {num_parameters / 1e6:.1f} M parameters, {num_ranks} ranks"
    share = ratio(shared, full).text("of the time", 2)
    return _row(what, shared.text("ms", 0, 1e3), full.text("ms", 0, 1e3), share)


def _held_row(num_ranks: int, known: list[Any]) -> Row:
    (_, full, _), (_, shared, _) = known
    what = f"optimizer state of a rank, zero=1, {num_ranks} ranks"
    return _row(what, f"{shared / 2**20:.1f} MiB", f"{full / 2**20:.1f} MiB", f"{shared / full:.2f} of the bytes")


def _moved_row(num_ranks: int, known: list[Any]) -> Row:
    (_, _, full), (_, _, shared) = known
    what = f"sent by a rank and step, zero=1, {num_ranks} ranks"
    return _row(what, f"{shared / 2**20:.1f} MiB", f"{full / 2**20:.1f} MiB", f"{shared / full:.2f} of the bytes")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from table import conditions_text, render

    print(f"{render(run())}\n\n{conditions_text()}")
