"""Runs a function on forked ranks: about 0.2 s a case, and nothing is left behind.

The parent imports torch once and never computes with threads: a child of a process that did hangs or is killed
(FACTS, Fork). Each rank has one thread, its own random state and a gloo group on the loopback interface.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.parallel

torch.set_num_threads(1)

GRACE_S = 3.0
"""How long the others may go on after the first failure: they may wait for the rank that failed."""


KILLED = "no report: killed, by itself or after the time was up"


class RanksFailed(AssertionError):
    """Some rank raised, died or did not end; the message has every traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    group: bool = True,
    mortal: Collection[int] = (),
) -> list[Any]:
    """``function(*args)`` on ``world_size`` ranks at once; what each returned, by rank.

    Args:
        function: Runs in a fork: closures are fine, and what it returns is pickled.
        world_size: Number of ranks.
        *args: Given to each.
        timeout: In seconds, for all; then ranks are killed by pid.
        group: Whether the default process group exists.
        mortal: Ranks that may be killed by SIGKILL: None is returned for them.

    Raises:
        RanksFailed: With the tracebacks of all ranks that raised, by rank.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        store = Path(folder) / "store" if group else None
        gc.freeze()  # a collection in a child would copy all that it looks at
        children = [_fork(function, args, rank, world_size, store, timeout) for rank in range(world_size)]
        gc.unfreeze()
        results = _collect(children, timeout, mortal)
    failures = [f"--- rank {rank} ---\n{text}" for rank, (ok, text) in enumerate(results) if not ok]
    if failures:
        raise RanksFailed("\n".join(failures))
    return [value for _, value in results]


def _fork(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, store: Path | None, timeout: float
) -> tuple[int, int]:
    """The child's pid, and the pipe that it reports through."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _be_a_rank(function, args, rank, world_size, store, writer, timeout)
    os.close(writer)
    return pid, reader


def _be_a_rank(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    store: Path | None,
    writer: int,
    timeout: float,
) -> NoReturn:
    faulthandler.dump_traceback_later(max(timeout - 2, 1), file=sys.__stderr__)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        # fork copies the random state
        torch.manual_seed(1000 + rank)
        if store is not None:
            _join(store, rank, world_size, timeout)
        report = (True, function(*args))
        payload = pickle.dumps(report)
    except BaseException:
        payload = pickle.dumps((False, traceback.format_exc()))
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(payload)
    sys.stdout.flush()
    sys.stderr.flush()
    # no exit handlers: pytest's are the parent's
    os._exit(0)


def _join(store: Path, rank: int, world_size: int, timeout: float) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    # a function that communicates nothing could end before its peers have connected
    dist.barrier()


def _collect(children: list[tuple[int, int]], timeout: float, mortal: Collection[int]) -> list[tuple[bool, Any]]:
    """The report of each child, by rank; all children have ended when it returns."""
    reports: dict[int, bytes] = {rank: b"" for rank in range(len(children))}
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        for rank, (_, reader) in enumerate(children):
            selector.register(reader, selectors.EVENT_READ, rank)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, 1 << 20)
                reports[key.data] += chunk
                if not chunk:
                    selector.unregister(key.fd)
                    if not _succeeded(reports[key.data]) and not (key.data in mortal and not reports[key.data]):
                        deadline = min(deadline, time.monotonic() + GRACE_S)
    ends = [_end(pid, reader, reports[rank]) for rank, (pid, reader) in enumerate(children)]
    return [(True, None) if rank in mortal and end == (False, KILLED) else end for rank, end in enumerate(ends)]


def _succeeded(report: bytes) -> bool:
    return bool(report) and pickle.loads(report)[0] is True


def _end(pid: int, reader: int, report: bytes) -> tuple[bool, Any]:
    os.close(reader)
    if not report:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if report:
        ok, value = pickle.loads(report)
        return ok, value
    code = os.waitstatus_to_exitcode(status)
    return False, KILLED if code == -signal.SIGKILL else f"no report: exit code {code}"
