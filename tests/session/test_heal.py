"""Ranks that die, or that nothing can reach any more: named at once, replaced, and the others keep what they hold."""

from __future__ import annotations

import os
import signal
import time

import pytest
from notebook import Notebook

ALIVE = "%%distributed -o sums\nt = torch.ones(1); dist.all_reduce(t); t.item()"
DEATHS = {
    "os.kill(os.getpid(), signal.SIGKILL)": "SIGKILL",
    "os.kill(os.getpid(), signal.SIGSEGV)": "SIGSEGV",
    "os.abort()": "SIGABRT",
    "os._exit(3)": "exit code 3",
}


@pytest.fixture(autouse=True)
def _goes_on(nb: Notebook):
    nb("%%distributed\nimport os, signal, time\nkept = ['by', rank]")
    yield
    output = nb(ALIVE)
    assert output.status == "ok", output.error
    assert nb.value("sums") == [4.0] * 4


def replaced(nb: Notebook, ranks: str, options: str = "") -> str:
    output = nb(f"%distributed restart --ranks {ranks} {options}")
    assert output.status == "ok", output.error
    return output.stdout


@pytest.mark.parametrize("how", DEATHS)
def test_a_death_names_rank_cause_and_line(nb: Notebook, how: str) -> None:
    output = nb(f"%%distributed\nif rank == 2:\n    x = 1\n    {how}\ndist.barrier()")
    assert output.ename == "RankDiedError"
    assert output.seconds < 5
    assert f"rank 2 died ({DEATHS[how]}) at Cell In[{output.count}], line 4" in output.error
    assert "Ranks 0-1,3 kept their state. Type %distributed restart --ranks 2" in output.error
    assert "closed" not in output.error
    refused = nb("%%distributed\n1")
    assert refused.ename == "RankDiedError"
    assert "restart --ranks 2" in refused.error
    assert replaced(nb, "2").startswith("rank 2 was replaced in ")
    nb("%%distributed -o held\n'kept' in globals() and kept")
    assert nb.value("held") == [["by", 0], ["by", 1], False, ["by", 3]]


def test_a_death_from_outside_names_the_line_that_ran(nb: Notebook) -> None:
    nb("%%distributed -o pids\nos.getpid()")
    pid = nb.value("pids")[1]
    request = nb.send("%%distributed\ndef spin():\n    while True:\n        time.sleep(0.01)\nspin()")
    time.sleep(1.0)  # it shall be in the middle
    os.kill(pid, signal.SIGKILL)
    nb.interrupt()
    assert nb.wait(request).ename in ("RankDiedError", "CellInterrupted")
    error = nb("%%distributed\n1").error
    assert "rank 1 died (SIGKILL) at Cell In[" in error
    assert ", line 4: time.sleep(0.01)" in error
    replaced(nb, "1")


def test_several_ranks_and_those_that_died_besides(nb: Notebook) -> None:
    nb("%%distributed\nif rank in (0, 3): os._exit(1)")
    assert replaced(nb, "3").startswith("ranks 0,3 were replaced in ")
    nb("%%distributed -o held\n'kept' in globals()")
    assert nb.value("held") == [False, True, True, False]


def test_definitions_are_replayed_and_nothing_else(nb: Notebook) -> None:
    nb("""%%distributed
import math
from collections import (OrderedDict as Ordered,
                         deque)
lr, names = 1e-3, ["a", "b"]
def area(r): return math.pi * r * r
class Thing:
    size = 3
total = sum(range(10)); print("never again")
%time other = 3
if True:
    hidden = 1""")
    nb("%%distributed -r 0,1\ndef only_two(): pass")
    nb("%%distributed\nlr = 5e-3; own = [rank * 2]; names.append('c')")
    nb("%%distributed\nif rank == 2: os._exit(0)")
    said = replaced(nb, "2", "--replay")
    assert "never again" not in said
    names = ["math", "Ordered", "lr", "names", "area", "Thing", "total", "hidden", "only_two", "own"]
    nb(f"%%distributed -o there\n[name for name in {names} if name in globals()]")
    assert nb.value("there")[2] == [
        *names[:8],
        "own",
    ]  # numbers and lists that are the same on all others come from there
    assert nb.value("there")[1] == names
    nb("%%distributed -o values\n(lr, names, total, hidden, own[0])")
    assert nb.value("values") == [(5e-3, ["a", "b", "c"], 45, 1, 2 * rank) for rank in range(4)]
    assert "total" not in said  # nor is anything missing
    output = nb("%%distributed\narea(1) if rank == 2 else 0; area('x') if rank == 2 else 0")
    assert "TypeError" in output.error


