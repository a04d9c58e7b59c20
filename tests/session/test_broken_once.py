"""What has broken a session once: each must end in a clear error, and the next cell must run."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from notebook import Notebook, Output, plain

import nbtrain as nt
from nbtrain.errors import RankDiedError

ALIVE = "%%distributed -o sums\nt = torch.ones(1); dist.all_reduce(t); t.item()"


def alive(nb: Notebook) -> bool:
    output = nb(ALIVE)
    assert output.status == "ok", output.error
    return nb.value("sums") == [4.0] * 4


def interrupted(nb: Notebook, code: str, after_s: float, times: int = 1) -> Output:
    request = nb.send(code)
    for _ in range(times):
        time.sleep(after_s)
        nb.interrupt()
    return nb.wait(request, timeout=60)


def test_an_interrupt_in_the_middle_of_sharding_costs_that_model_only(nb: Notebook) -> None:
    output = nb("""%%distributed
class Odd(torch.nn.Sequential):
    def register_forward_hook(self, *args, **options): raise KeyboardInterrupt  # it falls inside
odd = Odd(torch.nn.Linear(4, 4))
nt.parallelize(odd, nt.Plan(zero=3))""")
    assert output.status == "error"
    interrupted(nb, "%%distributed\nif rank == 1: dist.barrier()\nelse: import time; time.sleep(99)", 0.7)
    assert alive(nb)


@pytest.mark.parametrize("after_s", [0.02, 0.1, 0.2, 0.3])
def test_an_interrupted_replacement_is_done_once_more(nb: Notebook, after_s: float) -> None:
    output = interrupted(nb, "%distributed restart --ranks 1 --replay", after_s)
    if output.status == "error":
        assert "type %distributed restart --ranks 1 --replay once more" in output.error
        assert "once more" in nb(ALIVE).error
        assert nb("%distributed restart --ranks 1 --replay").stdout.startswith("rank 1 was replaced")
    assert alive(nb)


def test_a_rank_that_dies_while_a_cell_is_sent_is_told(nb: Notebook) -> None:
    for pause_s in (0.0, 0.002, 0.005, 0.01, 0.02):
        nb("%%distributed -o pids\nimport os\nos.getpid()")
        os.kill(nb.value("pids")[3], signal.SIGKILL)
        time.sleep(pause_s)
        output = nb("%%distributed -o ranks\nrank", timeout=20)
        assert output.ename == "RankDiedError", output.error or output.status
        nb("%distributed restart --ranks 3")
    assert alive(nb)


def test_a_rank_that_dies_while_another_is_replaced_is_told(nb: Notebook) -> None:
    nb("%%distributed -o pids\nimport os\nos.getpid()")
    pid = nb.value("pids")[2]
    request = nb.send("%distributed restart --ranks 1")
    time.sleep(0.25)
    os.kill(pid, signal.SIGKILL)
    output = nb.wait(request)
    if output.status == "error":
        assert "rank 2 died (SIGKILL)" in output.error
        assert "restart --ranks" in output.error
    assert nb("%distributed restart --ranks 1,2").status == "ok"
    assert alive(nb)


def test_awaiting_is_interrupted(nb: Notebook) -> None:
    for code in ("await asyncio.sleep(60)", "await asyncio.sleep(0)\nwhile True: pass"):
        output = interrupted(nb, f"%%distributed\nimport asyncio\n{code}", 0.7)
        assert output.error == "KeyboardInterrupt: interrupted on ranks 0-3; they kept their state"
    assert alive(nb)


def test_ranks_that_are_all_deaf_are_all_replaced(nb: Notebook) -> None:
    code = "import time\ndef f(): return 3\nwhile True:\n    try: time.sleep(30)\n    except BaseException: pass"
    output = interrupted(nb, f"%%distributed\n{code}", 0.8, times=2)
    assert output.error == "KeyboardInterrupt: interrupted; ranks 0-3 did not answer, and were replaced"
    nb("%%distributed -o three\nf()")
    assert nb.value("three") == [3] * 4
    assert alive(nb)


def test_a_group_of_ones_own_says_that_it_has_ended(nb: Notebook) -> None:
    nb("%%distributed\ng = dist.new_group([0, 1])\nif rank == 1: raise ValueError\ndist.barrier()")
    output = nb("%%distributed\nif rank < 2: dist.all_reduce(torch.ones(1), group=g)")
    # torch's log of the error fails over the group, and makes another error of it
    assert "SessionError: this process group has ended" in plain(output.error)
    assert alive(nb)


def test_lambdas_are_replayed(nb: Notebook) -> None:
    nb("%%distributed\ntwice = lambda x: 2 * x")
    nb("%distributed restart --ranks 2 --replay")
    nb("%%distributed -o four\ntwice(2)")
    assert nb.value("four") == [4] * 4


@pytest.mark.parametrize("which", ["forkserver", "controller"])
def test_the_death_of_what_ranks_need_is_told(which: str) -> None:
    with nt.Session(2) as session:
        session.run("import os")
        server = next(p for p in psutil.Process().children() if "nbtrain.engine.forkserver" in p.cmdline())
        ranks = session.run("os.getpid()")
        others = [p for p in server.children() if p.pid not in ranks]
        # the controller is the one that has a child of its own, which beats the hearts
        victim = server if which == "forkserver" else next(p for p in others if p.children())
        everything = [server, *server.children(recursive=True)]
        victim.kill()
        with pytest.raises(RankDiedError, match="fork server ended" if which == "forkserver" else "controller ended"):
            session.run("import time; time.sleep(2)")
        session.restart()
        assert session.run("rank") == [0, 1]
        _, left = psutil.wait_procs(everything, timeout=10)
        assert left == []
