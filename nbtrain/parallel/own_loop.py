"""A training loop of one's own around a tensor-parallel model: what a `Trainer` does for one, done on the way.

Torch's own functions see a rank's parts and don't know it. The norm of a part is not the norm: what
``torch.nn.utils.clip_grad_norm_`` asks for its norm is replaced. A whole parameter that acts on cut activations has a
part of its gradient on each peer: it is summed in backward. A GradScaler looks for infinities in parts: ranks tell each
other what they found. An optimizer that does more than treat each element by itself would do it to parts: its step
raises.
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
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from nbtrain.errors import GradientError, UsageError
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.optimizer import require_elementwise
from nbtrain.parallel.spread import Spread
from nbtrain.parallel.usage import sharded_records

_ATTRIBUTE = "_nbtrain_loop"
_loops: weakref.WeakSet[OwnLoop] = weakref.WeakSet()


class OwnLoop:
    """Of one model. A `Trainer` that takes the model over does the same by itself, in fewer messages.

    Args:
        model: Laid out, with tp.
        layout: Of the model; keeps this.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.layout = layout
        self.taken_over = False
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._spread = Spread(model, layout, list(self._parameters.values()), dealt=False)
        self._waiting = self._hook_partial(model)
        if self._waiting:
            model.register_forward_hook(self._hook_gathered)
        for parameter in self._parameters.values():
            # weak: a parameter that held its model would only be freed by the garbage collector
            setattr(parameter, _ATTRIBUTE, weakref.ref(self))
        _loops.add(self)

    def _hook_partial(self, model: nn.Module) -> list[Any]:
        """FSDP's records of partial parameters, whose gathered form does not exist yet; others get their hooks."""
        partial = {id(parameter) for parameter in self._spread.partial}
        records = [record for record in sharded_records(model) if id(record.sharded_param) in partial]
        gathered = {id(record.sharded_param) for record in records}
        for parameter in self._spread.partial:
            if id(parameter) not in gathered:
                parameter.register_hook(self._summed)  # type: ignore[no-untyped-call]
        return records

    def _hook_gathered(self, model: nn.Module, args: Any, output: Any) -> None:
        for record in list(self._waiting):
            if hasattr(record, "_unsharded_param"):
                record._unsharded_param.register_hook(self._summed)
                self._waiting.remove(record)

    def _summed(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """In backward, before it is added to what was there. Collective over tensor-parallel peers."""
        if self.taken_over:
            return None
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=self.layout.peers)
        return total

    def norm_of(self, gradients: set[int], error_if_nonfinite: bool) -> torch.Tensor:
        """The 2-norm over all ranks of those gradients whose ids are given: 0-d, float32. Collective."""
        chosen = [parameter for parameter in self._parameters.values() if id(parameter.grad) in gradients]
        total = torch.as_tensor(self._spread.square_sum(chosen), dtype=torch.float64)
        total = total.to(next(iter(self._parameters.values())).device)
        dist.all_reduce(total, group=self.layout.everyone)
        norm = math.sqrt(total.item())
        if error_if_nonfinite and not math.isfinite(norm):
            raise GradientError(f"the gradient norm is {norm}; look at the batch, or lower the learning rate")
        return total.sqrt().float()

    def gradients(self) -> set[int]:
        """Ids."""
        return {id(parameter.grad) for parameter in self._parameters.values() if parameter.grad is not None}

    def check(self, optimizer: Optimizer) -> None:
        """Before a step of the user's own.

        Raises:
            OptimizerError: It does more than treat each element by itself.
        """
        if self.taken_over:
            return
        require_elementwise(optimizer)


def watch(model: nn.Module, layout: Layout) -> OwnLoop:
    """Makes torch's functions right for ``model``'s parameters."""
    _patch()
    return OwnLoop(model, layout)


@functools.cache
def _patch() -> None:
    """Once a process. What notebooks have imported from torch before looks this up when it is called."""
    register_optimizer_step_pre_hook(_before_step)
    torchs = clip_grad._get_total_norm

    @functools.wraps(torchs)
    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, *rest: Any, **more: Any
    ) -> torch.Tensor:
        held = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        ids = {id(tensor) for tensor in held}
        loops = [loop for loop in _loops if ids & loop.gradients()]
        if not loops:
            return torchs(held, norm_type, error_if_nonfinite, *rest, **more)
        if len(loops) > 1 or not ids <= loops[0].gradients() or norm_type != 2:
            raise UsageError(
                "the norm of a tensor-parallel model's gradients is that of one model's parameters, and the 2-norm, "
                "since ranks hold parts of them; type torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
            )
        return loops[0].norm_of(ids, error_if_nonfinite)

    clip_grad._get_total_norm = get_total_norm
    torch.nn.utils.get_total_norm = get_total_norm
    _patch_scaler()


def _patch_scaler() -> None:
    torchs = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(torchs)
    def _unscale_grads_(scaler: Any, optimizer: Optimizer, *rest: Any, **more: Any) -> Any:
        found = torchs(scaler, optimizer, *rest, **more)
        for loop in _owners(parameter for group in optimizer.param_groups for parameter in group["params"]):
            for infinities in found.values():
                dist.all_reduce(infinities, op=dist.ReduceOp.MAX, group=loop.layout.everyone)
        return found

    torch.amp.GradScaler._unscale_grads_ = _unscale_grads_  # type: ignore[assignment,method-assign]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for loop in _owners(parameter for group in optimizer.param_groups for parameter in group["params"]):
        loop.check(optimizer)


def _owners(parameters: Iterable[torch.Tensor]) -> list[OwnLoop]:
    """Of the tensor-parallel models that ``parameters`` are of, in their order."""
    found = (getattr(parameter, _ATTRIBUTE, lambda: None)() for parameter in parameters)
    return list(dict.fromkeys(loop for loop in found if loop is not None))
