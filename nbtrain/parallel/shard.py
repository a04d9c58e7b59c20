"""A model whose parameters, gradients and optimizer state are sharded by FSDP2 (ZeRO-3), or stay gathered from
forward to backward (ZeRO-2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils._pytree import tree_map_only

from nbtrain.errors import ModelError
from nbtrain.interrupts import uninterrupted
from nbtrain.parallel.blocks import repeated_blocks, self_contained
from nbtrain.parallel.offload import shard_offload
from nbtrain.parallel.precision import shard_policy
from nbtrain.plan import Plan


def shard(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> dict[str, nn.Module]:
    """Shards ``model`` in place: each repeated block is a unit, and what is left is the root's.

    Tied parameters belong to one unit: a block that shares some with a module outside is left to the root.

    Args:
        model: On its device, with the same weights on every rank.
        plan: Resolved, with ``zero`` 2 or 3.
        mesh: One axis, or replicas by shards (HSDP).

    Returns:
        The units inside the root, by name.
    """
    _make_contiguous(model)
    blocks = {name: block for name, block in repeated_blocks(model).items() if any(True for _ in block.parameters())}
    units = self_contained(model, blocks)
    options: dict[str, Any] = {
        "mesh": mesh,
        # None: all but the root, whose parameters backward needs at once
        "reshard_after_forward": None if plan.zero == 3 else False,
        "mp_policy": shard_policy(plan.precision),
        "offload_policy": shard_offload(plan, torch.device(mesh.device_type)),
    }
    for unit in units.values():
        unit.register_forward_hook(_own_output)
        fully_shard(unit, **options)
    model.register_forward_hook(_own_output)
    root = fully_shard(model, **options)
    model.register_forward_hook(_let_go_without_backward)
    model.register_forward_pre_hook(_begin_whole, prepend=True)
    # a rank whose branch doesn't use a parameter must still reduce it: the others wait
    root.set_reduce_scatter_unused_params(True)
    return units


def _make_contiguous(model: nn.Module) -> None:
    """FSDP shards parameters in their natural order only; transposed and channels-last ones have the same numbers."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _let_go_without_backward(module: nn.Module, args: Any, output: Any) -> None:
    """Backward is what FSDP lets go after: else ``model.parameters()`` would be gathered ones, without gradients."""
    if not torch.is_grad_enabled():
        reshard(module)


def _begin_whole(module: nn.Module, args: Any) -> None:
    """FSDP completes itself in the first forward, and never again: an interrupt in there would leave it half done."""
    state = cast(Any, module)._get_fsdp_state()
    if state._is_root is None:
        with uninterrupted():
            state._lazy_init()


def _own_output(module: nn.Module, args: Any, output: Any) -> Any:
    """Copies outputs that are views: an in-place operation on one (``x += y``) would drop FSDP's backward hook."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.clone() if _is_hooked_view(tensor) else tensor, output)


def _is_hooked_view(tensor: torch.Tensor) -> bool:
    # a kind of tensor of its own, such as logits that are cut, is no view of what a block computed
    return type(tensor) is torch.Tensor and tensor.requires_grad and tensor._is_view()


def reshard(model: nn.Module) -> None:
    """Drops gathered parameters: after a forward without a backward the root's, with ``zero=2`` all, stay gathered.

    What looks at the parameters then sees plain tensors, which no optimizer may hold. FSDP keeps them, too, where a
    forward outside of a step raised.
    """
    modules = list(_sharded(model))
    if any(group._training_state is not TrainingState.IDLE for module in modules for group in param_groups(module)):
        recover(model)
    for module in modules:
        module.reshard()


def param_groups(module: nn.Module | FSDPModule) -> list[Any]:
    """FSDP's own records of what it gathers and scatters together, of a sharded module."""
    found: list[Any] = cast(Any, module)._get_fsdp_state()._fsdp_param_groups
    return found


_REACHED_PAST = ("out of bounds for storage of size 0", "got mixed torch.Tensor and DTensor")


@contextmanager
def explained() -> Iterator[None]:
    """Names the cure where backward reaches parameters of a block that FSDP doesn't know to gather.

    It gathers where backward comes to a block's outputs: what a block leaves elsewhere has its gradient come unseen.

    Raises:
        ModelError: In the stead of torch's RuntimeError about storage of size 0.
    """
    try:
        yield
    except RuntimeError as problem:
        if not any(part in str(problem) for part in _REACHED_PAST):
            raise
        raise ModelError(
            "backward needs parameters of a block that were not gathered: most likely its forward leaves something "
            "that the loss reads on the module (self.aux = ...); return it as an output of the block, or type zero=2"
        ) from problem


def recover(model: nn.Module) -> None:
    """After an exception in forward or backward: FSDP as if the step had not begun. Moves nothing."""
    if cast(Any, model)._get_fsdp_state()._is_root is None:
        return  # no forward has begun yet
    for module in _sharded(model):
        for group in param_groups(module):
            for record in group.fsdp_params:
                record.unsharded_accumulated_grad = None
                if hasattr(record, "_unsharded_param"):
                    record._unsharded_param.grad = None
    cast(FSDPModule, model).reset_iter_state()


def regroup(model: nn.Module) -> None:
    """Groups were formed again: FSDP keeps the group objects of its mesh, and may be in the middle of a step."""
    recover(model)
    for module in _sharded(model):
        for group in param_groups(module):
            for info in filter(None, (group.mesh_info, group.post_forward_mesh_info)):
                info.__post_init__()
            vars(group).pop("_all_gather_process_group", None)


def num_root_parameters(model: nn.Module) -> int:
    """Parameters in no unit, which the root gathers; 0 where FSDP does not shard."""
    if not isinstance(model, FSDPModule):
        return 0
    return sum(record.sharded_param.numel() for group in param_groups(model) for record in group.fsdp_params)


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    yield from (module for module in model.modules() if isinstance(module, FSDPModule))
