"""Ranks that ask a person: input, breakpoints and a debugger after an error, in the cell that runs."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from notebook import Notebook, plain

TRAINING = """%%distributed
def losses(stop_at=None):
    torch.manual_seed(0)
    trainer = nt.Trainer(torch.nn.Linear(4, 2), nt.Plan(zero={zero}), loss_fn=torch.nn.functional.mse_loss,
                         optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    found = []
    for step in range(4):
        inputs = torch.full((3, 4), float(step + rank))
        if rank == 2 and step == stop_at:
            breakpoint()
        found.append(trainer.step(inputs, torch.zeros(3, 2)).item())
    return found
calm = losses()
"""


@pytest.fixture(autouse=True)
def _the_ranks_go_on(nb: Notebook):
    yield
    output = nb("%%distributed\nimport sys\nt = torch.ones(1); dist.all_reduce(t); (t.item(), sys.gettrace())")
    assert output.plain == ["(4.0, None)"], output.error


def test_a_rank_asks_and_gets_the_answer(nb: Notebook) -> None:
    output = nb("%%distributed -r 2\nprint('before')\nprint(float(input('rate? ')) * 2)", answers=["0.5"])
    assert output.prompts == ["rank 2> rate? "]
    assert output.lines == ["before", "1.0"]


def test_ranks_ask_one_after_another(nb: Notebook) -> None:
    output = nb("%%distributed -o got\ngot = input('n? ')\ngot", answers=["a", "b", "c", "d"])
    assert output.prompts == [f"rank {rank}> n? " for rank in range(4)]
    assert nb.value("got") == ["a", "b", "c", "d"]


def test_what_was_printed_stands_above_the_prompt(nb: Notebook) -> None:
    request = nb.send(
        "%%distributed\nprint('all')\nif rank == 1:\n    print('end', end='')\n    input()", allow_stdin=True
    )
    nb.await_prompt()
    nb.listen(0.2)
    assert nb.by_request[request].stdout == "all\n1| end"
    nb.client.input("")
    assert nb.wait(request).status == "ok"


def test_a_password_is_not_shown(nb: Notebook) -> None:
    request = nb.send("%%distributed -r 0\nimport getpass\nlen(getpass.getpass('key: '))", allow_stdin=True)
    asked = nb.client.get_stdin_msg(timeout=30)["content"]
    assert asked == {"prompt": "rank 0> key: ", "password": True}
    nb.client.input("secret")
    assert nb.wait(request).plain == ["6"]


def test_the_end_of_input(nb: Notebook) -> None:
    output = nb("%%distributed -r 0\ntry: input()\nexcept EOFError: print('no more')", answers=["\x04"])
    assert output.lines == ["no more"]


@pytest.mark.parametrize("code", ["input()", "breakpoint()\nx = 1"])
def test_a_page_without_input_is_told_so(nb: Notebook, code: str) -> None:
    output = nb(f"%%distributed -r 1\n{code}")
    assert plain(output.error).startswith("StdinNotImplementedError on rank 1: the rank asks for input, and this front")
    assert "--push" in output.error


def test_a_cell_that_nobody_waits_for_is_told_so(nb: Notebook) -> None:
    nb("%%distributed -r 1 --no-block --name job\ninput()")
    deadline = time.monotonic() + 20
    while not nb.value("job.done") and time.monotonic() < deadline:
        nb.listen(0.05)
    text = plain(nb("job.wait(20)", answers=[]).error)
    assert text.startswith("StdinNotImplementedError on rank 1: the rank asks for input, and nobody waits")
    assert "job.wait()" in text


def test_a_handle_that_is_waited_for_asks(nb: Notebook, tmp_path: Path) -> None:
    waits = f"while not os.path.exists('{tmp_path}/go'): time.sleep(0.05)\ntime.sleep(0.5)"
    nb(f"%%distributed -r 1 --no-block --name job\nimport os, time\n{waits}\ninput('now? ')")
    output = nb(f"open('{tmp_path}/go', 'w').close()\njob.result(20)", answers=["yes"])
    assert output.prompts == ["rank 1> now? "]
    assert output.plain == ["['yes']"]


def test_time_stands_still_while_a_person_thinks(nb: Notebook) -> None:
    request = nb.send("%%distributed --timeout 3\nif rank == 1: input()\ndist.barrier()", allow_stdin=True)
    nb.await_prompt()
    time.sleep(3.5)
    nb.client.input("")
    assert nb.wait(request).status == "ok"


@pytest.mark.parametrize("code", ["input()", "breakpoint()", "try: breakpoint()\n    except Exception: pass"])
def test_an_interrupt_while_it_asks(nb: Notebook, code: str) -> None:
    request = nb.send(f"%%distributed\nif rank == 1:\n    {code}\ndist.barrier()", allow_stdin=True)
    nb.await_prompt()
    nb.interrupt()
    began = time.monotonic()
    output = nb.wait(request, timeout=20)
    assert time.monotonic() - began < 5
    assert output.error.splitlines() == ["KeyboardInterrupt: interrupted on ranks 0-3; they kept their state"]


def test_a_debugger_after_an_error(nb: Notebook) -> None:
    nb("%%distributed\ndef f(n):\n    double = n * 2\n    return torch.nn.Linear(2, 2)(torch.ones(double))\nf(rank+2)")
    answers = ["p double", "a", "up", "down", "ll", "pp torch.ones(2)", "interact", "double + 100", "exit()", "w", "q"]
    output = nb("%distributed debug -r 2", answers=answers)
    text = plain(output.stdout)
    assert output.status == "ok", output.error
    assert output.prompts.count("rank 2 ipdb> ") == 9
    assert output.prompts.count("rank 2 In : ") == 2
    assert re.search(r"> Cell In\[\d+\]\(4\)f\(\)", text)  # the person's innermost frame, by the cell's own lines
    assert "----> 4     return torch.nn.Linear" in text
    assert "\n8\nn = 4\n" in text
    assert "tensor([1., 1.])" in text
    assert output.plain == ["108"]
    assert "ipykernel" not in text


def test_the_rank_that_failed_first_is_debugged(nb: Notebook) -> None:
    nb("%%distributed\nif rank == 3: raise ValueError('first')\ndist.barrier()")
    output = nb("%distributed debug", answers=["p rank", "q"])
    assert output.prompts == ["rank 3 ipdb> "] * 2
    assert "\n3\n" in output.stdout


def test_the_debugger_of_python(nb: Notebook) -> None:
    nb("%%distributed -r 1\nnumber = 41\n1 / 0")
    output = nb("%%distributed -r 1\n%debug", answers=["p number + 1", "q"])
    assert output.prompts == ["rank 1 ipdb> "] * 2
    assert "42" in output.stdout


def test_a_debugger_at_each_error(nb: Notebook) -> None:
    nb("%%distributed -r 0\n%pdb on")
    output = nb("%%distributed -r 0\nvalue = 6\n1 / 0", answers=["p value * 7", "q"])
    nb("%%distributed -r 0\n%pdb off")
    assert "42" in output.stdout
    assert plain(output.error).startswith("ZeroDivisionError on rank 0")


def test_nothing_to_debug(nb: Notebook) -> None:
    nb("%%distributed\nget_ipython().last_error = None")
    assert "no error to debug" in nb("%distributed debug", answers=[]).error
    assert "takes input" in nb("%%distributed -r 0\n1 / 0").error + nb("%distributed debug").error


@pytest.mark.parametrize("zero", [0, 3])
def test_a_breakpoint_in_a_training_loop(nb: Notebook, zero: int) -> None:
    assert nb(TRAINING.replace("{zero}", str(zero))).status == "ok"
    answers = ["p step, inputs.sum().item()", "n", "p len(found)", "c"]
    output = nb("%%distributed -o same\nlosses(stop_at=2) == calm", answers=answers)
    text = plain(output.stdout)
    assert output.status == "ok", output.error
    assert "2| (2, 48.0)" in text
    assert "2| 3" in text
    assert nb.value("same") == [True] * 4


def test_quitting_a_breakpoint_ends_the_cell(nb: Notebook) -> None:
    output = nb("%%distributed\nif rank == 2:\n    breakpoint()\n    x = 1\ndist.barrier()", answers=["q"])
    assert output.error == "BdbQuit on rank 2: the debugger was quit, and the cell with it"


def test_a_breakpoint_may_be_all_of_a_statement(nb: Notebook) -> None:
    output = nb("%%distributed -r 1\nx = 20\nbreakpoint()\ny = 22", answers=["p x", "n", "c"])
    text = plain(output.stdout)
    assert re.findall(r"-> (\d) (.*)", text) == [("3", "breakpoint()"), ("4", "y = 22")]
    assert "Return" not in text
    assert "__return__" not in nb("%%distributed -r 1\nsorted(globals())").plain[0]


def test_stepping_out_of_the_cell_ends_in_the_cell(nb: Notebook) -> None:
    output = nb("%%distributed -r 1\nimport pdb\npdb.set_trace()\nx = 1\ny = 2", answers=["n", "n", "n"])
    assert output.status == "ok", output.error
    assert re.findall(r"> Cell In\[\d+\]\((\d)\)", plain(output.stdout)) == ["3", "4", "5"]
    assert "hidden frame" not in output.stdout
    assert "interactiveshell" not in output.stdout


def test_a_collective_in_the_debugger_is_interrupted(nb: Notebook) -> None:
    request = nb.send("%%distributed\nif rank == 1: breakpoint()\nx = 1", allow_stdin=True)
    nb.await_prompt()
    nb.client.input("dist.barrier()")
    time.sleep(0.5)
    nb.interrupt()
    output = nb.wait(request, timeout=20)
    assert output.ename == "CellInterrupted", output.error


def test_a_breakpoint_in_a_loaders_worker_is_refused(nb: Notebook) -> None:
    cell = """%%distributed -r 0
class Stops(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        breakpoint()
        return torch.zeros(1)
list(torch.utils.data.DataLoader(Stops(), num_workers=1))"""
    text = plain(nb(cell, answers=[], timeout=30).error)
    assert "num_workers=0" in text


def test_a_rank_that_dies_while_it_asks() -> None:
    with Notebook() as notebook:
        notebook("%distributed start -n 2")
        notebook("%%distributed -o pids\nimport os, signal\nos.getpid()")
        pid = notebook.value("pids")[1]
        cell = f"%%distributed\nimport time\nif rank: input()\ntime.sleep(1)\nos.kill({pid}, signal.SIGKILL)"
        request = notebook.send(cell, allow_stdin=True)
        notebook.await_prompt()
        output = notebook.wait(request, timeout=30)  # nobody answers
        assert output.ename == "RankDiedError", output.error


def test_a_cell_that_will_hang_is_named_below_it(nb: Notebook) -> None:
    cell = "%%distributed\nif rank == 99:\n    dist.barrier()\nelse:\n    'nobody is 99'"
    assert nb(cell).lines == []
    cell = "%%distributed --timeout 0.5\nif rank == 1:\n    dist.barrier()"
    assert nb(cell).lines[0].startswith("lint, line 3: only rank 1 comes to dist.barrier, which waits for ranks 0,2-3")
    assert nb(cell).lines == []
