"""A loss function that reads what a rank has a part of: it would compute with a part as if it were the whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nbtrain.errors import ModelError
from nbtrain.parallel.replicate import Replica
from nbtrain.parallel.tensor.marks import mark_of

LossFn = Callable[..., Any]


def reading_wholes(loss_fn: LossFn | None, model: nn.Module, names: Collection[str]) -> LossFn | None:
    """``loss_fn``, which raises when it reads a parameter or an activation that tensor parallelism has cut.

    Args:
        loss_fn: Or None.
        model: Laid out.
        names: Of the parameters that are cut, or whose gradient is summed over peers.
    """
    if loss_fn is None:
        return None

    @functools.wraps(loss_fn)
    def watched(*args: Any, **kwargs: Any) -> Any:
        # not model.named_parameters(): where stages split the model, that is an error while the loss runs
        inner = model.module if isinstance(model, Replica) else model
        held = {id(parameter): name for name, parameter in nn.Module.named_parameters(inner) if name in names}
        with _Reading(held):
            return loss_fn(*args, **kwargs)

    return watched


class _Reading(TorchFunctionMode):
    def __init__(self, parameters: dict[int, str]) -> None:
        super().__init__()
        self._parameters = parameters

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            for each in value if isinstance(value, list | tuple) else (value,):
                self._check(each)
        return func(*args, **kwargs)

    def _check(self, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            return
        if (name := self._parameters.get(id(value))) is not None:
            raise ModelError(
                f"loss_fn reads the parameter '{name}', of which this rank has a part (tp): a sum over it would not be "
                "the whole one's; use the optimizer's weight_decay, or leave its layer whole: "
                f"tp_plan={{'{name.rpartition('.')[0]}': 'replicate'}}"
            )
        if mark_of(value) is not None:
            raise ModelError(
                "loss_fn reads an activation of which this rank has a part (tp); let the model's forward return what "
                "the loss needs, or leave the layers around it whole: tp_plan={'NAME': 'replicate'}"
            )
