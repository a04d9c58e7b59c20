"""The process groups of a rank: made when the session starts, and made again when a cell has destroyed them.

The rendezvous is torchrun's: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name the session's store. Each group formed
there gets a prefix of its own (a generation, and a count within it), so that no key of an earlier group is found again.
"""

from __future__ import annotations

import datetime
import functools
import os
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nbtrain.events import RankInfo
from nbtrain.parallel.mesh import build_mesh
from nbtrain.plan import Plan

# A collective that a peer never joins ends after this; the session's interrupt is what frees it sooner.
TIMEOUT = datetime.timedelta(minutes=30)
_torch_init: Callable[..., None] = c10d.init_process_group
_generation = ""
_num_formed = 0  # groups that this process has formed in the current generation
_known: Any = None  # the default group that the session knows


def join(user_ns: dict[str, Any], *, backend: str, threads: int, seed: int, generation: str) -> dict[str, Any]:
    """Form the groups of ``generation`` and put the promised names into the rank's namespace.

    Returns `RankInfo` as a dict.
    """
    leave()
    device = _take_device(threads)
    begin(generation)
    binding = {"device_id": device} if device.type == "cuda" else {}
    _form(_backends(backend, device), timeout=TIMEOUT, **binding)
    torch.manual_seed(seed + dist.get_rank())  # a fork copies the random state: without this all ranks draw alike
    _fill(user_ns, device)
    remesh(user_ns)
    _accept_torchrun_code()
    return asdict(_describe(device, threads, user_ns["mesh"]))


def rejoin(user_ns: dict[str, Any], *, backend: str, generation: str) -> None:
    """Form the groups again; the namespace keeps everything but ``mesh``, which is rebuilt."""
    leave()
    begin(generation)
    _form(_backends(backend, user_ns["device"]), timeout=TIMEOUT)
    remesh(user_ns)


def remesh(user_ns: dict[str, Any]) -> None:
    """Build ``mesh`` again on the groups that a cell has formed itself."""
    global _known
    _known = dist.group.WORLD
    user_ns["mesh"] = build_mesh(user_ns.get("plan", Plan(zero=0)), user_ns["device"].type)


def leave() -> None:
    """Destroy the groups: the engine is about to stop or to form others."""
    if dist.is_initialized():
        dist.destroy_process_group()


def begin(generation: str) -> None:
    """Whatever groups are formed from now on belong to ``generation``: a cell, or a membership."""
    global _generation, _num_formed
    _generation, _num_formed = generation, 0


def state() -> str:
    """What became of the session's groups: "kept", "changed" by a cell that formed others, or "gone"."""
    if not dist.is_initialized():
        return "gone"
    return "kept" if dist.group.WORLD is _known else "changed"


def _form(backend: str | None, **options: Any) -> None:
    """`torch.distributed.init_process_group` on the session's store."""
    global _num_formed
    _num_formed += 1
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False)  # type: ignore[attr-defined]
    options["store"] = dist.PrefixStore(f"{_generation}/{_num_formed}", store)  # type: ignore[attr-defined]
    _torch_init(backend, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), **options)


def _accept_torchrun_code() -> None:
    """Let ``init_process_group`` succeed where the session has done already what the code asks for."""

    @functools.wraps(_torch_init)
    def init_process_group(backend: str | None = None, init_method: str | None = None, **options: Any) -> None:
        if dist.is_initialized() and (backend or "") in str(dist.get_backend_config()):
            return
        if dist.is_initialized() or init_method not in (None, "env://") or options.get("store"):
            _torch_init(backend, init_method, **options)  # theirs alone, or torch's error: there is a group already
            return
        for name in ("rank", "world_size"):  # the environment says the same
            options.pop(name, None)
        _form(backend, **options)

    for module in (dist, c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]


def _take_device(threads: int) -> torch.device:
    torch.set_num_threads(threads)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _backends(backend: str, device: torch.device) -> str:
    """nccl with a gloo group beside it for CPU tensors, where there are GPUs; else gloo."""
    chosen = backend if backend != "auto" else ("nccl" if device.type == "cuda" else "gloo")
    return "cpu:gloo,cuda:nccl" if chosen == "nccl" else chosen


def _fill(user_ns: dict[str, Any], device: torch.device) -> None:
    import nbtrain

    user_ns.update(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        device=device,
        dist=dist,
        torch=torch,
        nt=nbtrain,
    )


def _describe(device: torch.device, threads: int, mesh: Any) -> RankInfo:
    return RankInfo(
        rank=dist.get_rank(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        world_size=dist.get_world_size(),
        pid=os.getpid(),
        host=socket.gethostname(),
        device=_device_name(device),
        backend=dist.get_backend(),
        threads=threads,
        mesh=repr(mesh),
    )


def _device_name(device: torch.device) -> str:
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
