"""The session: ranks that stay alive between cells, and everything that is asked of them."""

from __future__ import annotations

import ast
import atexit
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
from IPython.core.getipython import get_ipython
from IPython.core.inputtransformer2 import TransformerManager

from nbtrain.cluster import devices, launch, runtime, sinks
from nbtrain.cluster.cell import Cell, Handle
from nbtrain.cluster.client import CallFailed, RankClient
from nbtrain.cluster.failures import death, ranks_text
from nbtrain.cluster.output import CellOutput, Publisher
from nbtrain.cluster.ranks import parse
from nbtrain.cluster.report import Holdings, Status
from nbtrain.errors import (
    BusyError,
    CellInterrupted,
    CellTimeoutError,
    NbtrainError,
    NotStartedError,
    RankDiedError,
    SessionError,
    StartError,
    UsageError,
    nearest,
)
from nbtrain.plan import Plan

DEFAULT_CPU_RANKS = 4
BACKENDS = ("auto", "gloo", "nccl")
START_TIMEOUT_S = 120.0
INTERRUPT_GRACE_S = 2.0  # Python code answers SIGINT in well under this
SEED = 0

_current: Session | None = None


def session() -> Session:
    """The session that runs in this kernel.

    Raises:
        NotStartedError: none runs.
    """
    if _current is None or not _current.started:
        raise NotStartedError("no ranks run; type %distributed start -n 4, or just run a %%distributed cell")
    return _current


def current_or_new() -> Session:
    """The session that runs, or one that has not started: for the magics, whose first cell starts it."""
    global _current
    if _current is None:
        _current = Session()
    return _current


