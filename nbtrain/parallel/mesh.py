"""The one map of all mesh axes.

::

    axis           ranks along it hold                         talk by
    pp             other stages of the model                   send and receive at stage boundaries
    dp_replicate   the same states, another part of the batch  all-reduce of gradients
    dp_shard       other shards, another part of the batch     all-gather, reduce-scatter
    tp             other parts of each layer, the same batch   all-reduce inside layers

Outermost first, so that tensor-parallel peers are neighbours. A rank's number is its coordinate read as a number
with these axes as digits.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nbtrain.plan import Plan
from nbtrain.plan.degrees import AXES


def world_size() -> int:
    """The number of ranks; 1 where no process group exists."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's rank; 0 where no process group exists."""
    return dist.get_rank() if dist.is_initialized() else 0


def build_mesh(plan: Plan, device_type: str | None = None) -> DeviceMesh | None:
    """The mesh of ``plan`` over all ranks, with the axes ``pp``, ``dp_replicate``, ``dp_shard``, ``tp``.

    A second call with the same degrees gives the same mesh, as long as the default group lives: a cell that is run
    again makes no new groups. Collective the first time.

    Args:
        plan: Resolved against the world size here.
        device_type: "cpu" or "cuda"; None takes what the default group communicates.

    Returns:
        None where no process group exists: one device.

    Raises:
        PlanError: The degrees do not multiply to the world size.
    """
    degrees = plan.resolve(world_size()).degrees
    if not dist.is_initialized():
        return None
    return _mesh(dist.group.WORLD, device_type or default_device_type(), tuple(degrees.values()))


@functools.lru_cache(maxsize=16)
def _mesh(world: dist.ProcessGroup | None, device_type: str, shape: tuple[int, ...]) -> DeviceMesh:
    # `world` is part of the key only: groups die with the default group
    return init_device_mesh(device_type, shape, mesh_dim_names=AXES)


def default_device_type() -> str:
    """ "cuda" when the default group can move CUDA tensors, else "cpu"."""
    return "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend_config() else "cpu"


def device_of(mesh: DeviceMesh | None) -> torch.device | None:
    """Where this rank's part of a model lives; None leaves it where it is."""
    if mesh is None:
        return None
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The one axis over all data-parallel ranks, in the order in which they take their shares of a batch."""
    if mesh["dp_replicate"].size() == 1:
        return mesh["dp_shard"]
    if mesh["dp_shard"].size() == 1:
        return mesh["dp_replicate"]
    return mesh["dp_replicate", "dp_shard"]._flatten("dp")


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """What FSDP shards over: one axis, or two with replicas (HSDP)."""
    return mesh["dp_shard"] if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", "dp_shard"]


def data_coordinate(plan: Plan, of_rank: int) -> int:
    """Which share of a global batch a rank takes, in ``range(plan.dp)``; peers along pp and tp take the same.

    Args:
        plan: Resolved.
        of_rank: In ``range(plan.world_size)``.
    """
    return of_rank // plan.tp % plan.dp
