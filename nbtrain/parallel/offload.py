"""What need not lie on the GPU all the time, in host memory: activations, optimizer state; parameters by FSDP.

::

    params        FSDP's CPUOffloadPolicy: shards, their gradients and the optimizer on the CPU
    optimizer     on the GPU for the optimizer's step only, some parameters at a time
    activations   what a block keeps for backward goes to pinned memory in forward and comes back in backward

No number changes. A rank that computes on the CPU holds everything there anyway, and moves nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nbtrain.errors import PlanError
from nbtrain.parallel.blocks import repeated_blocks
from nbtrain.parallel.local import local
from nbtrain.parallel.mixin import Mixin, mix
from nbtrain.plan import Plan

CHUNK_BYTES = 256 * 2**20
"""Of optimizer state that is on the GPU at a time."""


def shard_offload(plan: Plan, device: torch.device) -> OffloadPolicy:
    """Where FSDP keeps its shards.

    Args:
        plan: Resolved.
        device: That the model computes on.
    """
    if "params" not in (plan.offload or ()):
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device.type == "cuda")


def check_offload(plan: Plan, device: torch.device) -> None:
    """Raises where parameters would silently stay on the GPU.

    Raises:
        PlanError: Nothing is sharded, and FSDP alone can keep parameters elsewhere.
    """
    if "params" in (plan.offload or ()) and plan.dp_shard == 1 and device.type != "cpu":
        raise PlanError(
            f"offload=params keeps shards in host memory, and dp_shard=1 with {plan!r} has none; give it at least two "
            "ranks to shard over, or type offload=optimizer+activations"
        )


class Offloaded(Mixin):
    """Mixed into the class of a block, which then keeps what backward needs in host memory."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward  # type: ignore[misc]  # of the block's class
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        with SavedOnHost(self):  # type: ignore[arg-type]  # an nn.Module beside it
            return run(*args, **kwargs)


def offload_activations(model: nn.Module) -> None:
    """Makes each repeated block of ``model``, or the model where it has none, an `Offloaded`. In place."""
    for block in list(repeated_blocks(model).values()) or [model]:
        if not isinstance(block, Offloaded):
            mix(block, Offloaded)


class SavedOnHost(saved_tensors_hooks):
    """Inside, what autograd saves goes to pinned host memory, but for parameters and buffers of ``module``.

    These exist anyway, and a copy of a gathered parameter would keep what FSDP frees. On the CPU nothing is copied.

    Attributes:
        num_packed: Tensors that were saved elsewhere, or are on the CPU already.
        packed_bytes: Their size.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(self._pack, self._unpack)
        self._resident = {
            tensor.untyped_storage().data_ptr()
            for tensor in (*module.parameters(), *module.buffers())
            if _plain(tensor)
        }
        self.num_packed = self.packed_bytes = 0

    def _pack(self, tensor: torch.Tensor) -> _Kept | _Moved:
        if self._stays(tensor):
            return _Kept.of(tensor)
        self.num_packed += 1
        self.packed_bytes += tensor.nbytes
        return _Kept.of(tensor) if tensor.device.type == "cpu" else _Moved.of(tensor)

    @staticmethod
    def _unpack(saved: _Kept | _Moved) -> torch.Tensor:
        return saved.tensor()

    def _stays(self, tensor: torch.Tensor) -> bool:
        if not _plain(tensor) or tensor.untyped_storage().data_ptr() in self._resident:
            return True
        return _is_cast_parameter(tensor)


def _plain(tensor: torch.Tensor) -> bool:
    """Whether it has memory of its own: a DTensor's is inside of it."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta


def _is_cast_parameter(tensor: torch.Tensor) -> bool:
    """Whether autocast made it from a parameter: it holds the copy until the end of forward anyway."""
    node = tensor.grad_fn
    while node is not None and node.name() in ("TBackward0", "TransposeBackward0", "ToCopyBackward0"):
        node = node.next_functions[0][0]
    return node is not None and node is not tensor.grad_fn and node.name() == "torch::autograd::AccumulateGrad"


