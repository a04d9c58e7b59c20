"""Schedules as data: equal to torch's own, and what does not fit is refused with what does."""

import pytest
from planner.torch_schedules import torch_steps

from nbtrain.errors import PlanError
from nbtrain.plan.fields import SCHEDULES
from nbtrain.planner.schedules import make_schedule

INTERLEAVED = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_torchs_own_and_both_refuse_the_same_numbers(name: str) -> None:
    stages = (2, 3, 4) if name in INTERLEAVED else (None,)
    numbers = [(p, m, v) for p in (1, 2, 3, 4, 5, 8) for m in range(1, 18) for v in stages] + [(16, 64, stages[0])]
    compared = 0
    for p, m, v in numbers:
        try:
            rank_of, steps = torch_steps(name, p, m, v)
        except ValueError:
            with pytest.raises(PlanError):
                make_schedule(name, p, m, v)
            continue
        schedule = make_schedule(name, p, m, v)
        assert schedule.rank_of == rank_of
        assert [list(steps) for steps in schedule.steps] == steps, (p, m, v)
        compared += 1
    assert compared >= 50
