"""Pipelines in a notebook: whatever ends a schedule in the middle, the cell says why and the next step goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from notebook import Notebook, plain

MODEL = """%%distributed
import os, signal, time
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
    def forward(self, x):
        trip()
        return x + F.dropout(torch.tanh(self.norm(self.linear(x))), 0.2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 3)
    def forward(self, x):
        for block in self.blocks: x = block(x)
        return self.head(x)

class Fault(Exception): pass

wire = []  # how many blocks run before, and what happens then

def trip():
    if wire:
        wire[0] -= 1
        if wire[0] == 0:
            wire.pop(0)
            wire.pop(0)()

def fault(): raise Fault('broken')

def loss_fn(output, target):
    trip()
    return F.mse_loss(output, target)

def make(spec):
    torch.manual_seed(0)
    return nt.Trainer(Net(), nt.Plan.parse(spec), loss_fn=loss_fn, grad_clip=1.0,
                      optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4))

def share(step):
    g = torch.Generator().manual_seed(step)
    return tuple(part.chunk(2)[rank % 2] for part in (torch.randn(16, 8, generator=g), torch.randn(16, 3, generator=g)))

def steps(trainer, to):
    return [trainer.step(*share(trainer.num_steps)).item() for _ in range(to - trainer.num_steps)]
"""
SPECS = ["zero=0,pp=2,num_microbatches=4", "zero=3,pp=2,num_microbatches=4,schedule=zbv"]
CAUGHT = """%%distributed
from nbtrain.parallel import exchange
if rank >= 2: raise KeyboardInterrupt
exchanged = exchange._exchanged
def caught(*given):
    exchange._exchanged = exchanged
    exchanged(*given)
    raise KeyboardInterrupt
exchange._exchanged = caught
steps(trainer, 10**6)
"""
SAME = """%%distributed
wire.clear()
to = max(trainer.num_steps, undisturbed.num_steps) + 1
steps(trainer, to), steps(undisturbed, to)
after, expected = trainer.state_dict(), undisturbed.state_dict()
assert all(torch.equal(after[name], expected[name]) for name in expected)
"""


@pytest.fixture(scope="module")
def nb() -> Iterator[Notebook]:
    with Notebook() as notebook:
        assert notebook("%distributed start -n 4 --hang-after 2").status == "ok"
        assert notebook(MODEL).status == "ok"
        yield notebook
        notebook("%distributed stop")


@pytest.fixture(scope="module", params=SPECS, autouse=True)
def _trained(nb: Notebook, request: pytest.FixtureRequest) -> None:
    """A trainer for the tests to disturb, and one that is left alone."""
    made = nb(
        f"%%distributed\nundisturbed = make({request.param!r})\ntrainer = make({request.param!r})\n"
        "steps(trainer, 2), steps(undisturbed, 2)"
    )
    assert made.status == "ok", made.error


def same(nb: Notebook) -> None:
    output = nb(SAME)
    assert output.status == "ok", output.error
    assert output.stderr == ""


def test_interrupts(nb: Notebook) -> None:
    """While one rank sits in a block, its peers in messages, and those behind them in reductions; and anywhere."""
    for rank, after_s in ((3, 0.4), (0, 0.4), (None, 0.13), (None, 0.21)):
        stop = f"if rank == {rank}: wire.extend([5, lambda: time.sleep(100)])"
        request = nb.send(f"%%distributed\n{stop}\nsteps(trainer, 10**6)")
        time.sleep(after_s)
        nb.interrupt()
        output = nb.wait(request)
        assert output.error.startswith("KeyboardInterrupt"), output.error
        assert output.seconds < after_s + 3
        assert output.stderr == ""
        same(nb)


def test_an_interrupt_that_catches_ranks_before_and_in_a_step(nb: Notebook) -> None:
    """None of them in a wait: each raises by itself, and what some have begun others have not."""
    output = nb(CAUGHT)
    assert plain(output.error).startswith("KeyboardInterrupt on ranks "), output.error
    same(nb)


@pytest.mark.parametrize(("rank", "count"), [(0, 6), (3, 10)])
def test_an_error_on_one_rank_ends_the_cell_with_it(nb: Notebook, rank: int, count: int) -> None:
    """In a block of the third microbatch; and in backward or the loss of a later one."""
    output = nb(f"%%distributed\nif rank == {rank}: wire.extend([{count}, fault])\nsteps(trainer, 10**6)")
    assert plain(output.error).startswith(f"Fault on rank {rank}: broken"), output.error
    assert output.seconds < 5
    same(nb)


@pytest.mark.parametrize("cause", ["raise Fault('before')", "pair[0].step()"])
def test_ranks_that_raise_each_by_itself_in_and_before_a_step(nb: Notebook, cause: str) -> None:
    """Nobody waits for anybody, and some have begun a step that others have not."""
    made = nb(
        "%%distributed\npair = [make('zero=1,bucket_mb=0.0005') for _ in range(2)]\n"
        "def all_steps(to): return [(torch.manual_seed(rank), steps(one, to))[1] for one in pair]\nall_steps(1)"
    )
    assert made.status == "ok", made.error
    output = nb(f"%%distributed\nif rank == 1: {cause}\nwire.extend([1, fault])\nsteps(pair[0], 10)")
    assert "on ranks 0,2-3" in plain(output.error), output.error
    output = nb("%%distributed -o losses\nwire.clear()\nall_steps(3)")
    assert output.status == "ok", output.error
    assert nb.value("all(before == after for before, after in losses)")


def test_who_waits_for_which_message(nb: Notebook) -> None:
    request = nb.send("%%distributed\nif rank == 2: wire.extend([5, lambda: time.sleep(100)])\nsteps(trainer, 10**6)")
    output = nb.by_request[request]
    deadline = time.monotonic() + 20
    while "No output for" not in "".join(output.plain) and time.monotonic() < deadline:
        nb.listen(0.5)
    nb.interrupt()
    nb.wait(request)
    card = next(text for text in output.plain if text.startswith("No output for"))
    assert "Rank 0 waits in the receive of microbatch " in card
    assert "stage 0 from stage " in card
    assert "on rank 2 for " in card
    assert "Rank 2 has not joined: still computing at Cell In[" in card
    same(nb)


def test_a_rank_dies(nb: Notebook) -> None:
    """The last test of a trainer: its shards have no copy with ``zero=3``, and then it says so."""
    die = "lambda: os.kill(os.getpid(), signal.SIGKILL)"
    died = nb(f"%%distributed\nif rank == 3: wire.extend([5, {die}])\nsteps(trainer, 10**6)")
    assert died.ename == "RankDiedError"
    said = nb("%distributed restart --ranks 3 --replay")
    assert said.status == "ok", said.error
    if "trainer is lost" in said.stdout:
        assert "its shards were on no other rank" in said.stdout
        assert "make the model and the trainer again" in nb("%%distributed\nsteps(trainer, 10**6)").error
    else:
        same(nb)