@dataclass(frozen=True)
class _Kept:
    """Where it was; autograd does not compare versions of what hooks have packed."""

    alias: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Kept:
        # detached: an output would hold its own graph, for ever
        return cls(tensor.detach(), tensor._version)

    def tensor(self) -> torch.Tensor:
        if self.alias._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self.alias.shape)} that a block saved is at version {self.alias._version}, "
                f"and was at version {self.version}; let the operation make a new tensor"
            )
        return self.alias


@dataclass(frozen=True)
class _Moved:
    """In pinned memory; both copies are ordered by the stream that computes."""

    host: torch.Tensor
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Moved:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
        return cls(host.copy_(tensor.detach(), non_blocking=True), tensor.device)

    def tensor(self) -> torch.Tensor:
        return self.host.to(self.device, non_blocking=True)


def step(optimizer: Optimizer, elementwise: bool) -> None:
    """The optimizer's step, with its state on the GPU for as long only. It raises what the optimizer's own step does.

    Args:
        optimizer: Between steps its state is in pinned host memory; on the CPU it stays where it is.
        elementwise: Whether it treats each parameter by itself: then some are stepped at a time, up to `CHUNK_BYTES`.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(local(parameter).is_cuda for parameter in parameters):
        optimizer.step()
        return
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    for chunk in chunks(parameters, CHUNK_BYTES) if elementwise and not hooks else [parameters]:
        with only(optimizer, chunk), _fetched(optimizer, chunk):
            optimizer.step()


def chunks(tensors: Iterable[nn.Parameter], num_bytes: int) -> list[list[nn.Parameter]]:
    """Neighbours together, up to ``num_bytes`` of this rank's parts; a larger tensor is alone."""
    found: list[list[nn.Parameter]] = []
    size = num_bytes
    for tensor in tensors:
        if size + local(tensor).nbytes > num_bytes:
            found.append([])
            size = 0
        found[-1].append(tensor)
        size += local(tensor).nbytes
    return found


@contextlib.contextmanager
def only(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, the optimizer holds no others."""
    chosen = {id(parameter) for parameter in parameters}
    groups = optimizer.param_groups
    parts = [{**group, "params": [p for p in group["params"] if id(p) in chosen]} for group in groups]
    optimizer.param_groups = [part for part in parts if part["params"]]
    try:
        yield
    finally:
        optimizer.param_groups = groups


@contextlib.contextmanager
def _fetched(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Inside, the state of ``parameters`` is on their device; behind it, in pinned memory."""
    hosts: dict[tuple[int, str], torch.Tensor] = {}
    for parameter, key, value in _state(optimizer, parameters):
        if not value.is_cuda:
            hosts[id(parameter), key] = value
            _set_state(optimizer, parameter, key, value.to(local(parameter).device, non_blocking=True))
    try:
        yield
    finally:
        for parameter, key, value in _state(optimizer, parameters):
            host = hosts.get((id(parameter), key))
            if host is None or host.shape != value.shape or not host.is_pinned():
                host = torch.empty_like(value, device="cpu", pin_memory=True)
            _set_state(optimizer, parameter, key, host.copy_(value, non_blocking=True))
        torch.cuda.current_stream().synchronize()  # who reads it next may be the CPU


def _state(optimizer: Optimizer, parameters: list[nn.Parameter]) -> list[tuple[nn.Parameter, str, torch.Tensor]]:
    """This rank's parts of what is worth moving; counts of steps are not."""
    return [
        (parameter, key, local(value))
        for parameter in parameters
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor) and value.ndim > 0
    ]


def _set_state(optimizer: Optimizer, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
    state = optimizer.state[parameter]
    if isinstance(state[key], DTensor):
        state[key]._local_tensor = value  # no constructor takes a shard that isn't where its mesh is
    else:
        state[key] = value
