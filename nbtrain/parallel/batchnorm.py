"""Batch normalisation over the batches of all ranks.

torch's ``SyncBatchNorm`` runs on GPUs only. Without it each rank normalises by its own share of the batch, which is
another function than the one that a single device computes. Here mean and variance are taken over the ranks'
batches together, by two small all-reduces of C elements each, and gradients flow back through both.
With ``accumulate=k`` every chunk is its own batch, as on one device.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from nbtrain.parallel.live import Grouped

_REPLACED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class _AllReduce(torch.autograd.Function):
    """Sum over ranks; its gradient is the sum over ranks too, since every rank's output needs every input."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Silent(torch.autograd.Function):
    """Identity, whose gradient is zeros, also where the output's is not finite."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gradient)


class SharedStatistics(Grouped):
    """Beside a norm's class: its statistics are taken over the batches of a group's ranks.

    Attributes:
        counts: Whether this rank's batch counts; else it is normalised by the others' and changes nothing.
    """

    group: dist.ProcessGroup
    counts: bool = True

    def regroup(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self.group)] = self.group  # ranks are shared, not copied
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin


class GlobalBatchNorm(SharedStatistics, _BatchNorm):
    """Batch normalisation by the statistics of all ranks' batches.

    Input and output: (B, C) or (B, C, ...), any floating dtype; statistics are fp32. B may differ between ranks and
    be 0 on some; every rank must run the layer. In eval mode it is ``nn.BatchNorm``.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        values = input.float()
        if not self.training and self.running_mean is not None:
            return self._by_running_statistics(values).to(input.dtype)
        count, mean, variance = self._statistics(values if self.counts else values[:0])
        if self.training and self.track_running_stats:
            self._track(count, mean.detach(), variance.detach())
        if not self.counts:
            mean, variance = Silent.apply(mean), Silent.apply(variance)  # type: ignore[no-untyped-call]
        normal = (values - _as_channels(mean, values)) * _as_channels((variance + self.eps).rsqrt(), values)
        if self.affine:
            normal = normal * _as_channels(self.weight.float(), values) + _as_channels(self.bias.float(), values)
        return normal.to(input.dtype)

    def _by_running_statistics(self, values: torch.Tensor) -> torch.Tensor:
        # FSDP's bf16 weights beside fp32 statistics are more than F.batch_norm can mix on a CPU
        weight, bias = (self.weight.float(), self.bias.float()) if self.affine else (None, None)
        return F.batch_norm(values, self.running_mean, self.running_var, weight, bias, eps=self.eps)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dims (B, C, ...), got {input.dim()}")

    def _statistics(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Elements a channel (0-d), mean (C) and biased variance (C) over all ranks.

        The variance comes from a second pass over centred values: E[x^2] - E[x]^2 cancels.
        """
        self._check_input_dim(values)
        dims = [dim for dim in range(values.dim()) if dim != 1]
        local_count = values.new_full((1,), values.numel() // max(values.shape[1], 1))
        totals = _sum_over(self.group, torch.cat([values.sum(dims), local_count]))
        count = totals[-1].detach()
        divisor = count.clamp_min(1)  # no rank may have a sample in this chunk
        mean = totals[:-1] / divisor
        squares = (values - _as_channels(mean, values)).square().sum(dims)
        return count, mean, _sum_over(self.group, squares) / divisor

    def _track(self, count: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
        some = count > 0
        self.num_batches_tracked.add_(some)  # type: ignore[union-attr]  # a buffer, when statistics are kept
        weight: Any = self.momentum
        if weight is None:
            weight = 1.0 / self.num_batches_tracked.float().clamp_min(1)  # type: ignore[union-attr]
        weight = weight * some.to(mean.dtype)
        unbiased = variance * (count / (count - 1).clamp_min(1))
        self.running_mean.lerp_(mean, weight)  # type: ignore[union-attr]
        self.running_var.lerp_(unbiased, weight)  # type: ignore[union-attr]


def _sum_over(group: dist.ProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = _AllReduce.apply(tensor, group)  # type: ignore[no-untyped-call]
    return total


def _as_channels(vector: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A (C) vector in the shape (1, C, 1, ...)."""
    return vector.view(1, -1, *([1] * (values.dim() - 2)))


def normalise_globally(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Replaces the batch normalisations of ``model`` in place; parameters, buffers and hooks stay."""
    for module in model.modules():
        # exact classes: a subclass may compute something else
        if type(module) in _REPLACED:
            module.__class__ = GlobalBatchNorm
            module.group = group  # type: ignore[assignment]
