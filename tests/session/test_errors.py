"""What goes wrong on ranks, and what a person types wrong: clear, once, and nothing alive dies of it."""

from __future__ import annotations

import re

import pytest
from notebook import Notebook, plain


@pytest.fixture(autouse=True)
def _the_session_survives(nb: Notebook):
    yield
    output = nb("%%distributed\nt = torch.ones(1); dist.all_reduce(t); t.item()")
    assert output.plain == ["4.0"], output.error


def test_an_error_is_shown_once_with_its_ranks_and_its_line(nb: Notebook) -> None:
    output = nb("%%distributed\nx = 1\nif rank == 1:\n    open('/nonexistent/file')\nprint('fine')")
    text = plain(output.error)
    assert output.ename == "CellError"
    assert text.startswith("FileNotFoundError on rank 1: [Errno 2]")
    assert f"Cell In[{output.count}], line 4" in text
    assert "--> 4     open('/nonexistent/file')" in text
    assert output.lines == ["0,2-3| fine"]


def test_alike_errors_are_one_and_their_messages_are_by_rank(nb: Notebook) -> None:
    text = plain(nb("%%distributed\nraise ValueError(f'bad {rank % 2}')").error)
    assert text.count("raise ValueError") == 1
    assert "ValueError on ranks 0-3" in text
    assert "0,2| bad 0" in text


def test_the_first_failure_is_first(nb: Notebook) -> None:
    cell = """%%distributed
import time
kind = [OSError, KeyError, ValueError, EOFError][rank]
time.sleep(0.1 * (3 - rank))
raise kind(rank)"""
    assert re.findall(r"(\w+) on rank \d", plain(nb(cell).error)) == ["EOFError", "ValueError", "KeyError", "OSError"]


def test_library_frames_are_folded_and_the_cause_is_kept(nb: Notebook) -> None:
    cell = """%%distributed
try:
    torch.nn.Linear(2, 2)(torch.ones(3))
except RuntimeError as problem:
    raise LookupError('wrapped') from problem"""
    text = plain(nb(cell).error)
    assert "library frames" in text
    assert "which led to" in text
    assert "LookupError on ranks 0-3: wrapped" in text


def test_a_function_of_an_earlier_cell_is_found(nb: Notebook) -> None:
    nb("%%distributed\ndef broken():\n    return 1 / 0")
    text = plain(nb("%%distributed\nbroken()").error)
    assert len(re.findall(r"Cell In\[\d+\], line", text)) == 2
    assert "--> 3     return 1 / 0" in text


def test_run_all_stops_at_an_error(nb: Notebook) -> None:
    assert nb("%%distributed -r 0\n1 / 0").status == "error"


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("%%distributed\nfoo(", ["line 2", "never closed", "nothing ran"]),
        ("%%distributed\n", ["empty"]),
        ("%%distributed -r 0,7\n1", ["no rank 7", "0 to 3"]),
        ("%%distributed -r x\n1", ["-r 0,2"]),
        ("%%distributed -r 3-1\n1", ["-r 1-3"]),
        ("%%distributed -r\n1", ["expected one argument"]),
        ("%%distributed --plam zero=3\n1", ["did you mean '--plan'"]),
        ("%%distributed --plan zeroo=3\n1", ["did you mean 'zero'"]),
        ("%%distributed --plan dp_shard=3\n1", ["dp_shard=4"]),
        ("%%distributed --plan zero=0,algorithm=qadam\n1", ["algorithm='qadam' comes with a later release"]),
        ("%%distributed --push missing\n1", ["no 'missing'"]),
        ("%%distributed --parallelize nothing\n1", ["nothing", "not defined"]),
        ("%%distributed --timeout soon\n1", ["'soon'", "30"]),
        ("%%distributed -o 1a\n1", ["'1a'", "name"]),
        ("%%distributed -o a --no-block\n1", ["--name h"]),
        ("%%distributed -n 2\n1", ["restart -n 2"]),
        ("%%distributed -r 'a\n1", ["quot"]),
        ("%distributed strt", ["did you mean 'start'"]),
        ("%distributed stat", ["status"]),
        ("%%distributed -r 0 -r 1\n1", ["given twice"]),
        ("%%distributed -r 0,1 --parallelize model\n1", ["all 4 ranks", "without -r"]),
        ("%distributed start -n 0", ["'0'", "whole number"]),
        ("%distributed start -n 3", ["restart -n 3"]),
        ("%distributed start --bakend gloo", ["did you mean '--backend'"]),
        ("%distributed restart --backend nccl", ["GPU"]),
        ("%distributed restart --gpus 0", ["no GPU"]),
        ("%distributed pull nothing_here", ["no 'nothing_here'"]),
        ("%distributed auto maybe", ["auto on"]),
        ("%distributed resize 2", ["later release"]),
    ],
)
def test_bad_input_gets_one_line(nb: Notebook, cell: str, words: list[str]) -> None:
    output = nb(cell)
    text = plain(output.error) + output.stderr
    assert output.status == "error", output.stdout
    assert len(text.strip().splitlines()) == 1, text
    assert [word for word in words if word not in text] == [], text


