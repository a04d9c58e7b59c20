"""Start, stop, death: what runs, what listens, and what is left."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from notebook import Notebook

import nbtrain as nt
from nbtrain.cluster import runtime
from nbtrain.errors import CellError, NotStartedError, RankDiedError, SessionError, StartError, UsageError


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of this test's own for temporary files: what is left in it is left by us."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def gone(processes: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Those that still live after ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    alive = processes
    while alive and time.monotonic() < deadline:
        alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.05)
    return alive


def test_a_session_starts_runs_and_leaves_nothing(scratch: Path) -> None:
    before = descendants()
    session = nt.Session(2)
    assert not session.started
    with session:
        assert nt.session() is session
        assert session.run("rank") == [0, 1]
        ours = descendants()
        listening = [c for p in ours for c in p.net_connections(kind="tcp") if c.status == psutil.CONN_LISTEN]
        assert listening
        assert {c.laddr.ip for c in listening} == {"127.0.0.1"}
        ports = {c.laddr.port for c in listening}
    assert descendants() == before
    assert list(scratch.glob(f"{runtime.PREFIX}*")) == []
    still = {c.laddr.port for c in psutil.net_connections(kind="tcp") if c.status == psutil.CONN_LISTEN}
    assert not ports & still
    with pytest.raises(NotStartedError, match="start"):
        nt.session()


def test_the_first_use_starts_and_stop_may_be_repeated() -> None:
    session = nt.Session(1)
    assert session.run("world_size") == [1]
    session.stop()
    session.stop()


def test_one_session_a_kernel_and_a_second_start_changes_nothing() -> None:
    with nt.Session(1) as session:
        assert session.start() is session
        assert session.start(n=1) is session
        with pytest.raises(SessionError, match="restart -n 2"):
            session.start(n=2)
        with pytest.raises(SessionError, match="stop first"):
            nt.Session(1).start()
        assert session.run("rank") == [0]


def test_restart_keeps_the_options_and_takes_new_ones() -> None:
    with nt.Session(1, threads=1) as session:
        session.run("kept = 1")
        session.restart(n=2)
        assert session.run("('kept' in globals(), world_size, torch.get_num_threads())") == [(False, 2, 1)] * 2
        with pytest.raises(UsageError, match="no option 'm'"):
            session.restart(m=2)
        assert session.run("world_size") == [2, 2]


def test_values_from_python() -> None:
    with nt.Session(2) as session:
        session.push({"x": 3})
        assert session.run("x + rank", "1") == [4]
        assert session.pull("x") == [3, 3]
        with pytest.raises(CellError, match="ZeroDivisionError on ranks 0-1"):
            session.run("1 / 0")
        with pytest.raises(SyntaxError):
            session.run("1 +")
        handle = session.run("import time; time.sleep(0.2); rank", block=False)
        assert handle.result(timeout=10) == [0, 1]


def test_a_rank_that_dies_is_named_and_the_others_go_on() -> None:
    with nt.Session(2) as session:
        session.run("kept = 5")
        began = time.monotonic()
        with pytest.raises(RankDiedError, match=r"rank 1 died \(SIGKILL\) .* Rank 0 kept"):
            session.run("import os, signal, time\nif rank: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(0.2)")
        assert time.monotonic() - began < 5
        assert session.run("kept", "0") == [5]
        with pytest.raises(RankDiedError, match="restart"):
            session.run("1")
        assert "dead (SIGKILL)" in repr(session.status())
        assert session.restart().run("rank") == [0, 1]


def test_a_library_that_the_ranks_cannot_start_with_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descendants()
    monkeypatch.setenv("PYTHONHASHSEED", "not a number")
    with pytest.raises(StartError, match="PYTHONHASHSEED"):
        nt.Session(1).start()
    assert descendants() == before


def test_the_ranks_get_the_cores_that_there_are() -> None:
    cores = len(os.sched_getaffinity(0))
    with nt.Session(1) as session:
        assert session.run("torch.get_num_threads()") == [cores]
        session.restart(n=2 * cores)
        assert session.run("torch.get_num_threads()", "0") == [1]


def test_spawned_engines_are_the_same_ranks(scratch: Path) -> None:
    before = descendants()
    with nt.Session(2, launcher="spawn") as session:
        values = session.run("import os\nt = torch.ones(1); dist.all_reduce(t)\n(rank, os.environ['RANK'], t.item())")
        assert values == [(0, "0", 2.0), (1, "1", 2.0)]
    assert gone([p for p in descendants() if p not in before], within_s=5) == []
    assert list(scratch.glob(f"{runtime.PREFIX}*")) == []


WORKERS = """%%distributed
import time
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, i): return time.sleep(0.05) or torch.ones(1)
batches = iter(torch.utils.data.DataLoader(Slow(), num_workers=1))
next(batches)"""


@pytest.mark.parametrize(
    ("how", "launcher"),
    [
        (signal.SIGKILL, "local"),
        (signal.SIGTERM, "spawn"),
        pytest.param(signal.SIGKILL, "spawn", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "local", marks=pytest.mark.slow),
    ],
)
def test_nothing_outlives_a_killed_kernel(how: signal.Signals, launcher: str, scratch: Path) -> None:
    with Notebook() as nb:
        nb(f"%distributed start -n 2 --launcher {launcher}")
        assert nb(WORKERS).status == "ok"
        nb("%%distributed --no-block\ntime.sleep(60)")
        kernel = psutil.Process(nb.manager.provisioner.process.pid)  # type: ignore[union-attr]
        ours = kernel.children(recursive=True)
        assert len(ours) >= 6  # store, controller, two ranks, two workers
        kernel.send_signal(how)
        assert gone(ours, within_s=10) == []
    assert list(scratch.glob(f"{runtime.PREFIX}*")) == []


def test_a_notebook_kernel_is_restarted_while_a_cell_runs() -> None:
    with Notebook() as nb:
        nb("%distributed start -n 2")
        request = nb.send("%%distributed\nif rank: dist.barrier()\nimport time; time.sleep(600)")
        time.sleep(0.5)
        kernel = psutil.Process(nb.manager.provisioner.process.pid)  # type: ignore[union-attr]
        ours = kernel.children(recursive=True)
        nb.restart()
        assert request
        assert gone(ours, within_s=10) == []
        assert nb("%load_ext nbtrain").status == "ok"
        assert "started" in nb("%distributed start -n 2").stdout
        nb("%%distributed -o sums\nt = torch.ones(1); dist.all_reduce(t); t.item()")
        assert nb.value("sums") == [2.0, 2.0]


def test_spawned_ranks_that_die_are_replaced() -> None:
    with nt.Session(2, launcher="spawn") as session:
        session.run("kept = rank + 5")
        with pytest.raises(RankDiedError, match=r"rank 1 died .* line 1: import os; os._exit\(3\)"):
            session.run("import os; os._exit(3)", "1")
        session.restart(ranks="1")
        assert session.run("t = torch.ones(1); dist.all_reduce(t); t.item()") == [2.0, 2.0]
        assert session.run("kept", "0") == [5]


@pytest.mark.usefixtures("scratch")
def test_folders_of_dead_kernels_are_removed_and_others_kept() -> None:
    dead, alive = runtime.create(), runtime.create()
    (dead / "owner").write_text(f"{os.getpid()} 1.0")  # our pid, but of a process that started long ago
    runtime.remove_stale()
    assert not dead.exists()
    assert alive.exists()
    runtime.remove(alive)
