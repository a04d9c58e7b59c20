"""A training loop of one's own around a tensor-parallel model: what a `Trainer` does for one, done on the way.

Torch's own functions see a rank's parts and don't know it: the norm of a part is not the norm, and a whole parameter
that acts on cut activations has a part of its gradient on each peer. So `torch.nn.utils.clip_grad_norm_` and the step
of any optimizer are watched: where they get parameters of such a model, its partial gradients are summed first, once
after each backward, and the norm is taken over all ranks.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbtrain.errors import GradientError, UsageError
from nbtrain.parallel import gradients
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.spread import Spread

_ATTRIBUTE = "_nbtrain_loop"


class OwnLoop:
    """Of one model. A `Trainer` that takes the model over does the same by itself.

    Args:
        model: Laid out, with tp.
        layout: Of the model; keeps this.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._layout = layout
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._spread = Spread(model, layout, self._parameters)
        self._summed = True
        self.taken_over = False
        model.register_forward_pre_hook(self._begin)
        for parameter in self._parameters:
            # weak: a parameter that held its model would only be freed by the garbage collector
            setattr(parameter, _ATTRIBUTE, weakref.ref(self))

    def _begin(self, model: nn.Module, args: Any) -> None:
        self._summed = False

    def sum_partial(self) -> None:
        """Once after each backward. Collective over tensor-parallel peers."""
        if not (self._summed or self.taken_over):
            self._spread.sum_partial()
        self._summed = True

    def clip(self, max_norm: float, error_if_nonfinite: bool) -> torch.Tensor:
        """As torch's, by the norm over all ranks: 0-d, float32. Collective."""
        self.sum_partial()
        total = torch.as_tensor(self._spread.square_sum(), dtype=torch.float64)
        total = total.to(self._parameters[0].device)
        dist.all_reduce(total, group=self._layout.everyone)
        norm = math.sqrt(total.item())
        if error_if_nonfinite and not math.isfinite(norm):
            raise GradientError(f"the gradient norm is {norm}; look at the batch, or lower the learning rate")
        gradients.scale(self._parameters, gradients.clip_factor(norm, max_norm))
        return torch.tensor(norm, device=total.device)


def watch(model: nn.Module, layout: Layout) -> OwnLoop:
    """Makes torch's functions right for ``model``'s parameters."""
    _patch()
    return OwnLoop(model, layout)


@functools.cache
def _patch() -> None:
    """Once a process."""
    register_optimizer_step_pre_hook(_before_step)
    torchs = torch.nn.utils.clip_grad_norm_

    @functools.wraps(torchs)
    def clip_grad_norm_(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *rest: Any,
        **more: Any,
    ) -> torch.Tensor:
        held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        loops = _loops(held)
        if not loops:
            return torchs(held, max_norm, norm_type, error_if_nonfinite, *rest, **more)
        _require_one_whole_model(loops, held, norm_type)
        return loops[0].clip(max_norm, error_if_nonfinite)

    torch.nn.utils.clip_grad_norm_ = clip_grad_norm_


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for loop in _loops(parameter for group in optimizer.param_groups for parameter in group["params"]):
        loop.sum_partial()


def _loops(parameters: Iterable[torch.Tensor]) -> list[OwnLoop]:
    """Of the tensor-parallel models that ``parameters`` are of, in their order."""
    found = (getattr(parameter, _ATTRIBUTE, lambda: None)() for parameter in parameters)
    return list(dict.fromkeys(loop for loop in found if loop is not None))


def _require_one_whole_model(loops: list[OwnLoop], held: list[torch.Tensor], norm_type: float) -> None:
    with_gradient = {id(parameter) for parameter in loops[0]._parameters if parameter.grad is not None}
    given = {id(parameter) for parameter in held if parameter.grad is not None}
    if len(loops) > 1 or given != with_gradient or norm_type != 2:
        raise UsageError(
            "clip_grad_norm_ of a tensor-parallel model needs all of its parameters and the 2-norm, since ranks hold "
            "parts of them; type torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) or "
            "Trainer(..., grad_clip=max_norm)"
        )
