"""`parallelize`: a model laid out as a plan says, in the one legal order of steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from nbtrain.errors import ModelError, PlanError, UsageError
from nbtrain.parallel import batchnorm, instancenorm, live, own_loop, preflight
from nbtrain.parallel import mesh as meshes
from nbtrain.parallel.blueprint import blueprint_of
from nbtrain.parallel.broadcast import broadcast_weights
from nbtrain.parallel.cell import plan_or_default, require_all_ranks, require_plan
from nbtrain.parallel.compile import check_backend, compile_blocks
from nbtrain.parallel.deferred import Deferred
from nbtrain.parallel.layout import Layout, layout_of, remember, weak
from nbtrain.parallel.materialise import (
    Part,
    Source,
    Unfilled,
    check_same_start,
    materialise_buffers,
    materialise_shards,
)
from nbtrain.parallel.mixin import unmix
from nbtrain.parallel.offload import check_offload, offload_activations
from nbtrain.parallel.order import UnitOrder
from nbtrain.parallel.precision import compute_in
from nbtrain.parallel.recompute import recompute
from nbtrain.parallel.replicate import DDPReplica, Replica, check_ddp_options
from nbtrain.parallel.shard import shard
from nbtrain.parallel.state import part_of
from nbtrain.parallel.tensor.apply import lay_out
from nbtrain.parallel.tensor.random import Draws, agreed_seed, seed_forwards
from nbtrain.parallel.tensor.state import cuts_by_name
from nbtrain.parallel.update import ShardedUpdate
from nbtrain.parallel.usage import ShardUsage
from nbtrain.plan import Plan


def parallelize(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    mesh: DeviceMesh | None = None,
    probe: Any = None,
    compile: bool | str = False,
    ddp: Mapping[str, bool] | None = None,
) -> nn.Module:
    """Replicates, shards or cuts ``model`` over the ranks. Collective; on one device it is the model itself.

    Weights and buffers are those of rank 0. With ``zero=0`` the result is a DDP replica of the model, which has the
    model's attributes and names, with ``zero=1`` too, where a Trainer's optimizer steps on this rank's part only; with
    ``zero`` 2 and 3 it is the model itself, sharded by FSDP2: each repeated block is a unit. Batch normalisation takes
    its statistics over all ranks. bf16 and fp16 keep fp32 weights; an fp16 loss must be scaled, as `Trainer` does and
    ``torch.amp.GradScaler`` in one's own loop. With ``tp`` above 1 each layer is cut (Megatron-LM, arXiv 1909.08053):
    which, and how, is found in a forward on a tiny batch, printed, and proved layer by layer before anything is
    changed; parameters of cut layers are this rank's part, plain tensors.
    A second call with the same plan gives the first one's result.

    Args:
        model: The same on every rank in names and shapes, with weights on any real device, or built under
            `meta_init`: then each rank makes its own part of them, and nothing is broadcast.
        plan: Resolved against the number of ranks here; None takes that of ``--plan``, else ``Plan()``.
        mesh: With the axes of `build_mesh`; None builds it.
        probe: With ``tp``: inputs that the model's forward takes: a tensor, a tuple, or a dict of keywords. None makes
            up some. They are run once, without training on them.
        compile: Whether ``torch.compile`` compiles each repeated block (the model, where it has none); a name takes
            that backend. Masks of dropout then come from the compiler's own generator.
        ddp: With ``zero=0``, options of torch's DDP: ``static_graph``, ``find_unused_parameters`` (both False: unused
            parameters are found anyway, at less cost) and ``gradient_as_bucket_view`` (True).

    Raises:
        PlanError: The degrees do not fit the ranks, or the model is already laid out in another way.
        ModelError: The model cannot be laid out; all findings with their cures.
        UsageError: ``ddp`` has an unknown option, or the plan does not use DDP.
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
    require_plan(plan)
    plan.require_supported()
    check_backend(compile)
    _refuse_compile(compile, plan)
    plan = plan.resolve(meshes.world_size() if mesh is None else mesh.size())
    options = _ddp_options(ddp, plan)
    if (layout := layout_of(model)) is not None:
        return _again(layout, plan, model, compile, options)
    if mesh is None and dist.group.WORLD is not None:
        preflight.check_same_options(dist.group.WORLD, plan=plan, compile=compile, ddp=options)
    preflight.check_model(model, plan)
    mesh = meshes.build_mesh(plan) if mesh is None else mesh
    layout = Layout(plan, mesh, compile=compile, ddp=options or {})
    layout.originals = weak(model.named_parameters())
    deferred = Deferred(model)
    materialise_buffers(model, deferred, _device(layout))  # of which the blueprint keeps some
    if layout.mesh is not None:
        layout.blueprint = blueprint_of(model)
    return _lay_out(model, layout, deferred, probe)


def _refuse_compile(compile: bool | str, plan: Plan) -> None:
    if compile and plan.tp > 1:
        raise PlanError(f"compile={compile!r}: torch cannot compile layers that are cut (tp={plan.tp}); leave it away")


def lay_out_again(model: nn.Module, layout: Layout) -> nn.Module:
    """What `parallelize` does, on a rank that takes a lost one's place: its weights come from others. Moves nothing.

    Args:
        model: Materialised from the blueprint, on its device.
        layout: Of the plan and mesh that the others have.
    """
    _cut(model, layout)
    layout.originals = weak(model.named_parameters())
    result = _prepare(model, layout)
    layout.regroup()
    return result