class Session:
    """Ranks on this machine, or wherever ``launcher`` puts them.

    Args:
        n: number of ranks; by default one a GPU, and 4 where there is no GPU.
        gpus: which GPUs, by position ("0,1"); "none" for CPU ranks.
        backend: "auto" (nccl with GPUs, gloo without), "gloo" or "nccl".
        threads: intra-operation CPU threads a rank; by default cores / ranks, at least 1.
        launcher: "local" forks engines where that is safe; "spawn" starts them as separate programs; any other name
            is one of ipyparallel's launchers.

    It starts with its first use, or with `start`, or as a context manager, which also stops it.
    """

    def __init__(
        self,
        n: int | None = None,
        *,
        gpus: str | None = None,
        backend: str = "auto",
        threads: int | None = None,
        launcher: str = "local",
    ) -> None:
        self._options: dict[str, Any] = {
            "n": n,
            "gpus": gpus,
            "backend": backend,
            "threads": threads,
            "launcher": launcher,
        }
        self._reset()

    def _reset(self) -> None:
        self.world_size = 0
        self.ranks_info: list[dict[str, Any]] = []
        self._launch: launch.Launch | None = None
        self._client: RankClient | None = None
        self._publisher: Publisher | None = None
        self._runtime: Path | None = None
        self._processes: dict[int, psutil.Process] = {}
        self._dead: dict[int, str] = {}
        self._cells: list[Cell] = []
        self._num_cells = 0
        self._generation = 0
        self._stopping = False

    # -- life ----------------------------------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether ranks run."""
        return self._client is not None

    def start(self, n: int | None = None, **options: Any) -> Session:
        """Start the ranks; ``options`` are the constructor's. If they run already, say so and change nothing.

        Raises:
            UsageError: a value that cannot be.
            SessionError: another number of ranks runs.
            StartError: the ranks did not start; what did is gone again.
        """
        global _current
        given = {key: value for key, value in {"n": n, **options}.items() if value is not None}
        if self.started:
            return self._already_started(given)
        if _current is not None and _current is not self and _current.started:
            raise SessionError(f"{_current.headline()} in this kernel; type %distributed stop first")
        self._options = {**self._options, **_checked(given)}
        began = time.monotonic()
        try:
            self._open()
        except BaseException as problem:
            self.stop()
            if isinstance(problem, (NbtrainError, KeyboardInterrupt)):
                raise
            raise StartError(f"the ranks did not start: {type(problem).__name__}: {problem}") from problem
        _current = self
        self.start_seconds = time.monotonic() - began
        atexit.register(self.stop)
        return self

    def stop(self) -> None:
        """End every rank. No process, socket or file is left. Stopping what does not run is allowed."""
        global _current
        atexit.unregister(self.stop)
        self._stopping = True
        if self._client is not None:
            self._client.close(linger=0)
        if self._launch is not None:
            self._launch.stop()
        for cell in self._cells:
            for rank in cell.running:
                cell.on_death(rank, "the session was stopped")
        if self._publisher is not None:
            self._publisher.stop()
        if self._runtime is not None:
            runtime.remove(self._runtime)
        self._reset()
        if _current is self:
            _current = None

    def restart(self, n: int | None = None, **options: Any) -> Session:
        """Stop and start again, with the same options but for those given. What the ranks held is lost."""
        checked = _checked({key: value for key, value in {"n": n, **options}.items() if value is not None})
        self.stop()
        return self.start(**checked)

    def __enter__(self) -> Session:
        return self if self.started else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def headline(self) -> str:
        """One line: what runs."""
        if not self.started:
            return "no ranks run"
        first = self.ranks_info[0]
        kind = "GPU" if first["device"].startswith("cuda") else "CPU"
        dead = f", {ranks_text(self._dead)} dead" if self._dead else ""
        threads = f"{first['threads']} thread{'s' if first['threads'] > 1 else ''} each"
        return f"{self.world_size} {kind} ranks run ({first['backend']}, {threads}{dead})"

    # -- cells ---------------------------------------------------------------------------------------------------------

    def run(
        self,
        source: str,
        ranks: str = "all",
        *,
        plan: Plan | str | None = None,
        parallelize: Sequence[str] = (),
        push: Mapping[str, Any] | None = None,
        block: bool = True,
        name: str = "",
        timeout: float | None = None,
        values: bool = True,
        label: str = "",
        offset: int = 0,
    ) -> Any:
        """Run ``source`` as a cell on ``ranks``; output and errors appear in the cell that calls.

        Returns:
            The last expression's values, a list by rank, or None with ``values=False``; with ``block=False`` a `Handle`.

        Raises:
            SyntaxError: the source is not Python. Nothing was sent.
            BusyError: the ranks still run another cell.
            CellError: it raised on some rank.
            CellTimeoutError: it ran longer than ``timeout`` seconds, and was interrupted.
            RankDiedError: a rank's process ended.
        """
        check_syntax(source)
        self._ensure_started()
        targets = self._targets(ranks)
        if not block and parallelize:
            raise UsageError("--parallelize needs a blocking cell; leave --no-block away")
        if plan is not None:
            self._bind_plan(plan)
        if push:
            self.push(push, ranks)
        cell = self._send(source, targets, name, label, offset)
        if not block:
            return self._handle(cell)
        self._await(cell, timeout)
        if parallelize:
            holdings = self._call_all("parallelize_names", targets, list(parallelize))
            Holdings(dict(zip(targets, holdings, strict=True))).show()
        return self._values(cell) if values else None

    def interrupt(self, ranks: str = "all") -> list[int]:
        """Interrupt the ranks that run a cell, as Ctrl-C would; returns them."""
        wanted = set(self._targets(ranks, alive_only=False))
        busy = sorted({rank for cell in self._cells for rank in cell.running} & wanted)
        for rank in busy:
            self._signal(rank, signal.SIGINT)
        return busy

    def busy(self) -> dict[int, Cell]:
        """The cell that each busy rank runs."""
        self._cells = [cell for cell in self._cells if not cell.done]
        return {rank: cell for cell in self._cells for rank in cell.running}

    # -- values --------------------------------------------------------------------------------------------------------

    def push(self, values: Mapping[str, Any], ranks: str = "all") -> None:
        """Bind ``values`` by name in the ranks' namespaces."""
        self._ensure_started()
        self._call_all("push", self._targets(ranks), dict(values), what=f"cannot push {', '.join(values)}")

    def pull(self, name: str, ranks: str = "all") -> list[Any]:
        """The value of ``name`` on each of ``ranks``. Tensors arrive as NumPy arrays, 0-d ones as numbers."""
        self._ensure_started()
        return [found[name] for found in self._call_all("pull", self._targets(ranks), [name])]

    def ask(self, rank: int, name: str, timeout: float, **args: Any) -> Any:
        """Ask a rank's control thread, which answers while a cell runs; None if it does not in ``timeout`` seconds."""
        if self._client is None or rank in self._dead:
            return None
        try:
            return self._client.ask(rank, name, **args).result(timeout)
        except (TimeoutError, OSError, RuntimeError):
            return None

    def status(self) -> Status:
        """What runs where, as a table."""
        if not self.started:
            return Status("no ranks run; type %distributed start -n 4", [])
        busy = self.busy()
        rows = [self._row(info, busy.get(info["rank"])) for info in self.ranks_info]
        return Status(self.headline(), rows)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        request = self._request()
        self._runtime = runtime.create()
        self._publisher = Publisher()
        launcher: str = self._options["launcher"]
        self._launch = launch.start(launcher, request, self._runtime, self._rank_exited)
        self._launch.fork_engines()
        self._client = RankClient(self._launch.connection_info())
        self.world_size = request.num_ranks
        self._wait_for_ranks()
        self._processes = self._launch.processes()
        joining = {
            "backend": self._options["backend"],
            "threads": request.threads,
            "seed": SEED,
            "generation": self._generation,
        }
        self.ranks_info = self._call_all("join", range(self.world_size), **joining)

    def _request(self) -> launch.Request:
        visible = devices.visible_gpus() if self._options["backend"] != "gloo" else []
        gpus = devices.choose_gpus(self._options["gpus"], visible)
        count = self._options["n"] or len(gpus) or DEFAULT_CPU_RANKS
        if gpus and count > len(gpus):
            raise UsageError(
                f"-n {count}: there are {len(gpus)} GPUs and each rank needs one; "
                f"type -n {len(gpus)}, or -n {count} --gpus none for CPU ranks"
            )
        if self._options["backend"] == "nccl" and not gpus:
            raise UsageError("--backend nccl needs GPUs and there is none; type --backend gloo")
        threads = self._options["threads"] or devices.threads_per_rank(count)
        return launch.Request(count, tuple(gpus[:count]), threads)

    def _wait_for_ranks(self) -> None:
        arrived = threading.Event()
        client = self._need_client()

        def check(_: Any = None) -> None:
            if len(client.ids) >= self.world_size:
                arrived.set()

        client.on_membership(check)
        check()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not arrived.wait(0.05):
            if self._dead:
                rank, how = next(iter(self._dead.items()))
                raise StartError(f"rank {rank} ended at its start ({how}); its log:\n{self._log_tail(rank)}")
            if time.monotonic() > deadline:
                raise StartError(f"{len(client.ids)} of {self.world_size} ranks came in {START_TIMEOUT_S:.0f} s")

    def _log_tail(self, rank: int) -> str:
        path = (self._runtime or Path()) / f"rank-{rank}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-15:]) if path.exists() else ""

    def _already_started(self, given: dict[str, Any]) -> Session:
        changed = {
            k: v for k, v in _checked(given).items() if v != self._options[k] and (k, v) != ("n", self.world_size)
        }
        if changed:
            wanted = " ".join(f"--{key} {value}" if key != "n" else f"-n {value}" for key, value in changed.items())
            raise SessionError(
                f"{self.headline()} already; type %distributed restart {wanted}, which loses what they hold"
            )
        return self

    def _ensure_started(self) -> None:
        if not self.started:
            self.start()

    def _need_client(self) -> RankClient:
        if self._client is None:
            raise NotStartedError("no ranks run; type %distributed start")
        return self._client

    def _targets(self, spec: str, *, alive_only: bool = True) -> list[int]:
        targets = parse(spec, self.world_size)
        dead = [rank for rank in targets if rank in self._dead]
        if dead and alive_only:
            how = self._dead[dead[0]]
            raise RankDiedError(f"rank {dead[0]} died ({how}); type %distributed restart to start again")
        return targets

    def _send(self, source: str, targets: list[int], name: str, label: str, offset: int) -> Cell:
        self._refuse_if_busy(targets)
        client, publisher = self._need_client(), self._publisher
        assert publisher is not None
        assert self._runtime is not None
        self._num_cells += 1
        output = CellOutput(targets, sinks.current(), self._runtime / f"output-of-cell-{self._num_cells}.txt")
        cell = Cell(targets, output, publisher, name)
        self._cells.append(cell)
        for rank in targets:
            cell.requests[rank] = client.execute(rank, source, cell, label, offset)
        return cell

    def _refuse_if_busy(self, targets: Iterable[int]) -> None:
        busy = self.busy()
        taken = [rank for rank in targets if rank in busy]
        if taken:
            cell = busy[taken[0]]
            name = f" {cell.name!r}" if cell.name else " another cell"
            raise BusyError(
                f"{ranks_text(taken)} still run{'s' if len(taken) == 1 else ''}{name} (for {cell.seconds:.0f} s); "
                "wait for its handle, or type %distributed interrupt"
            )

    def _await(self, cell: Cell, timeout: float | None) -> None:
        try:
            finished = cell.wait(timeout)
        except KeyboardInterrupt:
            self._end(cell)
            raise CellInterrupted(self._after_interrupt(cell)) from None
        finally:
            cell.output.publish(final=cell.done)
        if not finished:
            self._end(cell)
            raise CellTimeoutError(f"the cell ran longer than {timeout:g} s; {self._after_interrupt(cell)}")
        error = cell.error()
        if error is not None:
            raise error

    def _end(self, cell: Cell) -> None:
        """Interrupt what still runs the cell and give it a moment."""
        for rank in cell.running:
            self._signal(rank, signal.SIGINT)
        cell.wait(INTERRUPT_GRACE_S)
        cell.output.publish(final=cell.done)

    def _after_interrupt(self, cell: Cell) -> str:
        stuck = cell.running
        if not stuck:
            return f"interrupted on {ranks_text(cell.ranks)}; they kept their state"
        return (
            f"{ranks_text(stuck)} did not answer within {INTERRUPT_GRACE_S:g} s, perhaps in a collective that others "
            "left; type %distributed restart to start again"
        )

    def _signal(self, rank: int, number: int) -> None:
        process = self._processes.get(rank)
        if process is not None:
            try:
                process.send_signal(number)  # psutil compares the create time first
            except psutil.NoSuchProcess:
                return
        elif self._client is not None:
            self._client.send_signal(number, targets=[rank], block=False)

    def _handle(self, cell: Cell) -> Handle:
        def interrupt() -> None:
            for rank in cell.running:
                self._signal(rank, signal.SIGINT)

        return Handle(cell, interrupt, lambda: self._values(cell))

    def _values(self, cell: Cell) -> list[Any]:
        return self._call_all("take_result", cell.ranks)

    def _bind_plan(self, plan: Plan | str) -> None:
        checked = Plan.parse(plan) if isinstance(plan, str) else plan
        checked.require_supported()
        resolved = checked.resolve(self.world_size)
        self._call_all("bind_plan", range(self.world_size), resolved.to_dict())

    def _call_all(self, name: str, ranks: Iterable[int], *args: Any, what: str = "", **kwargs: Any) -> list[Any]:
        """Call a function of `nbtrain.engine.calls` on each of ``ranks``; its values, by rank."""
        targets = list(ranks)
        self._refuse_if_busy(targets)
        client = self._need_client()
        try:
            answers = [client.call(rank, name, *args, **kwargs) for rank in targets]
        except (TypeError, ValueError, AttributeError, OSError) as problem:  # what pickling raises
            raise UsageError(f"{what or name}: {problem}") from problem
        return self._gather(answers)

    def _gather(self, answers: list[Future[Any]]) -> list[Any]:
        try:
            return [_interruptible(answer) for answer in answers]
        except CallFailed as failed:
            raise _as_own_error(failed) from None
        except ConnectionError as lost:
            raise RankDiedError(str(lost)) from None
        except KeyboardInterrupt:
            for rank in range(self.world_size):
                self._signal(rank, signal.SIGINT)
            raise

    def _rank_exited(self, rank: int, code: int) -> None:
        """The fork server saw a rank end. Called on its listener's thread."""
        if self._stopping:
            return
        how = death(code)
        self._dead[rank] = how
        for cell in self._cells:
            if rank in cell.running:
                cell.on_death(rank, how)
        if self._client is not None:
            self._client.abandon(rank, f"rank {rank} died ({how}); type %distributed restart to start again")

    def _row(self, info: dict[str, Any], cell: Cell | None) -> dict[str, str]:
        rank = info["rank"]
        state = f"dead ({self._dead[rank]})" if rank in self._dead else "idle"
        if cell is not None:
            state = f"runs {cell.name or 'a cell'} for {cell.seconds:.0f} s"
        return {
            "rank": str(rank),
            "device": info["device"],
            "state": state,
            "memory": _memory(self._processes.get(rank)),
            "pid": str(info["pid"]),
            "host": info["host"],
        }


