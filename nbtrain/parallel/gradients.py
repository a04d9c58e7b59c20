"""What is done with gradients between backward and the optimizer, on this rank's shards."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from nbtrain.parallel.local import local_gradients


def square_sum(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The sum of squares of this rank's gradients: 0-d, float64.

    Summed over shards it is the square of the global norm that ``torch.nn.utils.clip_grad_norm_`` takes.
    """
    gradients = local_gradients(parameters)
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(gradients, 2.0)
    return torch.stack([norm.double() for norm in norms]).square().sum()


def clip_factor(norm: float, max_norm: float) -> float:
    """What ``torch.nn.utils.clip_grad_norm_`` multiplies gradients by."""
    return min(1.0, max_norm / (norm + 1e-6))


def scale(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiplies this rank's gradients in place."""
    gradients = local_gradients(parameters)
    if factor != 1 and gradients:
        torch._foreach_mul_(gradients, factor)


def drop(parameters: Iterable[nn.Parameter]) -> None:
    """Frees the gradients."""
    for parameter in parameters:
        parameter.grad = None


def not_finite(named: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Names of those whose gradient has a NaN or an infinity on this rank."""
    return [
        name
        for name, parameter in named
        if not all(bool(torch.isfinite(gradient).all()) for gradient in local_gradients([parameter]))
    ]
