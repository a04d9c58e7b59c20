"""bf16 and fp16 compute with fp32 weights.

The model's forward runs under autocast: matrix products in 16 bits, sums and losses in fp32. Where FSDP shards the
parameters it also casts them before they are gathered, which halves what moves; then layers that autocast leaves alone
(norms) run in 16 bits too. Weights, gradients after reduction and optimizer state are fp32 in both.
What comes out of the model, and only there, is cast to fp32, so that a loss outside of it is too.
fp16 needs a loss scale beside it: `nbtrain.parallel.scaler`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only

from nbtrain.errors import ModelError
from nbtrain.parallel.mixin import Mixin, mix

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Autocast(Mixin):
    """Mixed into the class of a model, whose forward then computes in ``_compute_dtype``.

    ``_compute_device`` is a device type; None takes that of the first parameter.
    """

    _compute_dtype: torch.dtype
    _compute_device: str | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = self._compute_device
        if device is None:
            device = next(self.parameters()).device.type  # type: ignore[attr-defined]  # an nn.Module beside it
        with torch.autocast(device, self._compute_dtype):
            output = super().forward(*args, **kwargs)  # type: ignore[misc]  # of the model's class
        return tree_map_only(torch.Tensor, _full_precision, output)


def compute_in(model: nn.Module, precision: str, device: torch.device | None = None) -> None:
    """Makes ``model`` compute in ``precision`` from now on; "fp32" leaves its dtypes as they are.

    Args:
        model: Changed in place.
        precision: Of a plan.
        device: That it computes on, where its parameters may lie elsewhere.

    Raises:
        ModelError: fp16 with weights that are fp16 themselves: small steps would round to none.
    """
    if precision not in DTYPES:
        return
    if precision == "fp16" and any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        raise ModelError("precision=fp16 keeps fp32 weights, and the model's are float16; type model.float()")
    mix(model, Autocast, _compute_dtype=DTYPES[precision], _compute_device=None if device is None else device.type)


def shard_policy(precision: str) -> MixedPrecisionPolicy:
    """What FSDP casts: parameters to ``precision`` for compute, gradients to fp32 before they are reduced."""
    if precision not in DTYPES:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)


def _full_precision(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in DTYPES.values() else tensor