def test_a_second_start_says_what_runs(nb: Notebook) -> None:
    output = nb("%distributed start -n 4")
    assert output.stdout == "4 CPU ranks (gloo, 1 thread each) run already\n"


def test_a_mesh_is_checked_on_the_ranks_too(nb: Notebook) -> None:
    text = plain(nb("%%distributed\nnt.Plan(dp_shard=3).resolve(world_size)").error)
    assert "PlanError on ranks 0-3" in text
    assert "dp_shard=4" in text


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("nt.Trainer(torch.nn.Linear(2, 2))", ["optimizer", "nt.Plan(zero=3)"]),
        ("nt.Trainer(torch.nn.Linear, optimizer=torch.optim.SGD)", ["a class", "Linear(...)"]),
        ("nt.Trainer(torch.nn.Linear(2, 2), optimiser=1)", ["'optimiser'", "did you mean 'optimizer'"]),
        ("nt.Trainer(torch.nn.Linear(2, 2), gradient_accumulation_steps=2)", ["accumulate="]),
        ("nt.loader(range(8), nt.Plan(), batch_size=4, suffle=True)", ["'suffle'", "did you mean 'shuffle'"]),
        ("net = torch.nn.Linear(2, 2)\nnt.Trainer(net, optimizer=torch.optim.SGD, scheduler='cos')", ["no scheduler"]),
    ],
)
def test_slips_with_the_trainer_say_what_to_type(nb: Notebook, code: str, words: list[str]) -> None:
    text = plain(nb(f"%%distributed\n{code}").error)
    assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize(
    "code", ["nt.Trainer(net, optimizer=torch.optim.SGD)", "trainer.step(x)", "trainer.state_dict()"]
)
def test_what_needs_all_ranks_is_refused_on_some(nb: Notebook, code: str) -> None:
    nb(
        "%%distributed\nnet = torch.nn.Linear(2, 2)\nx = torch.ones(2, 2)\n"
        "trainer = nt.Trainer(torch.nn.Linear(2, 2), optimizer=torch.optim.SGD, loss_fn=lambda y: y.mean())"
    )
    text = plain(nb(f"%%distributed -r 0,1\n{code}").error)
    assert "needs all 4 ranks" in text
    assert "without -r" in text


def test_a_plan_of_the_cell_is_the_default(nb: Notebook) -> None:
    output = nb(
        "%%distributed --plan zero=0 -o plans\n"
        "t = nt.Trainer(torch.nn.Linear(2, 2), optimizer=torch.optim.SGD)\n(plan.zero, t.plan.zero)"
    )
    assert output.status == "ok", output.error
    assert nb.value("plans") == [(0, 0)] * 4


def test_reloading_the_extension_loses_nothing(nb: Notebook) -> None:
    nb("%%distributed\nkept = 7")
    assert nb("%reload_ext nbtrain").status == "ok"
    assert nb("%%distributed\nkept").plain == ["7"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ValueError('\\ud800')", ["ValueError", "ud800"]),
        ("exit()", ["does not end", "%distributed stop"]),
        ("quit()", ["%distributed stop"]),
        ("raise SystemExit", ["SystemExit on ranks 0-3"]),
        ("e = ValueError('x'); e.add_note('a note'); raise e", ["a note"]),
        ("raise ExceptionGroup('some', [ValueError('one'), KeyError('two')])", ["ValueError: one", "KeyError"]),
        ("class Odd(Exception):\n    def __str__(self): raise KeyError\nraise Odd", ["Odd on ranks 0-3"]),
    ],
)
def test_odd_exceptions_are_shown_and_cost_nothing(nb: Notebook, code: str, words: list[str]) -> None:
    text = plain(nb(f"%%distributed\n{code}", timeout=20).error)
    assert [word for word in words if word not in text] == [], text


def test_a_recursion_is_folded(nb: Notebook) -> None:
    output = nb("%%distributed\ndef f(n): return f(n + 1)\nf(0)", timeout=20)
    text = plain(output.error)
    assert "RecursionError on ranks 0-3" in text
    assert " times" in text
    assert len(text.splitlines()) < 20


def test_a_cell_may_call_its_device_what_it_likes(nb: Notebook) -> None:
    nb("%%distributed\ndevice = 'cpu'")
    assert nb("%%distributed --plan zero=3\nplan.zero").plain == ["3"]
