"""A person trains, changes the layout in the next cell, and goes on with the names that there were."""

from __future__ import annotations

import pytest
from notebook import Notebook

MODEL = """%%distributed
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x).tanh())

torch.manual_seed(3)
model = Net()
trainer = nt.Trainer(model, nt.Plan(zero=0), optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
                     loss_fn=nn.functional.mse_loss)
replica, head, weight = trainer.model, model.head, model.head.weight

def step():
    g = torch.Generator().manual_seed(trainer.num_steps)
    x, y = torch.randn(16, 8, generator=g), torch.randn(16, 4, generator=g)
    part = rank // trainer.plan.tp % trainer.plan.dp
    return trainer.step(x.chunk(trainer.plan.dp)[part], y.chunk(trainer.plan.dp)[part]).item()
"""
CHANGE = """%%distributed -o bound
trainer.replan(PLAN)
now = trainer.model
[replica is now, head is now.head, weight is now.head.weight, model in (now, getattr(now, "module", now))]
"""


def test_names_are_bound_to_the_new_layout(nb: Notebook) -> None:
    assert nb(MODEL).status == "ok"
    expected = losses(nb, 4)
    assert nb(MODEL).status == "ok"
    got = losses(nb, 1)
    for plan in ("zero=3", "zero=1,tp=2", "zero=0"):
        change = nb(CHANGE.replace("PLAN", repr(plan)))
        assert change.status == "ok", change.error
        assert change.stdout.count("laid out anew at step") == 1
        assert nb.value("bound") == [[True] * 4] * 4
        got += losses(nb, 1)
    assert got == pytest.approx(expected, rel=1e-5)


def losses(nb: Notebook, steps: int) -> list[float]:
    cell = nb(f"%%distributed -o losses\n[step() for _ in range({steps})]")
    assert cell.status == "ok", cell.error
    return list(nb.value("losses")[0])
