"""`parallelize`: a model laid out as a plan says, in the one legal order of steps."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from nbtrain.errors import ModelError, PlanError, UsageError
from nbtrain.parallel import batchnorm, live, preflight
from nbtrain.parallel import mesh as meshes
from nbtrain.parallel.blueprint import blueprint_of
from nbtrain.parallel.broadcast import broadcast_weights
from nbtrain.parallel.cell import plan_or_default, require_all_ranks
from nbtrain.parallel.layout import Layout, layout_of, remember, weak
from nbtrain.parallel.order import UnitOrder
from nbtrain.parallel.precision import compute_in
from nbtrain.parallel.replicate import DDPReplica, Replica, check_ddp_options
from nbtrain.parallel.shard import shard
from nbtrain.parallel.update import ShardedUpdate
from nbtrain.parallel.usage import ShardUsage
from nbtrain.plan import Plan


def parallelize(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    mesh: DeviceMesh | None = None,
    ddp: Mapping[str, bool] | None = None,
) -> nn.Module:
    """Replicates or shards ``model`` over the ranks. Collective; on one device it is the model itself.

    Weights and buffers are those of rank 0. With ``zero=0`` the result is a DDP replica of the model, which has the
    model's attributes and names, with ``zero=1`` too, where a Trainer's optimizer steps on this rank's part only; with
    ``zero`` 2 and 3 it is the model itself, sharded by FSDP2: each repeated block
    is a unit. Batch normalisation takes its statistics over all ranks. bf16 keeps fp32 weights.
    A second call with the same plan gives the first one's result.

    Args:
        model: The same on every rank in names and shapes, with weights on any real device.
        plan: Resolved against the number of ranks here; None takes that of ``--plan``, else ``Plan()``.
        mesh: With the axes of `build_mesh`; None builds it.
        ddp: With ``zero=0``, options of torch's DDP: ``static_graph``, ``find_unused_parameters`` (both False: unused
            parameters are found anyway, at less cost) and ``gradient_as_bucket_view`` (True).

    Raises:
        PlanError: The degrees do not fit the ranks, or the model is already laid out in another way.
        ModelError: The model cannot be laid out; all findings with their cures.
        UsageError: ``ddp`` has an unknown option, or the plan does not use DDP.
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
    options = _ddp_options(ddp, plan)
    if (layout := layout_of(model)) is not None:
        return _again(layout, plan, model, options)
    preflight.check_model(model, plan)
    layout = Layout(plan, meshes.build_mesh(plan) if mesh is None else mesh, ddp=options or {})
    layout.originals = weak(model.named_parameters())
    if layout.mesh is not None:
        layout.blueprint = blueprint_of(model)
    return _lay_out(model, layout)


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


def _ddp_options(ddp: Mapping[str, bool] | None, plan: Plan) -> Mapping[str, bool] | None:
    if ddp is None:
        return None
    if plan.zero in (1, 2, 3) and plan.dp_shard > 1:
        raise UsageError(f"zero={plan.zero} does not use DDP, which ddp={ddp!r} is for; type zero=0 or leave it away")
    return check_ddp_options(ddp)


def _again(layout: Layout, plan: Plan, model: nn.Module, ddp: Mapping[str, bool] | None) -> nn.Module:
    if layout.plan == plan and ddp in (None, layout.ddp):
        return layout.result if layout.result is not None else model
    if layout.plan == plan:
        raise PlanError(f"the model is laid out with ddp={dict(layout.ddp)!r}; build it again for ddp={ddp!r}")
    raise PlanError(f"the model is laid out by {layout.plan!r}; build it again for {plan!r}")


def _lay_out(model: nn.Module, layout: Layout) -> nn.Module:
    """The legal order: same weights everywhere, then what changes modules, then what wraps them."""
    device = meshes.device_of(layout.mesh)
    if layout.group is not None:
        preflight.check_same_on_ranks(model, layout.group)
    if device is not None:
        model.to(device)
    if layout.group is not None:
        broadcast_weights(model, layout.group)
    return _prepare(model, layout)


def _prepare(model: nn.Module, layout: Layout) -> nn.Module:
    if layout.group is not None:
        batchnorm.normalise_globally(model, layout.group)
    compute_in(model, layout.plan.precision)
    return _wrap(model, layout)


def _wrap(model: nn.Module, layout: Layout) -> nn.Module:
    if layout.mesh is None or layout.group is None:
        remember(model, layout)
        return model
    if layout.shards:
        units = shard(model, layout.plan, meshes.shard_mesh(layout.mesh))
        layout.units = tuple(units)
        layout.usage = ShardUsage(model)
        UnitOrder(model, units, layout)
        return _known(model, layout)
    replica = _replica(model, layout, layout.mesh, layout.group)
    layout.usage, layout.result = replica.usage, replica
    remember(replica, layout)
    _known(model, layout)
    return replica


def _replica(model: nn.Module, layout: Layout, mesh: DeviceMesh, group: ProcessGroup) -> Replica:
    if layout.shards_update:
        return ShardedUpdate(model, mesh, layout.plan.bucket_mb)
    return DDPReplica(model, group, layout.plan.bucket_mb, layout.ddp)


def _known(model: nn.Module, layout: Layout) -> nn.Module:
    """Remember ``model``, now that it is whole: what an interrupt left half made cannot take new groups."""
    remember(model, layout)
    live.track(layout)
    return model
