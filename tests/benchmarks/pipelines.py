"""Step time of pipelines by `Trainer.step` against pipelines that are written by hand on torch's stages.

Both live in the same ranks and the same process group, and train in turn, a few steps each. And the bubble of
schedules, as replayed with the busy times of their actions, against the formulas (arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from measure import Row, Samples, ratio

import nbtrain as nt

HERE = Path(__file__).parent
BLOCK = 2  # steps between two turns
WARM_UP = 2  # turns
SETUP = """
import sys, time, warnings
warnings.simplefilter("ignore")  # FSDP2 warns of in-place operations that the model does not have
sys.path.insert(0, {here!r})
import plain_pipeline
from gpt import GPT, make_batch, token_mean
from nbtrain.parallel.mesh import data_coordinate

plan = nt.Plan.parse({plan!r})
torch.manual_seed(0)
trainer = nt.Trainer(
    GPT(), plan, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4, fused=True), loss_fn=token_mean
)
inputs, targets = make_batch(data_coordinate(trainer.plan, rank), batch_size={batch})
torch.manual_seed(0)
by_hand = plain_pipeline.{contender}(inputs, targets, {microbatches}{options})
steps = (lambda: trainer.step(inputs, targets), by_hand)


def train(which, num_steps):
    dist.barrier()
    began = time.perf_counter()
    for _ in range(num_steps):
        steps[which]()
    dist.barrier()
    return (time.perf_counter() - began) / num_steps


def mean_loss(which):
    # over data-parallel shares: ours on every rank, the other one's where the last stage is
    loss = steps[which]()
    held = torch.zeros(2) if loss is None else torch.stack([loss.detach(), torch.ones(())])
    dist.all_reduce(held)
    return float(held[0] / held[1])


first = [mean_loss(which) for which in (0, 1)]
second = [mean_loss(which) for which in (0, 1)]
"""
MEASURE = """
turns = [[(which, train(which, {block})) for which in ((0, 1) if turn % 2 else (1, 0))] for turn in range({turns})]
pairs = [(dict(turn)[0], dict(turn)[1]) for turn in turns]
"""
BUBBLES = """
import torch.nn as nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear({width}, {width})

    def forward(self, x):
        return torch.tanh(self.inner(x))


class Shift(nn.Module):
    # lets the first stage compute the gradient of what its layers get, as the others do, and costs next to nothing
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros({width}))

    def forward(self, x):
        return x + self.bias


def bubble(schedule):
    torch.manual_seed(0)
    plan = nt.Plan(pp={pp}, schedule=schedule, num_microbatches={microbatches})
    model = nn.Sequential(Shift(), *(Layer() for _ in range(4 * {pp})))
    trainer = nt.Trainer(model, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), loss_fn=nn.MSELoss())
    x, y = torch.randn({samples}, {width}), torch.randn({samples}, {width})
    trainer.step(x, y)
    trainer.timeline()
    for _ in range({steps}):
        trainer.step(x, y)
    return trainer.timeline(record=False).replayed.bubble


bubbles = {{schedule: bubble(schedule) for schedule in {schedules}}}
"""
STAGES, MICROBATCHES = 4, 8
FORMULAS = {
    "gpipe": (STAGES - 1) / MICROBATCHES,
    "1f1b": (STAGES - 1) / MICROBATCHES,
    "interleaved_1f1b": (STAGES - 1) / (2 * MICROBATCHES),
    "looped_bfs": (STAGES - 1) / (2 * MICROBATCHES),
}
"""Idle over computing time; with two stages a rank for the last two."""


@dataclass(frozen=True)
class Contest:
    """A plan of nbtrain, and the function of `plain_pipeline` that does the same by hand."""

    label: str
    plan: str
    contender: str
    num_ranks: int
    options: str = ""
    batch: int = 8  # samples of a data-parallel rank

    @property
    def num_microbatches(self) -> int:
        found = nt.Plan.parse(self.plan).num_microbatches
        assert found is not None, "each plan says it"
        return found


CONTESTS = (
    Contest("1F1B", "pp=2,schedule=1f1b,num_microbatches=4", "one_f_one_b", 2),
    Contest(
        "interleaved 1F1B",
        "pp=2,schedule=interleaved_1f1b,num_microbatches=4,num_virtual_stages=2",
        "interleaved",
        2,
    ),
    Contest(
        "1F1B x FSDP2 x tensor parallel",
        "pp=2,tp=2,zero=3,schedule=1f1b,num_microbatches=4",
        "three_dimensions",
        8,
        ", reshard=False",  # as nbtrain does: gathered once a step
    ),
)


def run(rounds: int = 12) -> list[Row]:
    return [*(_compare(contest, rounds) for contest in CONTESTS), *bubbles(steps=rounds)]


def bubbles(steps: int) -> list[Row]:
    """Of stages that take equally long."""
    sizes = {"pp": STAGES, "microbatches": MICROBATCHES, "width": 1024, "samples": 128 * MICROBATCHES}
    with nt.Session(STAGES, gpus="none", threads=1) as session:
        session.run(BUBBLES.format(**sizes, steps=steps, schedules=list(FORMULAS)))
        found: dict[str, float] = session.pull("bubbles", "0")[0]
    return [_bubble_row(schedule, found[schedule], formula) for schedule, formula in FORMULAS.items()]


def _bubble_row(schedule: str, found: float, formula: float) -> Row:
    error = abs(found - formula)
    return Row(
        what=f"replayed bubble, {schedule}, {STAGES} ranks, {MICROBATCHES} microbatches, equal stages",
        ours=f"{found:.3f}",
        peers=f"formula {formula:.3f}",
        result=f"off by {error:.3f}",
        target="at most 0.02",
        met=round(error, 3) <= 0.02,
    )


def _compare(contest: Contest, rounds: int) -> Row:
    threads = max(1, len(os.sched_getaffinity(0)) // contest.num_ranks)
    setup = SETUP.format(
        here=str(HERE),
        plan=contest.plan,
        batch=contest.batch,
        contender=contest.contender,
        microbatches=contest.num_microbatches,
        options=contest.options,
    )
    with nt.Session(contest.num_ranks, gpus="none", threads=threads) as session:
        session.run(setup)
        _require_same(session.pull("first", "0")[0] + session.pull("second", "0")[0])
        session.run(MEASURE.format(block=BLOCK, turns=WARM_UP + rounds))
        pairs: list[tuple[float, float]] = session.pull("pairs", "0")[0][WARM_UP:]
    mine, theirs = (Samples(tuple(column)) for column in zip(*pairs, strict=True))
    return _row(f"{contest.label}, {contest.num_ranks} ranks", mine, theirs)


def _require_same(losses: list[float]) -> None:
    """Both do the same steps: the losses before and after the first one are equal but for rounding."""
    for ours, theirs in zip(losses[::2], losses[1::2], strict=True):
        if abs(ours - theirs) > 1e-3 * abs(theirs):
            raise RuntimeError(f"the contenders train differently: losses {losses}")


def _row(label: str, mine: Samples, theirs: Samples) -> Row:
    throughput = ratio(theirs, mine)  # throughput is the inverse of time
    return Row(
        what=f"step time, {label}",
        ours=mine.text("ms", 0, 1e3),
        peers=f"by hand on torch's stages {theirs.text('ms', 0, 1e3)}",
        result=throughput.text("of its throughput", 3),
        target="at least 0.97",
        met=round(throughput.median, 3) >= 0.97,
    )


if __name__ == "__main__":
    from table import conditions_text, render

    print(f"{render(run(*(int(word) for word in sys.argv[1:])))}\n\n{conditions_text()}")
