"""Mistakes that leave ranks waiting for each other: the prompt comes back, and everything goes on as if undisturbed."""

from __future__ import annotations

import re
import time

import pytest
from notebook import Notebook, Output, plain

SETUP = """%%distributed
import time
import torch.nn as nn

PLANS = [nt.Plan(zero=0), nt.Plan(zero=3), nt.Plan(zero=2, dp_replicate=2)]

def make(plan):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), *blocks, nn.Linear(16, 4))
    make_optimizer = lambda params: torch.optim.AdamW(params, lr=1e-2)
    return nt.Trainer(model, plan, optimizer=make_optimizer, loss_fn=nn.functional.mse_loss, grad_clip=1.0)

def batch(step):
    g = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 16, generator=g), torch.randn(8, 4, generator=g)

def take(trainer, steps):
    \"\"\"Steps up to number `steps`, each on its own batch and random state; the losses.\"\"\"
    losses = []
    while trainer.num_steps < steps:
        torch.manual_seed(100 * trainer.num_steps + rank)
        losses.append(trainer.step(*batch(trainer.num_steps)).item())
    return losses

trainers = [make(plan) for plan in PLANS]
for trainer in trainers: take(trainer, 2)
calm = [make(plan) for plan in PLANS]
"""
AFTER = """%%distributed -o same
ends = [trainer.num_steps + 3 for trainer in trainers]
disturbed = [take(trainer, end) for trainer, end in zip(trainers, ends)]
undisturbed = [take(trainer, end)[-3:] for trainer, end in zip(calm, ends)]
t = torch.ones(1); dist.all_reduce(t)
# a new reducer sums in other buckets: the last bits may differ
off = (torch.tensor(disturbed) - torch.tensor(undisturbed)).abs().max().item()
off < 1e-5 and t.item() == world_size"""


@pytest.fixture(scope="module", autouse=True)
def _trainers(nb: Notebook) -> None:
    output = nb(SETUP)
    assert output.status == "ok", output.error


@pytest.fixture(autouse=True)
def _goes_on_as_if_undisturbed(nb: Notebook):
    yield
    output = nb(AFTER, timeout=60)
    assert output.status == "ok", output.error
    assert nb.value("same") == [True] * 4


def run_and_interrupt(nb: Notebook, code: str, after_s: float) -> Output:
    request = nb.send(code)
    time.sleep(after_s)
    nb.interrupt()
    began = time.monotonic()
    output = nb.wait(request, timeout=20)
    output.seconds = time.monotonic() - began
    return output


def test_an_error_while_others_wait_in_a_barrier(nb: Notebook) -> None:
    output = nb('%%distributed\nif rank == 1:\n    open("/nonexistent/file")\ndist.barrier()')
    text = plain(output.error)
    assert output.seconds < 5
    assert text.startswith("FileNotFoundError on rank 1")
    assert "ranks 0,2-3 then failed at Cell In" in text


def test_a_missing_collective_is_interrupted(nb: Notebook) -> None:
    output = run_and_interrupt(nb, "%%distributed\nif rank != 2: dist.all_reduce(torch.ones(1))", after_s=0.5)
    assert output.seconds < 5
    assert output.error.splitlines() == ["KeyboardInterrupt: interrupted on ranks 0-3; they kept their state"]


WAITS = [
    "time.sleep(600)",
    "while True: pass",
    "time.sleep(600) if rank else dist.barrier()",
    "dist.recv(torch.ones(1), 1) if rank == 0 else time.sleep(600)",
    "dist.irecv(torch.ones(1), 1).wait() if rank == 0 else None",
    "dist.distributed_c10d._get_default_store().wait(['never'])",
    "dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False).wait(['never'])",
]