def lay_out_anew(model: nn.Module, layout: Layout, probe: Any = None, memory: torch.device | None = None) -> nn.Module:
    """What `parallelize` does, with a model whose numbers come later, from its old layout. Collective.

    Args:
        model: A blueprint's: parameters on the meta device, buffers real; it passed `preflight.check_model`.
        layout: Of the new plan; what it knows of tensor parallelism is not decided again.
        probe: As of `parallelize`.
        memory: Of the parameters; None: on the ranks' devices. On the meta device it is a rehearsal.
    """
    layout.originals = weak(model.named_parameters())
    return _lay_out(model, layout, Unfilled(memory), probe)


def _ddp_options(ddp: Mapping[str, bool] | None, plan: Plan) -> Mapping[str, bool] | None:
    if ddp is None:
        return None
    if plan.zero in (1, 2, 3) and plan.dp_shard > 1:
        raise UsageError(f"zero={plan.zero} does not use DDP, which ddp={ddp!r} is for; type zero=0 or leave it away")
    return check_ddp_options(ddp)


def _again(
    layout: Layout, plan: Plan, model: nn.Module, compile: bool | str, ddp: Mapping[str, bool] | None
) -> nn.Module:
    if layout.gone:
        raise ModelError(layout.gone)
    if compile and layout.compile != compile:
        raise PlanError(f"the model is laid out with compile={layout.compile!r}; build it again for {compile!r}")
    if layout.plan == plan and ddp in (None, layout.ddp):
        return layout.result if layout.result is not None else model
    if layout.plan == plan:
        raise PlanError(f"the model is laid out with ddp={dict(layout.ddp)!r}; build it again for ddp={ddp!r}")
    raise PlanError(f"the model is laid out by {layout.plan!r}; build it again for {plan!r}")


def _lay_out(model: nn.Module, layout: Layout, deferred: Source, probe: Any) -> nn.Module:
    """The legal order: same weights everywhere, then what changes modules, then what wraps them."""
    device = meshes.device_of(layout.mesh)
    check_offload(layout.plan, device or next(model.parameters()).device)
    if layout.everyone is not None:
        preflight.check_same_on_ranks(model, layout.everyone)
        check_same_start(deferred, layout.everyone)
    if device is not None:
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]
    if layout.everyone is not None:
        broadcast_weights(model, layout.everyone)
    if layout.peers is not None and layout.tensor is None:
        from nbtrain.parallel.tensor.decide import decide  # its parts are many, and needed for tp alone

        layout.tensor = decide(model, layout.plan, layout.peers, _device(layout), probe)
    if layout.stages is not None and layout.split is None:
        from nbtrain.parallel.pipeline.split import find_split  # needed for pp alone

        layout.split = find_split(model, layout, probe, _device(layout))
    is_parted = layout.peers is not None or layout.stages is not None
    if layout.draws is None and is_parted and (everyone := layout.everyone) is not None:
        # of all ranks one: a rank that takes a lost one's place has it from any
        layout.draws = Draws(agreed_seed(everyone, device), meshes.data_coordinate(layout.plan, meshes.rank()))
    _cut(model, layout)
    return _prepare(model, layout, deferred)


def _cut(model: nn.Module, layout: Layout) -> None:
    """Each layer becomes this rank's part. Moves nothing."""
    if layout.tensor is not None and layout.peers is not None:
        layout.cuts = cuts_by_name(model, layout.tensor)
        lay_out(model, layout.tensor, layout.peers, rank=layout.part, loss_parallel=layout.plan.loss_parallel)


def _part(layout: Layout) -> Part:
    return lambda name, tensor: part_of(name, tensor, layout)


def _device(layout: Layout) -> torch.device:
    return meshes.device_of(layout.mesh) or torch.get_default_device()


def _prepare(model: nn.Module, layout: Layout, deferred: Source | None = None) -> nn.Module:
    unmix(model)
    if layout.group is not None:
        batchnorm.normalise_globally(model, layout.group)
        instancenorm.track_globally(model, layout.group)
    _change_forward(model, layout)
    if layout.split is None:
        return _wrap(model, layout, deferred)
    from nbtrain.parallel.pipeline.split import hold, make_pipeline

    units = hold(model, layout, layout.split, _device(layout))
    result = _wrap(model, layout, deferred)
    layout.pipeline = make_pipeline(model, layout, layout.split, units, _device(layout))
    layout.usage = layout.pipeline.usage
    return result


def _change_forward(model: nn.Module, layout: Layout) -> None:
    """Each change runs around those before it."""
    plan, device = layout.plan, meshes.device_of(layout.mesh)
    # torch lets a compiler see what "selective" keeps, and runs the code of a whole block again
    if plan.recompute == "selective":
        recompute(model, plan.recompute)
    compile_blocks(model, layout.compile, None if layout.split is None else layout.split.partition.all_units)
    if plan.recompute != "selective":
        recompute(model, plan.recompute)
    if "activations" in (plan.offload or ()):
        offload_activations(model)
    if layout.draws is not None and layout.stages is None:
        seed_forwards(model, layout.draws)
    compute_in(model, plan.precision, device)


def _wrap(model: nn.Module, layout: Layout, deferred: Source | None) -> nn.Module:
    if deferred is not None and not layout.shards:
        materialise_shards(model, deferred, _device(layout), _part(layout))
    if layout.mesh is None or layout.everyone is None:
        remember(model, layout)
        return model
    if layout.group is None:
        return _known(model, layout)
    if layout.shards:
        units = shard(model, layout.plan, meshes.shard_mesh(layout.mesh))
        if deferred:
            materialise_shards(model, deferred, _device(layout), _part(layout))
        layout.units = tuple(units)
        if layout.stages is None:
            layout.usage = ShardUsage(model)
            UnitOrder(model, units, layout)
        return _known(model, layout)
    if layout.stages is not None and not layout.shards_update:
        return _known(model, layout)  # gradients are reduced behind the schedule
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
    if layout.peers is not None and layout.stages is None:
        layout.loop = own_loop.watch(model, layout)
    return model
