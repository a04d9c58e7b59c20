"""Where each rank is while cells run, and the card below a cell that hangs."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable

import pytest
from notebook import Notebook, Output

LOOK = """import time, nbtrain
began = time.monotonic(); shown = nbtrain.session().where(); spent = time.monotonic() - began"""
LOADER = """class Slow(torch.utils.data.Dataset):
        def __len__(self): return 8
        def __getitem__(self, i): time.sleep(100)
    next(iter(torch.utils.data.DataLoader(Slow(), num_workers=1)))"""
TRAINER = """trainer = nt.Trainer(torch.nn.Linear(4, 4), nt.Plan(zero=3), loss_fn=torch.nn.functional.mse_loss,
                     optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
batch = torch.ones(2, 4), torch.ones(2, 4)
trainer.step(*batch)"""
HANGS = 2.0  # seconds of silence, in these tests


@pytest.fixture(scope="module", autouse=True)
def _quick(nb: Notebook) -> None:
    assert nb(f"%distributed restart --hang-after {HANGS}").status == "ok"
    assert nb("%%distributed\nimport time, os").status == "ok"


@pytest.fixture
def running(nb: Notebook):
    """Runs a cell that does not block, and ends it after the test."""

    def run(code: str) -> None:
        assert nb(f"%%distributed --no-block --name job\n{code}").status == "ok"

    yield run
    nb("job.interrupt(); job.wait(10)")
    output = nb("%%distributed\nt = torch.ones(1); dist.all_reduce(t); assert t.item() == 4")
    assert output.status == "ok", output.error


def where(nb: Notebook, *expected: str) -> str:
    """What `where` says, once it says what is expected."""
    deadline = time.monotonic() + 15
    while True:
        assert nb(LOOK).status == "ok"
        text: str = nb.value("repr(shown)")
        if all(part in text for part in expected):
            return text
        assert time.monotonic() < deadline, text
        time.sleep(0.1)


Run = Callable[[str], None]


@pytest.mark.parametrize("guard", ["cells", "off"])
def test_a_rank_is_missing(nb: Notebook, running: Run, guard: str) -> None:
    """Whether the guard holds the others back or they sit in gloo."""
    nb(f"%distributed guard {guard}")
    running("if rank != 2:\n    dist.all_reduce(torch.ones(4, 2))\nelse:\n    time.sleep(100)")
    text = where(nb, "Ranks 0-1,3 wait in all_reduce #", "Rank 2 has not joined: still computing at Cell In[")
    assert re.search(r"all_reduce #\d+ of float32 \[4, 2\] for \d", text)
    assert "line 5: time.sleep(100)" in text
    nb("%distributed interrupt")
    nb("job.wait(10)")
    nb("%distributed guard cells")


def test_it_is_quick_while_ranks_sit_in_gloo(nb: Notebook, running: Run) -> None:
    nb("%distributed guard off")
    running("for _ in range(300): dist.all_reduce(torch.ones(1))\nif rank: dist.barrier()\nelse:\n    while True: pass")
    where(nb, "Ranks 1-3 wait in barrier", "Rank 0 has not joined: still computing")
    spent = []
    for _ in range(5):
        nb(LOOK)
        spent.append(nb.value("spent"))
    print(f"\nwhere, 4 ranks in gloo: {min(spent) * 1000:.0f} to {max(spent) * 1000:.0f} ms")
    assert min(spent) < 0.2
    nb("%distributed interrupt")
    nb("job.wait(10)")
    nb("%distributed guard cells")


def test_a_rank_that_left_the_cell_early(nb: Notebook, running: Run) -> None:
    running("if rank != 1: dist.all_gather_object([None] * 4, rank)")
    where(nb, "Ranks 0,2-3 wait in all_gather_object", "Rank 1 has not joined: left 'job' early")


def test_a_rank_that_waits_for_its_loader(nb: Notebook, running: Run) -> None:
    running(f"if rank != 3: dist.barrier()\nelse:\n    {LOADER}")
    where(nb, "Rank 3 has not joined: waiting for its data in next(loader) at Cell In[")


def test_ranks_in_a_sharded_forward_which_one_left(nb: Notebook, running: Run) -> None:
    assert nb(f"%%distributed\n{TRAINER}").status == "ok"
    running("if rank != 0: trainer.step(*batch)")
    where(nb, "Ranks 1-3 wait in all_gather", "(in Trainer.step)", "Rank 0 has not joined: left 'job' early")


def test_a_smaller_group(nb: Notebook, running: Run) -> None:
    running(
        "pair = dist.new_group([0, 2])\nif rank == 0: dist.broadcast(torch.ones(3), 2, group=pair)\ntime.sleep(100)"
    )
    where(nb, "broadcast #1 of float32 [3] of ranks 0,2 for", "Rank 2 has not joined: still computing")


def test_a_message_that_nobody_receives(nb: Notebook, running: Run) -> None:
    running("if rank == 0: dist.send(torch.ones(3), 1)\nelse: time.sleep(100)")
    where(nb, "Rank 0 waits in send #", "Rank 1 has not joined: still computing")


def test_messages_do_not_put_numbers_apart(nb: Notebook, running: Run) -> None:
    """gloo counts them as operations of the group, on two ranks only."""
    nb("%distributed guard off")
    running("""if rank == 0: dist.send(torch.ones(3), 1)
if rank == 1: dist.recv(torch.ones(3), 0)
dist.monitored_barrier()
if rank != 3: dist.barrier()
else: time.sleep(100)""")
    text = where(nb, "Ranks 0-2 wait in barrier #")
    assert "ahead" not in text
    assert "behind" not in text
    nb("%distributed interrupt")
    nb("job.wait(10)")
    nb("%distributed guard cells")


def test_a_rank_that_does_not_answer(nb: Notebook, running: Run) -> None:
    """Stopped, as one that holds the interpreter in C code: it is reported, not waited for."""
    nb("%%distributed -o pids\nos.getpid()")
    pid = nb.value("pids[2]")
    running("if rank != 2: dist.barrier()\nelse: time.sleep(100)")
    where(nb, "Ranks 0-1,3 wait in barrier")
    os.kill(pid, signal.SIGSTOP)
    try:
        where(nb, "Rank 2 has not joined: no answer, as it is stopped")
        assert nb.value("spent") < 1.0
    finally:
        os.kill(pid, signal.SIGCONT)


def test_idle_ranks(nb: Notebook) -> None:
    output = nb("%distributed where")
    assert output.plain[0].splitlines()[1:] == ["rank  state  line  waits in", "0-3   idle"]


# -- the card ----------------------------------------------------------------------------------------------------------


def cards(output: Output) -> list[str]:
    """The texts of the card, in order."""
    messages = [m["content"] for m in output.messages if m["msg_type"] in ("display_data", "update_display_data")]
    ids = [(m.get("transient", {}).get("display_id") or "", m["data"]) for m in messages]
    return [data["text/plain"] for name, data in ids if re.fullmatch(r"nbtrain-card-\d+", name)]


def hang(nb: Notebook, code: str, seconds: float, options: str = "") -> Output:
    """Run a cell for so long, interrupt it, and give what it showed."""
    request = nb.send(f"%%distributed{options}\n{code}")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        nb.listen(deadline - time.monotonic())
    nb.interrupt()
    output = nb.wait(request)
    nb.listen(0.5)
    return output


def test_a_cell_that_hangs_gets_a_card(nb: Notebook) -> None:
    output = hang(nb, "if rank != 2: dist.barrier()\nelse: time.sleep(100)", 3 * HANGS)
    first, *_, last = cards(output)
    assert first.startswith("No output for ")
    assert "Rank 2 has not joined: still computing at Cell In[" in first
    assert "Kernel > Interrupt" in first
    assert last.startswith("Silent for ")  # what a saved notebook shows
    assert "Rank 2 has not joined" in last
    assert output.error.startswith("KeyboardInterrupt")


def test_a_cell_that_does_not_block_gets_one_too(nb: Notebook, running: Run) -> None:
    running("if rank == 1: dist.barrier()")
    output = nb.by_request[nb.last_id]
    deadline = time.monotonic() + 15
    while not cards(output) and time.monotonic() < deadline:
        nb.listen(0.5)
    assert "Ranks 0,2-3 have not joined: left 'job' early" in cards(output)[0]
    nb("job.interrupt()")
    nb.listen(2.0)
    assert cards(output)[-1].startswith("Silent for ")


def test_a_card_goes_when_the_cell_goes_on(nb: Notebook) -> None:
    output = nb(f"%%distributed\nif rank == 2: time.sleep({2.5 * HANGS})\ndist.barrier()\nprint('through')")
    assert output.status == "ok"
    assert output.lines[-1] == "through"
    nb.listen(1.0)
    assert cards(output)[-1].startswith("Silent for ")


CALM = {
    "all ranks compute": f"time.sleep({2.5 * HANGS})",
    "a slow loop": f"for _ in range(5):\n    if rank == 0: time.sleep({HANGS / 4})\n    dist.barrier()",
    "it prints": f"if rank == 2:\n    for i in range(10): time.sleep({HANGS / 4}); print(i)\ndist.barrier()",
    "all are in it": f"""large, go, end = torch.ones(20_000_000), torch.ones(1), time.time() + {2.5 * HANGS}
while go.item():
    dist.all_reduce(large)
    go.fill_(time.time() < end)
    dist.broadcast(go, 0)""",
}


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=name, marks=[pytest.mark.slow] * (name in ("all ranks compute", "it prints")))
        for name, code in CALM.items()
    ],
)
def test_a_slow_cell_that_is_right_gets_none(nb: Notebook, code: str) -> None:
    output = nb(f"%%distributed\n{code}")
    assert output.status == "ok", output.error
    assert cards(output) == []


def test_a_cell_whose_time_is_up_shows_where_it_was(nb: Notebook) -> None:
    output = nb("%%distributed --timeout 1\nif rank != 2: dist.barrier()\nelse: time.sleep(100)")
    assert "CellTimeoutError" in output.error
    assert cards(output)[0].startswith("Not done after 1 s:")
    assert "Rank 2 has not joined" in cards(output)[0]


def test_how_long_a_cell_may_be_silent_is_an_option(nb: Notebook) -> None:
    assert "--hang-after" in nb("%distributed start --hang-after 0").error
    assert "type %distributed restart --hang-after 5" in nb("%distributed start --hang-after 5").error


def test_the_buttons_ask_over_the_control_channel(nb: Notebook) -> None:
    """What the page's button sends, while the cell blocks the kernel."""
    pytest.importorskip("anywidget")
    nb("%%distributed -o pids\nos.getpid()")
    before = nb.value("pids")
    request = nb.send("%%distributed\nif rank != 2: dist.barrier()\nelse: time.sleep(100)")
    output = nb.by_request[request]
    deadline = time.monotonic() + 15
    while not cards(output) and time.monotonic() < deadline:
        nb.listen(0.5)
    views = [data for data in output.displays if "application/vnd.jupyter.widget-view+json" in data]
    assert len(views) == 1
    message = nb.client.session.msg("nbtrain_request", content={"verb": "restart", "rank": 2})
    nb.client.control_channel.send(message)
    assert nb.wait(request).error == "KeyboardInterrupt: interrupted; rank 2 was replaced"
    assert output.stdout.startswith("rank 2 was replaced in ")
    after = nb("%%distributed -o pids\nt = torch.ones(1); dist.all_reduce(t); assert t.item() == 4\nos.getpid()")
    assert after.status == "ok", after.error
    assert [a == b for a, b in zip(before, nb.value("pids"), strict=True)] == [True, True, False, True]


def test_a_dead_rank(nb: Notebook) -> None:
    """The last test: the session has three ranks from here on."""
    nb("%%distributed -o pids\nos.getpid()")
    os.kill(nb.value("pids[3]"), signal.SIGKILL)
    where(nb, "dead (SIGKILL)")
    assert json.dumps(nb("%distributed where").displays[0]["text/html"])
