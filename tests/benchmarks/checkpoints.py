"""Checkpoints against plain ``torch.distributed.checkpoint``, of the same model and optimizer, in the same run.

``PYTHONPATH=. python tests/benchmarks/checkpoints.py``

Both save and load the state of one trainer (``zero=3``), in turn: nbtrain by ``trainer.save`` and ``trainer.load``,
torch by ``get_state_dict``, ``dcp.save``, ``dcp.load`` and ``set_state_dict``. Both wait until files are on the disk.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from measure import Row, Samples, at_most, ratio

import nbtrain as nt

RANKS = (2, 4)
BOUND = 1.1  # of plain DCP's time; the manifest, the agreement and the names of the directory are in it
SETUP = """
import shutil
import time
from pathlib import Path

import torch.nn as nn
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(24)))

    def forward(self, x):
        return self.layers(x)


trainer = nt.Trainer(
    Wide(), nt.Plan(zero=3), optimizer=lambda params: torch.optim.Adam(params, lr=1e-3), loss_fn=nn.functional.mse_loss
)
trainer.step(torch.randn(8, 512), torch.randn(8, 512))


def timed(work):
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


def plain_state():
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    return {"model": model, "optimizer": optimizer}


def plain_load(folder):
    state = plain_state()
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        trainer.model, trainer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def plain(folder):
    saved = timed(lambda: dcp.save(plain_state(), checkpoint_id=folder))
    loaded = timed(lambda: plain_load(folder))
    return saved, loaded


def ours(folder):
    saved = timed(lambda: trainer.save(folder, keep=1))
    loaded = timed(lambda: trainer.load(folder))
    handles = []
    returned = timed(lambda: handles.append(trainer.save(folder, keep=1, blocking=False)))
    handles[0].wait()
    return saved, loaded, returned


def cleared(*folders):
    dist.barrier()
    if rank == 0:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


def turn(number, root):
    one, other = Path(root) / "ours", Path(root) / "plain"
    cleared(one, other)
    if number % 2:
        return ours(one), plain(other)
    return (plain(other), ours(one))[::-1]
"""


def run(rounds: int = 8) -> list[Row]:
    """Rows of the benchmarks' table."""
    return [row for num_ranks in RANKS for row in _compare(num_ranks, rounds)]


def _compare(num_ranks: int, rounds: int) -> list[Row]:
    threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    with tempfile.TemporaryDirectory() as root, nt.Session(num_ranks, gpus="none", threads=threads) as session:
        session.run(SETUP)
        session.run(f"warm = turn(0, {root!r})")
        session.run(f"turns = [turn(number, {root!r}) for number in range({rounds})]")
        turns: list[tuple[tuple[float, float, float], tuple[float, float]]] = session.pull("turns", "0")[0]
    mine, theirs = zip(*turns, strict=True)
    saved, loaded, returned = (Samples(column) for column in zip(*mine, strict=True))
    plain_saved, plain_loaded = (Samples(column) for column in zip(*theirs, strict=True))
    return [
        _row(f"save a checkpoint, zero=3, Adam, {num_ranks} ranks", saved, plain_saved),
        _row(f"load a checkpoint, zero=3, Adam, {num_ranks} ranks", loaded, plain_loaded),
        Row(
            what=f"a save that writes behind the training returns, {num_ranks} ranks",
            ours=returned.text("ms", 0, 1e3),
            peers="",
            result=ratio(returned, saved).text("of a blocking save", 2),
            target="",
            met=None,
        ),
    ]


def _row(what: str, ours: Samples, plain: Samples) -> Row:
    share = ratio(ours, plain)
    return Row(
        what=what,
        ours=ours.text("ms", 0, 1e3),
        peers=f"plain DCP: {plain.text('ms', 0, 1e3)}",
        result=share.text("of the time", 2),
        target=f"at most {BOUND}",
        met=at_most(share.median, BOUND),
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from table import conditions_text, render

    print(f"{render(run())}\n\n{conditions_text()}")