def check_syntax(source: str) -> None:
    """Raise what Python would for a source that is not Python, before any rank sees it.

    Raises:
        SyntaxError: with the line of the source.
    """
    shell = get_ipython()
    transform = shell.transform_cell if shell is not None else TransformerManager().transform_cell
    compile(transform(source), "<cell>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    known = ("n", "gpus", "backend", "threads", "launcher")
    for name in options:
        if name not in known:
            raise UsageError(f"start has no option {name!r}; {nearest(name, known)}")
    for name in ("n", "threads"):
        value = options.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UsageError(f"{'-n' if name == 'n' else '--threads'} {value}: give a whole number from 1, e.g. 4")
    if options.get("backend", "auto") not in BACKENDS:
        raise UsageError(f"--backend {options['backend']}: {nearest(options['backend'], BACKENDS)}")
    return options


def _interruptible(answer: Future[Any]) -> Any:
    """Wait for an answer in steps that Ctrl-C can end on every platform."""
    while True:
        try:
            return answer.result(0.5)
        except TimeoutError:
            if answer.done():
                raise


def _as_own_error(failed: CallFailed) -> Exception:
    """A rank's own clear error as itself, another as an error that keeps its traceback."""
    import nbtrain.errors as own

    kind: Callable[[str], Exception] | None = getattr(own, failed.kind, None)
    if kind is not None:
        return kind(failed.message)
    if failed.kind == "NotImplementedError":
        return NotImplementedError(failed.message)
    from nbtrain.cluster.failures import group, render

    groups = group({failed.rank: failed.failure})
    return own.CellError(str(failed), groups, render(groups))


def _memory(process: psutil.Process | None) -> str:
    """The memory of a local process that is its own: PSS where the system tells it."""
    if process is None:
        return ""
    try:
        full = process.memory_full_info()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""
    used: int = getattr(full, "pss", full.rss)
    return f"{used / 2**20:.0f} MiB"