def test_a_definition_that_fails_is_told(nb: Notebook) -> None:
    nb("%%distributed\nclass Once:\n    os.mkdir(f'/tmp/nbtrain-once-{os.getppid()}-{rank}')\ndef later(): return 5")
    nb("%%distributed\nif rank == 2: os._exit(0)")
    assert "rank 2: Cell In[" in replaced(nb, "2", "--replay")
    nb("%%distributed -o five\nos.rmdir(f'/tmp/nbtrain-once-{os.getppid()}-{rank}')\nlater()")
    assert nb.value("five") == [5] * 4


def test_a_rank_that_lives_is_replaced_too_and_the_plan_is_there(nb: Notebook) -> None:
    nb("%%distributed --plan zero=3\n1")
    nb("%%distributed --no-block --name loop\nwhile True: time.sleep(0.1)")
    assert replaced(nb, "-1").startswith("rank 3 was replaced")
    nb("%%distributed -o plans\n(plan.zero, mesh.shape)")
    assert len(set(map(str, nb.value("plans")))) == 1
    assert nb("loop.wait(5)").ename in ("RankDiedError", "CellError")


def test_the_second_interrupt_replaces_what_nothing_reaches(nb: Notebook) -> None:
    request = nb.send("%%distributed\nif rank == 1: sum(range(10**13))\ndist.barrier()")  # holds the interpreter
    time.sleep(0.7)
    nb.interrupt()
    time.sleep(0.7)
    nb.interrupt()
    output = nb.wait(request)
    assert output.seconds < 10
    assert output.error == "KeyboardInterrupt: interrupted; rank 1 did not answer, and was replaced"
    nb("%%distributed -o held\n'kept' in globals()")
    assert nb.value("held") == [True, True, True, True]  # an assignment that calls nothing is replayed


def test_the_verb_interrupts_harder_the_second_time(nb: Notebook) -> None:
    nb("%%distributed --no-block --name deaf\nif rank == 1: sum(range(10**13))\ndist.barrier()")
    time.sleep(0.7)  # rank 1 shall hold its interpreter by now
    assert "interrupted ranks" in nb("%distributed interrupt").stdout
    assert "type %distributed interrupt again to replace it" in nb("%%distributed\n1").error
    assert "rank 1 was replaced" in nb("%distributed interrupt").stdout
    assert "rank 1 was replaced" in nb("deaf.wait(5)").error


def test_a_stopped_rank_goes_on_and_keeps_its_state(nb: Notebook) -> None:
    request = nb.send("%%distributed\nif rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\ndist.barrier()")
    time.sleep(0.7)
    nb.interrupt()
    assert nb.wait(request).error == "KeyboardInterrupt: interrupted on ranks 0-3; they kept their state"
    nb("%%distributed -o held\nkept")
    assert nb.value("held") == [["by", rank] for rank in range(4)]


def test_restarts_that_cannot_be(nb: Notebook) -> None:
    everything = nb("%distributed restart --ranks all --replay").stdout
    assert everything.startswith("ranks 0-3 were replaced in ")
    assert "what the ranks held is gone" in everything
    assert "leave the other options away" in nb("%distributed restart --ranks 2 -n 3").error
    assert "--ranks 2 --replay" in nb("%distributed restart --replay").error
    assert "rank" in nb("%distributed restart --ranks 9").error


def test_out_of_memory_on_one_rank_is_first_and_gives_back(nb: Notebook) -> None:
    output = nb("""%%distributed
import weakref
def fill():
    big = torch.zeros(1000)
    globals()['ref'] = weakref.ref(big)
    if rank == 2: raise torch.OutOfMemoryError("CUDA out of memory")
fill(); dist.barrier()""")
    assert "OutOfMemoryError" in output.error.splitlines()[0]
    assert "rank 2" in output.error.splitlines()[0]
    nb("%%distributed -o alive\nref() is not None")
    assert nb.value("alive") == [False] * 4
