"""bf16 compute with fp32 weights.

The model's forward runs under autocast: matrix products in bf16, sums and losses in fp32. Where FSDP shards the
parameters it also casts them to bf16 before they are gathered, which halves what moves; then layers that autocast
leaves alone (norms) run in bf16 too. Weights, gradients after reduction and optimizer state are fp32 in both.
What comes out of the model is fp32, so that a loss outside of it is too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only

DTYPES = {"bf16": torch.bfloat16}


class Autocast:
    """Mixed into the class of a model, whose forward then computes in ``_compute_dtype``."""

    _compute_dtype: torch.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = next(self.parameters()).device.type  # type: ignore[attr-defined]  # an nn.Module beside it
        with torch.autocast(device, self._compute_dtype):
            output = super().forward(*args, **kwargs)  # type: ignore[misc]  # of the model's class
        return tree_map_only(torch.Tensor, _full_precision, output)


def compute_in(model: nn.Module, precision: str) -> None:
    """Makes ``model`` compute in ``precision`` from now on; "fp32" leaves its dtypes as they are."""
    if isinstance(model, Autocast):  # a copy of a model that was laid out
        model.__class__ = type(model).__bases__[1]
    if precision not in DTYPES:
        return
    # a subclass, not a wrapper: names, isinstance and the model's own methods stay
    cls = type(model)
    model.__class__ = type(cls.__name__, (Autocast, cls), {"_compute_dtype": DTYPES[precision]})


def shard_policy(precision: str) -> MixedPrecisionPolicy:
    """What FSDP casts: parameters to ``precision`` for compute, gradients to fp32 before they are reduced."""
    if precision not in DTYPES:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)


def _full_precision(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in DTYPES.values() else tensor
