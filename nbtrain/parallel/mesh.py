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

import math
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nbtrain.errors import ModelError
from nbtrain.parallel.adoption import FLAT, Construction, adopted, describe, refresh
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

    A second call with the same degrees gives the same mesh, as long as the default group lives or is formed again with
    all others: a cell that is run again makes no new groups. Collective the first time.

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
    return _mesh(_world(), device_type or default_device_type(), tuple(degrees.values()))


class Key(NamedTuple):
    """Which mesh is meant; ``at_home``: it stands on the session's groups, not on some that a cell formed instead."""

    at_home: bool
    device_type: str
    shape: tuple[int, ...]


@dataclass
class _Built:
    mesh: DeviceMesh
    construction: Construction
    world: weakref.ref[dist.ProcessGroup]


class _Home:
    """The session's own default group: the first, then each that `carry_over` found."""

    world: weakref.ref[dist.ProcessGroup] | None = None


_meshes: dict[Key, _Built] = {}


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "only asked for where there is one"
    return dist.group.WORLD


def _mesh(world: dist.ProcessGroup, device_type: str, shape: tuple[int, ...]) -> DeviceMesh:
    if _Home.world is None:
        _Home.world = weakref.ref(world)
    key = Key(_Home.world() is world, device_type, shape)
    built = _meshes.get(key)
    if built is None or built.world() is not world:
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
        # flattened at once: a mesh that stands moves nothing any more
        built = _meshes[key] = _Built(mesh, describe(mesh, _flat(mesh)), weakref.ref(world))
    return built.mesh


def is_shared(mesh: DeviceMesh | None) -> bool:
    """Whether `build_mesh` made it, so that a rank which takes a dead one's place has it too."""
    return any(built.mesh is mesh for key, built in _meshes.items() if key.at_home)


def standing_mesh(plan: Plan) -> DeviceMesh:
    """The mesh of ``plan`` that is there already. Moves nothing.

    Raises:
        ModelError: There is none.
    """
    shape = tuple(plan.resolve(world_size()).degrees.values())
    built = _meshes.get(Key(True, default_device_type(), shape))
    if built is None:
        raise ModelError(f"this rank has no mesh of {shape}")
    return built.mesh


def constructions() -> list[Construction]:
    """What a rank that takes a dead one's place needs to know of this rank's meshes; picklable."""
    return [built.construction for key, built in _meshes.items() if key.at_home]


def adopt(built_elsewhere: Sequence[Construction]) -> None:
    """Make `build_mesh` give the meshes that other ranks have, on groups that exist already. Moves nothing.

    Call it before the first `build_mesh`, when the groups were formed that these ranks had formed.
    """
    world = weakref.ref(_world())
    _Home.world = world
    for construction in built_elsewhere:
        if construction.stands:
            key = Key(True, construction.device_type, construction.shape)
            _meshes[key] = _Built(adopted(construction), construction, world)


def standing() -> list[Key]:
    """The meshes that work on the groups which exist now, formed again under the names that they had."""
    return [key for key, built in _meshes.items() if key.at_home and built.construction.stands]


def carry_over(common: Collection[Key]) -> None:
    """Groups were formed again: keep the meshes that every rank has, and forget the others.

    An interrupt may have caught some ranks while they built one.
    """
    _Home.world = weakref.ref(_world())
    for key in set(_meshes).difference(common):
        del _meshes[key]
    for built in _meshes.values():
        built.world = _Home.world
        refresh(built.mesh)


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
    return mesh["dp_replicate", "dp_shard"]._flatten(FLAT)


def _flat(mesh: DeviceMesh) -> tuple[str, ...]:
    """The axes that `data_mesh` flattens into one."""
    axes = ("dp_replicate", "dp_shard")
    return axes if all(mesh[axis].size() > 1 for axis in axes) else ()


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """What FSDP shards over: one axis, or two with replicas (HSDP)."""
    return mesh["dp_shard"] if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", "dp_shard"]


def replicas(plan: Plan, of_rank: int, *, optimizer: bool = False) -> list[int]:
    """The ranks that hold what ``of_rank`` holds of a model, itself among them.

    Args:
        plan: Resolved.
        of_rank: In ``range(plan.world_size)``.
        optimizer: What it holds of the optimizer's state, too.
    """
    ranks = torch.arange(math.prod(plan.degrees.values())).view(tuple(plan.degrees.values()))
    pp, _, shard, tp = (int(index) for index in (ranks == of_rank).nonzero()[0])
    alike = ranks[pp, :, shard, tp] if plan.zero >= (1 if optimizer else 2) else ranks[pp, :, :, tp].flatten()
    return [int(rank) for rank in alike]


def data_peers(plan: Plan, of_rank: int) -> list[int]:
    """The data-parallel ranks that hold the same part of each layer as ``of_rank``, itself among them, in their order.

    Args:
        plan: Resolved.
        of_rank: In ``range(plan.world_size)``.
    """
    ranks = torch.arange(math.prod(plan.degrees.values())).view(plan.pp, plan.dp, plan.tp)
    pp, _, tp = (int(index) for index in (ranks == of_rank).nonzero()[0])
    return [int(rank) for rank in ranks[pp, :, tp]]


def data_coordinate(plan: Plan, of_rank: int) -> int:
    """Which share of a global batch a rank takes, in ``range(plan.dp)``; peers along pp and tp take the same.

    Args:
        plan: Resolved.
        of_rank: In ``range(plan.world_size)``.
    """
    return of_rank // plan.tp % plan.dp
