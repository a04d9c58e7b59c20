"""A rank is killed while it trains, replaced, and the losses are those of a session that nobody disturbed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from notebook import Notebook

MODEL = """%%distributed
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 3))

    def forward(self, x):
        return F.dropout(self.layers(x), dropout, self.training)

def loss_fn(output, target):
    return F.mse_loss(output, target) + penalty(output)

def penalty(output):
    return 1e-3 * output.square().mean()

dropout = 0.0
"""
TRAINERS = """%%distributed
torch.manual_seed(5)
model, lost = Net(), Net()
made = dict(optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4), loss_fn=loss_fn, grad_clip=0.5)
trainer = nt.Trainer(model, nt.Plan.parse(SPEC), scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2), **made,
                     redundancy=True)
shards = nt.Trainer(lost, nt.Plan(zero=3), **made)
"""
STEPS = """%%distributed -o losses
def share(step):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 8, generator=g), torch.randn(16, 3, generator=g)
    return x.chunk(world_size)[rank], y.chunk(world_size)[rank]

def steps(to):
    losses = []
    while trainer.num_steps < to:
        losses.append(trainer.step(*share(trainer.num_steps)).item())
    return losses

steps(TO)
"""


def undisturbed(nb: Notebook, spec: str) -> list[float]:
    nb(MODEL)
    nb(TRAINERS.replace("SPEC", repr(spec)))
    nb(STEPS.replace("TO", "6"))
    losses: list[list[float]] = nb.value("losses")
    return losses[0]


@pytest.mark.parametrize("replay", ["", "--replay"])
@pytest.mark.parametrize("spec", ["zero=0", "zero=3", "dp_replicate=2"])
def test_the_losses_go_on_after_a_rank_is_killed(nb: Notebook, spec: str, replay: str) -> None:
    expected = undisturbed(nb, spec)
    nb(TRAINERS.replace("SPEC", repr(spec)))
    nb(STEPS.replace("TO", "2"))
    died = nb(
        "%%distributed\nimport os, signal\nif rank == 2:\n"
        "    trainer._stepper.loss_fn = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\nsteps(4)"
    )
    assert died.ename == "RankDiedError"
    said = nb(f"%distributed restart --ranks 2 {replay}")
    assert said.status == "ok", said.error
    assert "trainer" in said.stdout.split(" on as if nothing had happened")[0]
    assert "shards is lost: its shards were on no other rank" in said.stdout
    steps = STEPS.replace("TO", "6")
    nb(steps if replay else "%%distributed -r 2\ndropout = 0.0")
    if not replay:
        nb(steps)
    losses = nb.value("losses")
    for got in losses:
        assert got == pytest.approx(expected[2:], rel=1e-5)
    assert "redundancy=True" in nb("%%distributed\nshards.step(*share(0))").error
    assert nb("%%distributed\ntrainer.evaluate([share(0)]).item()").status == "ok"


def test_a_rank_that_is_killed_between_cells(nb: Notebook) -> None:
    expected = undisturbed(nb, "zero=3")
    nb(TRAINERS.replace("SPEC", "'zero=3'"))
    nb(STEPS.replace("TO", "3"))
    nb("%%distributed -o pids\nimport os\nos.getpid()")
    os.kill(nb.value("pids")[0], signal.SIGKILL)
    output = nb("%%distributed\nsteps(4)")
    assert output.ename == "RankDiedError"
    assert nb("%distributed restart --ranks 0 --replay").status == "ok"
    nb(STEPS.replace("TO", "6"))
    for got in nb.value("losses"):
        assert got == pytest.approx(expected[-len(got) :], rel=1e-5)
        assert len(got) >= 2


def test_an_interrupt_between_a_rank_and_its_mirror(nb: Notebook, tmp_path: Path) -> None:
    """Ranks that wait for the gradients of one that sleeps are freed, and the mirrors stay right."""
    expected = undisturbed(nb, "zero=3")
    nb(TRAINERS.replace("SPEC", "'zero=3'"))
    nb(STEPS.replace("TO", "2"))
    there = tmp_path / "there"
    request = nb.send(f"""%%distributed
import pathlib, time
def late(*args):
    pathlib.Path({str(there)!r}).touch()
    time.sleep(600)
if rank == 1:
    trainer._stepper.mirror.exchange = late
steps(4)""")
    wait_for(there)
    nb.interrupt()
    assert nb.wait(request).ename == "CellInterrupted"
    nb("%%distributed -r 1\ndel trainer._stepper.mirror.exchange")
    nb(STEPS.replace("TO", "3"))
    assert nb.value("losses")[1] == pytest.approx(expected[2:3], rel=1e-5)
    nb("%%distributed\nimport os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    assert nb("%distributed restart --ranks 1 --replay").status == "ok"
    nb(STEPS.replace("TO", "6"))
    for got in nb.value("losses"):
        assert got == pytest.approx(expected[3:], rel=1e-5)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
