"""`parallelize`: a model laid out as a plan says, in the one legal order of steps."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nbtrain.errors import ModelError, PlanError
from nbtrain.parallel import batchnorm, live, preflight
from nbtrain.parallel import mesh as meshes
from nbtrain.parallel.blueprint import blueprint_of
from nbtrain.parallel.broadcast import broadcast_weights
from nbtrain.parallel.cell import plan_or_default, require_all_ranks
from nbtrain.parallel.deferred import Deferred
from nbtrain.parallel.layout import Layout, layout_of, remember, weak
from nbtrain.parallel.materialise import check_same_start, materialise_buffers, materialise_shards
from nbtrain.parallel.order import UnitOrder
from nbtrain.parallel.precision import compute_in
from nbtrain.parallel.replicate import Replica
from nbtrain.parallel.shard import shard
from nbtrain.parallel.usage import ShardUsage
from nbtrain.plan import Plan


def parallelize(model: nn.Module, plan: Plan | None = None, *, mesh: DeviceMesh | None = None) -> nn.Module:
    """Replicates or shards ``model`` over the ranks. Collective; on one device it is the model itself.

    Weights and buffers are those of rank 0. With ``zero=0`` the result is a DDP replica of the model, which has the
    model's attributes and names; with ``zero`` 2 and 3 it is the model itself, sharded by FSDP2: each repeated block
    is a unit. Batch normalisation takes its statistics over all ranks. bf16 keeps fp32 weights.
    A second call with the same plan gives the first one's result.

    Args:
        model: The same on every rank in names and shapes, with weights on any real device, or built under
            `meta_init`: then each rank makes its own part of them, and nothing is broadcast.
        plan: Resolved against the number of ranks here; None takes that of ``--plan``, else ``Plan()``.
        mesh: With the axes of `build_mesh`; None builds it.

    Raises:
        PlanError: The degrees do not fit the ranks, or the model is already laid out in another way.
        ModelError: The model cannot be laid out; all findings with their cures.
        NotImplementedError: The plan needs a later release.
    """
    if plan is None and isinstance(model, nn.Module) and (known := layout_of(model)) is not None:
        plan = known.plan
    plan = plan_or_default(plan)
    if isinstance(model, type):
        raise ModelError(f"{model.__name__} is a class; give a model, {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise ModelError(f"{type(model).__name__} is not an nn.Module; give the model itself")
    require_all_ranks("parallelize")
    if not isinstance(plan, Plan):
        raise PlanError(f"{plan!r} is not a plan; type nt.Plan.parse({str(plan)!r})")
    plan.require_supported()
    plan = plan.resolve(meshes.world_size() if mesh is None else mesh.size())
    if (layout := layout_of(model)) is not None:
        return _again(layout, plan, model)
    preflight.check_model(model, plan)
    layout = Layout(plan, meshes.build_mesh(plan) if mesh is None else mesh)
    layout.originals = weak(model.named_parameters())
    deferred = Deferred(model)
    materialise_buffers(model, deferred, _device(layout))  # of which the blueprint keeps some
    if layout.mesh is not None:
        layout.blueprint = blueprint_of(model)
    return _lay_out(model, layout, deferred)


def lay_out_again(model: nn.Module, layout: Layout) -> nn.Module:
    """What `parallelize` does, on a rank that takes a lost one's place: its weights come from others. Moves nothing.

    Args:
        model: Materialised from the blueprint, on its device.
        layout: Of the plan and mesh that the others have.
    """
    layout.originals = weak(model.named_parameters())
    result = _prepare(model, layout)
    layout.regroup()
    return result


def _again(layout: Layout, plan: Plan, model: nn.Module) -> nn.Module:
    if layout.plan == plan:
        return layout.result if layout.result is not None else model
    raise PlanError(f"the model is laid out by {layout.plan!r}; build it again for {plan!r}")


def _lay_out(model: nn.Module, layout: Layout, deferred: Deferred) -> nn.Module:
    """The legal order: same weights everywhere, then what changes modules, then what wraps them."""
    device = meshes.device_of(layout.mesh)
    if layout.group is not None:
        preflight.check_same_on_ranks(model, layout.group)
        check_same_start(deferred, layout.group)
    if device is not None:
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]
    if layout.group is not None:
        broadcast_weights(model, layout.group)
    if not layout.shards:
        materialise_shards(model, deferred, _device(layout))
    return _prepare(model, layout, deferred)


def _device(layout: Layout) -> torch.device:
    return meshes.device_of(layout.mesh) or torch.get_default_device()


def _prepare(model: nn.Module, layout: Layout, deferred: Deferred | None = None) -> nn.Module:
    if layout.group is not None:
        batchnorm.normalise_globally(model, layout.group)
    compute_in(model, layout.plan.precision)
    return _wrap(model, layout, deferred)


def _wrap(model: nn.Module, layout: Layout, deferred: Deferred | None) -> nn.Module:
    if layout.mesh is None or layout.group is None:
        remember(model, layout)
        return model
    if layout.shards:
        units = shard(model, layout.plan, meshes.shard_mesh(layout.mesh))
        if deferred:
            materialise_shards(model, deferred, _device(layout))
        layout.units = tuple(units)
        layout.usage = ShardUsage(model)
        UnitOrder(model, units, layout)
        return _known(model, layout)
    replica = Replica(model, layout.group, layout.plan.bucket_mb)
    layout.usage, layout.result = replica.usage, replica
    remember(replica, layout)
    _known(model, layout)
    return replica


def _known(model: nn.Module, layout: Layout) -> nn.Module:
    """Remember ``model``, now that it is whole: what an interrupt left half made cannot take new groups."""
    remember(model, layout)
    live.track(layout)
    return model
