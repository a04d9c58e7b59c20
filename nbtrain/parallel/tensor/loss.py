"""Cross-entropy of logits that are cut along the vocabulary: no rank holds them whole.

Megatron-LM (arXiv 1909.08053, section 3): three numbers a token are summed over ranks, none of them a logit's vector.
Shapes: N tokens, V vocabulary, v = V/t of it here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from nbtrain.parallel.tensor.peers import Peers


def token_losses(
    logits_Nv: torch.Tensor, targets_N: torch.Tensor, peers: Peers, smoothing: float = 0.0
) -> torch.Tensor:
    """-log softmax at the target, (N) in fp32, as of ``F.cross_entropy(..., reduction="none")``.

    Args:
        logits_Nv: This rank's part, any floating dtype. Softmax is computed in fp32.
        targets_N: int64 in [0, V); what a caller ignores must have been replaced by any of these.
        peers: Whose parts make up the vocabulary.
        smoothing: As ``label_smoothing``.

    Raises:
        IndexError: A target is outside the vocabulary; on a GPU an assertion of the device.
    """
    _check(targets_N, logits_Nv.shape[1] * peers.degree)
    losses: torch.Tensor = _TokenLosses.apply(logits_Nv, targets_N, peers, smoothing)  # type: ignore[no-untyped-call]
    return losses


class _TokenLosses(torch.autograd.Function):
    """Saves the logits and one number a token; softmax is computed again in backward."""

    @staticmethod
    def forward(ctx: Any, logits_Nv: torch.Tensor, targets_N: torch.Tensor, peers: Peers, smoothing: float) -> Any:
        greatest_N = logits_Nv.amax(1).float()
        dist.all_reduce(greatest_N, dist.ReduceOp.MAX, group=peers.group)
        shifted_Nv = logits_Nv.float() - greatest_N[:, None]
        local_N, elsewhere_N = _local(targets_N, logits_Nv.shape[1], peers)
        target_N = shifted_Nv.gather(1, local_N[:, None])[:, 0].masked_fill(elsewhere_N, 0)
        sums = [target_N, shifted_Nv.sum(1)] if smoothing else [target_N]
        totals = torch.stack([*sums, shifted_Nv.exp_().sum(1)])
        dist.all_reduce(totals, group=peers.group)
        log_N = totals[-1].log()
        ctx.save_for_backward(logits_Nv, greatest_N + log_N, local_N, elsewhere_N)
        ctx.size, ctx.smoothing = logits_Nv.shape[1] * peers.degree, smoothing
        losses_N = log_N - totals[0]
        if smoothing:
            losses_N = losses_N * (1 - smoothing) + smoothing * (log_N - totals[1] / ctx.size)
        return losses_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: torch.Tensor) -> Any:
        logits_Nv, log_N, local_N, elsewhere_N = ctx.saved_tensors
        gradient_Nv = (logits_Nv.float() - log_N[:, None]).exp_()
        if ctx.smoothing:
            gradient_Nv -= ctx.smoothing / ctx.size
        at_target_N = torch.where(elsewhere_N, 0.0, ctx.smoothing - 1.0)
        gradient_Nv.scatter_add_(1, local_N[:, None], at_target_N[:, None])
        return (gradient_Nv * gradient_N[:, None]).to(logits_Nv.dtype), None, None, None


def _local(targets_N: torch.Tensor, size: int, peers: Peers) -> tuple[torch.Tensor, torch.Tensor]:
    """Where targets are in this rank's part, 0 for those that are elsewhere; and which these are."""
    local_N = targets_N - peers.rank * size
    elsewhere_N = (local_N < 0) | (local_N >= size)
    return local_N.masked_fill(elsewhere_N, 0), elsewhere_N


def _check(targets: torch.Tensor, size: int) -> None:
    """A target that no rank has would count as a logit of the greatest value."""
    if targets.is_cuda:
        torch._assert_async(((targets >= 0) & (targets < size)).all(), f"a target is outside {size} classes")
    elif targets.numel() and (targets.min() < 0 or targets.max() >= size):
        raise IndexError(f"targets from {int(targets.min())} to {int(targets.max())} are outside {size} classes")
