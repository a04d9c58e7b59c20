"""Schedules as data: equal to torch's own, and what does not fit is refused with what does."""

import re
import subprocess
import sys

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


def test_stages_go_round_the_ranks_or_down_and_up() -> None:
    loop, vee = make_schedule("looped_bfs", 2, 2, 3), make_schedule("zbv", 2, 3)
    assert [loop.stages_of(rank) for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert [vee.stages_of(rank) for rank in range(2)] == [(0, 3), (1, 2)]
    assert (loop.is_v_shaped, vee.is_v_shaped) == (False, True)


def test_a_schedule_reads_well() -> None:
    schedule = make_schedule("dualpipev", 2, 4)
    assert repr(schedule) == "Schedule('dualpipev', 2 ranks, 4 stages, 4 microbatches)"
    rank_1 = str(schedule).splitlines()[1]
    assert rank_1 == "rank 1: 1F0 2F0 1F1 2F1 1F2 2B0 [2F2 1B0] [1F3 2B1] [2F3 1B1] 2B2 1B2 2I3 1I3 2W3 1W3"


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_numbers_that_an_error_names_fit(name: str) -> None:
    refused = 0
    for p in range(1, 9):
        for m in range(1, 3 * p):
            try:
                make_schedule(name, p, m)
            except PlanError as error:
                refused += 1
                for number in re.findall(r"type num_microbatches=(\d+)(?: or num_microbatches=(\d+))?", str(error))[0]:
                    assert not number or make_schedule(name, p, int(number)).num_microbatches == int(number)
    assert (refused > 0) == (name not in ("gpipe", "looped_bfs", "zbv"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1p", 2, 4), "did you mean '1f1b'"),
        (("gpipe", 0, 4), "pp=0 must be at least 1"),
        (("gpipe", 2, 0), "num_microbatches=0 must be at least 1"),
        (("zbv", 2, 4, 1), "has 2 stages a rank, not num_virtual_stages=1"),
        (("interleaved_1f1b", 2, 4, 1), "at least 2 stages a rank"),
    ],
)
def test_what_is_no_schedule_is_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(PlanError) as raised:
        make_schedule(*arguments)
    assert message in str(raised.value)


def test_the_planner_needs_no_torch_and_no_numpy() -> None:
    code = (
        "import sys, nbtrain.planner.simulate, nbtrain.planner.timeline; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
