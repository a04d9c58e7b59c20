"""Meshes on groups that stand already: what a rank that takes a dead one's place needs, and moves nothing for.

torch names groups by their count, and finds a mesh's groups by their names. So a mesh is known on every rank by the
names of its groups: along each axis one group for every row of ranks, of which a rank is in one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

FLAT = "dp"
"""The axis that a mesh has beside its own: all data-parallel ranks."""


@dataclass(frozen=True)
class Construction:
    """A mesh over all ranks, in plain words.

    Attributes:
        device_type: "cpu" or "cuda".
        axes: Names.
        shape: Ranks along each axis.
        groups: For each axis the names of its groups, row by row.
        flat: The axes that were flattened into `FLAT`; () where that wasn't needed.
        flat_groups: The names of its groups.
    """

    device_type: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    groups: tuple[tuple[str, ...], ...]
    flat: tuple[str, ...] = ()
    flat_groups: tuple[str, ...] = ()

    @property
    def stands(self) -> bool:
        """Whether as many groups exist as this mesh needs. The same on every rank."""
        names = [name for axis in (*self.groups, self.flat_groups) for name in axis]
        return all(int(name) < c10d._world.group_count for name in names)


def describe(mesh: DeviceMesh, flat: tuple[str, ...] = ()) -> Construction:
    """How ``mesh`` was built; the same on every rank.

    Args:
        mesh: Over all ranks, in their order.
        flat: Its axes that were flattened into `FLAT`.
    """
    shape, axes = tuple(mesh.shape), mesh.mesh_dim_names or ()
    groups = tuple(_names(mesh.get_group(axis), _rows(shape, (index,))) for index, axis in enumerate(axes))
    if not flat:
        return Construction(mesh.device_type, axes, shape, groups)
    flat_rows = _rows(shape, tuple(map(axes.index, flat)))
    return Construction(
        mesh.device_type, axes, shape, groups, flat, _names(mesh[flat]._flatten(FLAT).get_group(), flat_rows)
    )


def adopted(construction: Construction) -> DeviceMesh:
    """The mesh on groups that exist here under the same names. Moves nothing and makes no group."""
    shape = construction.shape
    own = [_own(names, _rows(shape, (axis,))) for axis, names in enumerate(construction.groups)]
    ranks = torch.arange(dist.get_world_size()).view(shape)
    groups = [_group(name) for name in own]
    mesh = DeviceMesh.from_group(groups, construction.device_type, ranks, mesh_dim_names=construction.axes)
    if construction.flat:
        _adopt_flat(mesh, construction)
    return mesh


def refresh(mesh: DeviceMesh) -> None:
    """Groups were formed again under the same names: give the mesh those that compiled code takes from it."""
    for name in mesh._pg_registry:
        mesh._pg_registry[name] = _group(name)


def _adopt_flat(mesh: DeviceMesh, construction: Construction) -> None:
    """What ``_flatten`` leaves behind, but for the groups."""
    part = mesh[construction.flat]
    flat = DeviceMesh(
        mesh.device_type,
        _layout=type(part._layout)([part._layout.collapse()]),
        _rank_map=mesh._rank_map,
        mesh_dim_names=(FLAT,),
        _root_mesh=mesh,
        _init_backend=False,
    )
    rows = _rows(construction.shape, tuple(map(construction.axes.index, construction.flat)))
    name = c10d.GroupName(_own(construction.flat_groups, rows))
    flat._dim_group_names = [name]
    mesh._pg_registry[name] = _group(name)
    mesh._flatten_mapping[FLAT] = flat


def _group(name: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = c10d._resolve_process_group(c10d.GroupName(name))  # type: ignore[attr-defined]
    return group


def _rows(shape: tuple[int, ...], along: tuple[int, ...]) -> list[list[int]]:
    """The ranks of each group along some axes, in the order in which torch forms the groups."""
    others = tuple(axis for axis in range(len(shape)) if axis not in along)
    ranks = torch.arange(dist.get_world_size()).view(shape).permute(*others, *along)
    rows: list[list[int]] = ranks.flatten(start_dim=len(others)).flatten(end_dim=-2).tolist()
    return rows


def _names(own: dist.ProcessGroup, rows: list[list[int]]) -> tuple[str, ...]:
    """The names of an axis's groups, formed one after another, from that of the one that this rank is in."""
    if len(rows) == 1:
        return (own.group_name,)
    first = int(own.group_name) - _row(rows)
    return tuple(str(first + index) for index in range(len(rows)))


def _own(names: tuple[str, ...], rows: list[list[int]]) -> str:
    return names[_row(rows)]


def _row(rows: list[list[int]]) -> int:
    return next(index for index, row in enumerate(rows) if dist.get_rank() in row)
