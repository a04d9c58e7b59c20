"""The notebook of things that go wrong: each is told as it says, and the losses go on."""

from __future__ import annotations

import re
from typing import Any

import pytest
from executed import shown

pytestmark = pytest.mark.slow  # `make slow` runs it: other tests hold the same

NAME = "20_when_it_breaks.ipynb"


@pytest.mark.timeout(300)
def test_a_barrier_of_one_rank_is_warned_of_and_explained(cells: list[Any]) -> None:
    text = shown(cells, "--timeout 2")
    assert text.startswith("lint, line 3: only rank 0 comes to dist.barrier, which waits for ranks 1-3")
    assert "Ranks 1-3 have not joined: left Cell In[5] early" in text
    assert text.endswith(
        "CellTimeoutError: the cell ran longer than 2 s; interrupted on ranks 0-3; they kept their state"
    )


def test_where_says_who_waits(cells: list[Any]) -> None:
    assert "Rank 3 has not joined: still computing at Cell In[7], line 3: time.sleep(60)." in shown(cells, "where")


def test_ranks_that_do_not_call_the_same_are_told(cells: list[Any]) -> None:
    text = shown(cells, "6 if rank == 2")
    assert text.startswith("CollectiveError on ranks 0-3: ")
    assert "rank 2: all_reduce(SUM) of float32 [6]" in text


def test_a_dead_rank_is_replaced_and_the_losses_are_those_of_the_calm_run(cells: list[Any]) -> None:
    assert "rank 1 died (SIGKILL) at Cell In[11], line 4: os.kill" in shown(cells, "signal.SIGKILL)")
    assert "trainer goes on as if nothing had happened" in shown(cells, "restart --ranks 1")
    differences = [float(number) for number in re.findall(r"difference (\S+)", shown(cells, "difference"))]
    assert len(differences) == 10
    assert max(differences) < 1e-6
