"""Step time of pipelines by `Trainer.step` against pipelines that are written by hand on torch's stages.

Both live in the same ranks and the same process group, and train in turn, a few steps each.
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
import sys, time
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
        ", reshard=True",
    ),
)


def run(rounds: int = 12) -> list[Row]:
    return [_compare(contest, rounds) for contest in CONTESTS]


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
