"""`parallelize`: a model laid out as a plan says, in the one legal order of steps."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nbtrain.errors import ModelError, PlanError
from nbtrain.parallel import batchnorm, live, preflight
from nbtrain.parallel import mesh as meshes
from nbtrain.parallel.blueprint import blueprint_of
from nbtrain.parallel.broadcast import broadcast_weights
from nbtrain.parallel.cell import plan_or_default, require_all_ranks
from nbtrain.parallel.compile import check_backend, compile_blocks
from nbtrain.parallel.layout import Layout, layout_of, remember, weak
from nbtrain.parallel.mixin import unmix
from nbtrain.parallel.offload import check_offload, offload_activations
from nbtrain.parallel.order import UnitOrder
from nbtrain.parallel.precision import compute_in
from nbtrain.parallel.recompute import recompute
from nbtrain.parallel.replicate import Replica
from nbtrain.parallel.shard import shard
from nbtrain.parallel.usage import ShardUsage
from nbtrain.plan import Plan


def parallelize(
    model: nn.Module, plan: Plan | None = None, *, mesh: DeviceMesh | None = None, compile: bool | str = False
) -> nn.Module:
    """Replicates or shards ``model`` over the ranks. Collective; on one device it is the model itself.

    Weights and buffers are those of rank 0. With ``zero=0`` the result is a DDP replica of the model, which has the
    model's attributes and names; with ``zero`` 2 and 3 it is the model itself, sharded by FSDP2: each repeated block
    is a unit. Batch normalisation takes its statistics over all ranks. bf16 and fp16 keep fp32 weights; an fp16 loss
    must be scaled, as `Trainer` does and ``torch.amp.GradScaler`` in one's own loop.
    A second call with the same plan gives the first one's result.

    Args:
        model: The same on every rank in names and shapes, with weights on any real device.
        plan: Resolved against the number of ranks here; None takes that of ``--plan``, else ``Plan()``.
        mesh: With the axes of `build_mesh`; None builds it.
        compile: Whether ``torch.compile`` compiles each repeated block (the model, where it has none); a name takes
            that backend. Masks of dropout then come from the compiler's own generator.

    Raises:
        PlanError: The degrees do not fit the ranks, or the model is already laid out in another way.
        ModelError: The model cannot be laid out; all findings with their cures.
        NotImplementedError: The plan needs a later release.
        UsageError: ``compile`` is no backend, or torch cannot compile here.
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
    check_backend(compile)
    plan = plan.resolve(meshes.world_size() if mesh is None else mesh.size())
    if (layout := layout_of(model)) is not None:
        return _again(layout, plan, model, compile)
    preflight.check_model(model, plan)
    layout = Layout(plan, meshes.build_mesh(plan) if mesh is None else mesh, compile=compile)
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


def _again(layout: Layout, plan: Plan, model: nn.Module, compile: bool | str) -> nn.Module:
    if compile and layout.compile != compile:
        raise PlanError(f"the model is laid out with compile={layout.compile!r}; build it again for {compile!r}")
    if layout.plan == plan:
        return layout.result if layout.result is not None else model
    raise PlanError(f"the model is laid out by {layout.plan!r}; build it again for {plan!r}")


def _lay_out(model: nn.Module, layout: Layout) -> nn.Module:
    """The legal order: same weights everywhere, then what changes modules, then what wraps them."""
    device = meshes.device_of(layout.mesh)
    check_offload(layout.plan, device or next(model.parameters()).device)
    if layout.group is not None:
        preflight.check_same_on_ranks(model, layout.group)
    if device is not None:
        model.to(device)
    if layout.group is not None:
        broadcast_weights(model, layout.group)
    return _prepare(model, layout)


def _prepare(model: nn.Module, layout: Layout) -> nn.Module:
    unmix(model)
    if layout.group is not None:
        batchnorm.normalise_globally(model, layout.group)
    _change_forward(model, layout)
    return _wrap(model, layout)


def _change_forward(model: nn.Module, layout: Layout) -> None:
    """Each change runs around those before it."""
    plan, device = layout.plan, meshes.device_of(layout.mesh)
    # torch lets a compiler see what "selective" keeps, and runs the code of a whole block again
    if plan.recompute == "selective":
        recompute(model, plan.recompute)
    compile_blocks(model, layout.compile)
    if plan.recompute != "selective":
        recompute(model, plan.recompute)
    if "activations" in (plan.offload or ()):
        offload_activations(model)
    compute_in(model, plan.precision, device)


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
