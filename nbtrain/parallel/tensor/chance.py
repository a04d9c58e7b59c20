"""Training mode without chance: two runs can be compared though the code drops elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from nbtrain.parallel.traits import DROPOUTS

_DROPPING = {*DROPOUTS, torch.dropout, torch.alpha_dropout, torch.feature_dropout}
_FILLED: dict[Callable[..., Any], float] = {
    torch.rand_like: 0.5,
    torch.randn_like: 0.0,
    torch.bernoulli: 1.0,
    torch.Tensor.bernoulli: 1.0,
}
_FILLED_IN_PLACE: dict[Callable[..., Any], float] = {
    torch.Tensor.bernoulli_: 1.0,
    torch.Tensor.uniform_: 0.5,
    torch.Tensor.normal_: 0.0,
}


class WithoutChance(TorchFunctionMode):
    """Nothing is dropped, and random numbers are all alike."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPPING:
            return (args[0] if args else kwargs["input"]).clone()
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:]), {**kwargs}
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        if func in _FILLED:
            return torch.full_like(args[0], _FILLED[func])
        if func in _FILLED_IN_PLACE:
            return args[0].fill_(_FILLED_IN_PLACE[func])
        return func(*args, **kwargs)


def undropped(module: nn.Module) -> None:
    """Sets the probabilities of torch's layers to 0, in place: some hand them to functions that none can watch."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        elif isinstance(part, nn.MultiheadAttention | nn.RNNBase):
            part.dropout = 0.0
