"""Faults that people make, and what a session is after each: the rows of the fault matrix.

A row is a fault on one rank or on all but one, in the middle of a training loop under one layout.
"""

from __future__ import annotations

from dataclasses import dataclass

NUM_RANKS = 4
LAYOUTS = {
    "DDP": "nt.Plan(zero=0)",
    "FSDP": "nt.Plan(zero=3)",
    "HSDP": "nt.Plan(dp_replicate=2, dp_shard=2)",
}
WHO = {"one rank": "rank == 2", "all but one": "rank != 2"}


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        code: What the ranks with ``bad`` do in the middle of a loop over ``trainer``'s steps.
        interrupts: How often the person has to interrupt: not at all, once, or twice where nothing else helps.
        dies: Whether the ranks are gone afterwards, and are replaced.
        error: What the cell ends by.
    """

    name: str
    code: str
    error: str
    interrupts: int = 0
    dies: bool = False


_STEP = "trainer.step(*batch(trainer.num_steps))"

FAULTS = [
    Fault("raise", f"if bad: raise ValueError('left')\n{_STEP}", "CellError"),
    Fault("SIGKILL", f"if bad: os.kill(os.getpid(), signal.SIGKILL)\n{_STEP}", "RankDiedError", dies=True),
    Fault("SIGSEGV", f"if bad: os.kill(os.getpid(), signal.SIGSEGV)\n{_STEP}", "RankDiedError", dies=True),
    Fault("os._exit", f"if bad: os._exit(3)\n{_STEP}", "RankDiedError", dies=True),
    Fault("SIGSTOP", f"if bad: os.kill(os.getpid(), signal.SIGSTOP)\n{_STEP}", "CellInterrupted", interrupts=1),
    Fault("infinite loop", f"while bad: pass\n{_STEP}", "CellInterrupted", interrupts=1),
    Fault("C loop that holds the GIL", f"if bad: sum(range(10**13))\n{_STEP}", "CellInterrupted", 2, dies=True),
    Fault("missing collective", "if not bad: dist.all_reduce(torch.ones(2))", "CellInterrupted", interrupts=1),
    Fault("missing step", f"if not bad: {_STEP}", "CellInterrupted", interrupts=1),
    Fault(
        "mismatched collective",
        "dist.broadcast(torch.ones(2), src=0) if bad else dist.all_reduce(torch.ones(2))",
        "CellError",
    ),
    Fault("mismatched shape", "dist.all_reduce(torch.ones(3 if bad else 2))", "CellError"),
]

SETUP = """%%distributed
import os, signal, time
import torch.nn as nn

def make(plan):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), *blocks, nn.Linear(16, 4))
    return nt.Trainer(model, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
                      loss_fn=nn.functional.mse_loss, grad_clip=1.0, redundancy=True)

def batch(step):
    g = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 16, generator=g), torch.randn(8, 4, generator=g)

def take(trainer, count):
    return [trainer.step(*batch(trainer.num_steps)).item() for _ in range(count)]
"""


def cell(fault: Fault, who: str) -> str:
    """The cell in which ``fault`` happens on the ranks ``who``, after two good steps."""
    return f"%%distributed\ntake(trainer, 2)\nbad = {WHO[who]}\n{fault.code}"


def one_device_losses(steps: int) -> list[float]:
    """What ``take`` gives on one device with the batches of all ranks, from the first step on."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), *blocks, nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        shares = []
        for rank in range(NUM_RANKS):
            g = torch.Generator().manual_seed(1000 * step + rank)
            shares.append((torch.randn(8, 16, generator=g), torch.randn(8, 4, generator=g)))
        inputs, targets = (torch.cat(parts) for parts in zip(*shares, strict=True))
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses
