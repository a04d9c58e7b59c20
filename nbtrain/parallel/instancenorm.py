"""Instance normalisation whose running statistics are those of all ranks' batches.

Each sample is normalised by itself, whichever rank has it; the running statistics are means over the samples of a
batch, and a rank's are of its own share. Their mean over ranks, weighted by samples, is what one device has.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.parallel.batchnorm import SharedStatistics


class GlobalInstanceNorm(SharedStatistics):
    """In front of an instance normalisation of torch's that tracks running statistics. Input: as of that one."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        running = [self.running_mean, self.running_var]  # type: ignore[attr-defined]  # beside an nn.InstanceNorm
        before = [buffer.clone() for buffer in running]
        output: torch.Tensor = super().forward(input)  # type: ignore[misc]
        if self.training:  # type: ignore[attr-defined]
            batched = input.dim() > self._get_no_batch_dim()  # type: ignore[attr-defined]
            self._share(running, before, (input.shape[0] if batched else 1) * self.counts)
        return output

    @torch.no_grad()
    def _share(self, running: list[torch.Tensor], before: list[torch.Tensor], count: int) -> None:
        flat = torch.cat([*running, running[0].new_ones(1)]) * count
        dist.all_reduce(flat, group=self.group)
        total = flat[-1]
        means = (flat[:-1] / total.clamp_min(1)).chunk(2)
        for buffer, old, mean in zip(running, before, means, strict=True):
            buffer.copy_(torch.where(total > 0, mean, old))


class GlobalInstanceNorm1d(GlobalInstanceNorm, nn.InstanceNorm1d):
    """Of (B, C, L) or (C, L)."""


class GlobalInstanceNorm2d(GlobalInstanceNorm, nn.InstanceNorm2d):
    """Of (B, C, H, W) or (C, H, W)."""


class GlobalInstanceNorm3d(GlobalInstanceNorm, nn.InstanceNorm3d):
    """Of (B, C, D, H, W) or (C, D, H, W)."""


_REPLACED: dict[Any, Any] = {
    nn.InstanceNorm1d: GlobalInstanceNorm1d,
    nn.InstanceNorm2d: GlobalInstanceNorm2d,
    nn.InstanceNorm3d: GlobalInstanceNorm3d,
}


def track_globally(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Replaces the instance normalisations of ``model`` that track statistics, in place; what they hold stays."""
    for module in model.modules():
        # exact classes: a subclass may compute something else
        replacement = _REPLACED.get(type(module))
        if replacement is not None and module.track_running_stats:
            module.__class__ = replacement
            module.group = group  # type: ignore[assignment]
