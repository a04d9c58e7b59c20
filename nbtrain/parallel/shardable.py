"""Whether an optimizer can step parameters that FSDP shards: it is tried on tiny ones, before any step."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nbtrain.errors import OptimizerError

_SIZE = 2  # of each dim of a shard


def require_shardable(optimizer: Optimizer) -> None:
    """Tries one step on a DTensor for each number of dims that its groups have. Collective.

    Torch lacks some operations on DTensors, in this version or that: a step would fail behind the first backward.

    Args:
        optimizer: Of sharded parameters; stays as it is.

    Raises:
        OptimizerError: It fails there, and not on plain tensors of these shapes.
    """
    try:
        _try(optimizer, _tiny_shard)
    except Exception as problem:
        if not _is_able(optimizer):
            return  # tiny tensors say nothing about it
        raise OptimizerError(
            f"{type(optimizer).__name__} cannot step sharded parameters in torch {torch.__version__}; type zero=1, "
            f"which shards its state and gives it whole parameters ({_first_line(problem)})"
        ) from problem


def _is_able(optimizer: Optimizer) -> bool:
    try:
        _try(optimizer, _tiny)
    except Exception:
        return False
    return True


def _try(optimizer: Optimizer, tiny: Callable[[torch.Tensor], nn.Parameter]) -> None:
    twin = stateless(optimizer)
    for group in twin.param_groups:
        group["params"] = [tiny(like) for like in {like.ndim: like for like in group["params"]}.values()]
    twin.step()


def stateless(optimizer: Optimizer) -> Optimizer:
    """As it was when it was made; without hooks, and the step that a scheduler has wrapped."""
    twin: Optimizer = type(optimizer).__new__(type(optimizer))
    own = {name: copy.copy(value) for name, value in vars(optimizer).items() if name != "step"}
    hooks: dict[str, Any] = {name: OrderedDict() for name in own if name.endswith("_hooks")}
    groups = [dict(group) for group in optimizer.param_groups]
    vars(twin).update({**own, **hooks, "state": defaultdict(dict), "param_groups": groups})
    return twin


def _tiny_shard(like: torch.Tensor) -> nn.Parameter:
    """Laid out as ``like`` is."""
    if not isinstance(like, DTensor):
        return _tiny(like)

    def lay_out(local: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False)

    parameter = nn.Parameter(lay_out(_values(like)))
    parameter.grad = lay_out(_values(like))
    return parameter


def _tiny(like: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(_values(like))
    parameter.grad = _values(like)
    return parameter


def _values(like: torch.Tensor) -> torch.Tensor:
    local = like.to_local() if isinstance(like, DTensor) else like
    return torch.ones([_SIZE] * like.ndim, dtype=like.dtype, device=local.device)


def _first_line(problem: BaseException) -> str:
    return str(problem).partition("\n")[0][:160]