@pytest.mark.parametrize("code", WAITS)
def test_what_runs_is_interrupted(nb: Notebook, code: str) -> None:
    output = run_and_interrupt(nb, f"%%distributed\nimport os\n{code}", after_s=0.5)
    assert output.error == "KeyboardInterrupt: interrupted on ranks 0-3; they kept their state"


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("leavers", ["rank == 3", "rank != 0"])
def test_a_rank_that_fails_in_a_training_loop(nb: Notebook, position: int, leavers: str) -> None:
    cell = f"""%%distributed
trainer = trainers[{position}]
take(trainer, trainer.num_steps + 1)
if {leavers}:
    raise ValueError("left the loop")
trainer.step(*batch(0))"""
    output = nb(cell)
    assert output.seconds < 5
    assert plain(output.error).startswith("ValueError on rank")


@pytest.mark.parametrize("position", [0, 1, 2])
def test_training_is_interrupted_anywhere(nb: Notebook, position: int) -> None:
    """At different moments of a step: ranks never end a step apart."""
    for attempt in range(4):
        cell = f"%%distributed\nwhile True: take(trainers[{position}], trainers[{position}].num_steps + 1)"
        output = run_and_interrupt(nb, cell, after_s=0.15 + 0.013 * attempt)
        assert output.ename == "CellInterrupted", output.error
        assert output.seconds < 5
    assert nb(f"%%distributed -o steps\ntrainers[{position}].num_steps").status == "ok"
    assert len(set(nb.value("steps"))) == 1


def test_an_interrupt_while_groups_are_formed(nb: Notebook) -> None:
    output = run_and_interrupt(nb, "%%distributed\nif rank: dist.new_group([0, 1, 2, 3])", after_s=0.5)
    assert output.ename == "CellInterrupted"


def test_ranks_wait_in_a_cell_that_does_not_block(nb: Notebook) -> None:
    nb("%%distributed --no-block --name stuck\nif rank: dist.barrier()")
    began = time.monotonic()
    output = nb("%distributed interrupt")
    assert time.monotonic() - began < 5
    assert re.search("interrupted ranks [01]-3", output.stdout)  # rank 0 may not have ended yet
    assert nb("stuck.wait()").ename == "CellError"


def test_a_loader_with_workers_is_interrupted_and_runs_again(nb: Notebook) -> None:
    nb("""%%distributed
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        time.sleep(0.05)
        return torch.tensor([float(i)])
def loop(n):
    loader = torch.utils.data.DataLoader(Slow(), batch_size=2, num_workers=2)
    return sum(len(batch) for _, batch in zip(range(n), loader))""")
    output = run_and_interrupt(nb, "%%distributed\nloop(32)", after_s=0.6)
    assert output.ename == "CellInterrupted"
    assert output.seconds < 5
    nb("%%distributed -o left\nimport psutil\ntime.sleep(0.5)\nlen(psutil.Process().children())")
    assert nb.value("left") == [0] * 4
    assert nb("%%distributed\nloop(3)").plain == ["6"]


def test_a_rank_that_fails_in_a_cell_that_does_not_block_frees_the_others(nb: Notebook) -> None:
    nb("%%distributed --no-block --name lost\nif rank == 1: raise ValueError('first')\ndist.barrier()")
    began = time.monotonic()
    text = plain(nb("lost.wait(10)").error)
    assert time.monotonic() - began < 5
    assert text.startswith("ValueError on rank 1: first")
    assert "then failed" in text


def test_a_worker_process_that_crashes_costs_its_cell_only(nb: Notebook) -> None:
    nb("""%%distributed
import os
class Crashing(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i):
        print("item", i)
        if rank == 1 and i == 3: os._exit(7)
        return torch.tensor([float(i)])""")
    output = nb("%%distributed\nfor x in torch.utils.data.DataLoader(Crashing(), num_workers=1): pass\ndist.barrier()")
    assert output.seconds < 20
    text = plain(output.error)
    assert text.startswith("RuntimeError: DataLoader worker")  # which led to another, on rank 1 and first
    assert "exited unexpectedly" in text.partition("on rank 1")[0]
    assert "item 0" in output.stdout
