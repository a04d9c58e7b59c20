"""The process groups of a rank: made when the session starts, made again under the next generation's prefix."""

from __future__ import annotations

import datetime
import os
import socket
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.events import RankInfo
from nbtrain.parallel.mesh import build_mesh
from nbtrain.plan import Plan

# A collective that a peer never joins ends after this; the session's interrupt is what frees it sooner.
TIMEOUT = datetime.timedelta(minutes=30)


def join(user_ns: dict[str, Any], *, backend: str, threads: int, seed: int, generation: int) -> dict[str, Any]:
    """Form the groups of ``generation`` and put the promised names into the rank's namespace.

    The rendezvous is torchrun's: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name the session's store, and the
    generation takes the place of the restart count, so that no key of an earlier group is found again.

    Returns `RankInfo` as a dict.
    """
    device = _take_device(threads)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(generation)
    dist.init_process_group(_backends(backend, device), timeout=TIMEOUT, **_device_binding(device))
    torch.manual_seed(seed + dist.get_rank())  # a fork copies the random state: without this all ranks draw alike
    mesh = build_mesh(Plan(zero=0), device.type)
    _fill(user_ns, device, mesh)
    return asdict(_describe(device, threads, mesh))


def leave() -> None:
    """Destroy the groups: the engine is about to stop or to form others."""
    if dist.is_initialized():
        dist.destroy_process_group()


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


def _device_binding(device: torch.device) -> dict[str, Any]:
    return {"device_id": device} if device.type == "cuda" else {}


def _fill(user_ns: dict[str, Any], device: torch.device, mesh: Any) -> None:
    import nbtrain

    user_ns.update(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        device=device,
        mesh=mesh,
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
