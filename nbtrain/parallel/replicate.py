"""`Replica`: a model whose gradients are averaged over ranks by DDP."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from nbtrain.parallel.live import Grouped
from nbtrain.parallel.usage import Usage

# torch 2.13 renamed the option and warns at the old name
_SYNC_OPTION = "forward_sync_buffers"
if _SYNC_OPTION not in inspect.signature(DistributedDataParallel).parameters:
    _SYNC_OPTION = "broadcast_buffers"


class Replica(nn.Module, Grouped):
    """``model`` with DDP around its forward.

    It looks like the model: its attributes and methods are there, and its state dict has the model's names.
    Ranks may take different branches: what a rank's backward did not reach is reduced as zeros.

    Args:
        model: On its device, with the same weights on every rank.
        group: The data-parallel ranks.
        bucket_mb: Size of a gradient bucket in MiB; None takes torch's.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, bucket_mb: float | None = None) -> None:
        super().__init__()
        self.module = model
        self._group = group
        self._bucket_mb = bucket_mb
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.usage = Usage(self._trained)
        self._reached: set[int] = set()
        self._completing = False
        for index, parameter in enumerate(self._trained):
            parameter.register_post_accumulate_grad_hook(self._marker(index))  # type: ignore[no-untyped-call]
        # made by the first forward: a rank that takes a lost one's place must not make it before the others do
        vars(self)["_ddp"] = None

    def unwrap(self) -> None:
        """Drops the reducer: after an exception in backward, or when its group is gone, it is dead.

        The next forward makes a new one. Moves nothing.
        """
        old, vars(self)["_ddp"] = vars(self)["_ddp"], None
        if old is not None:
            old._remove_autograd_hooks()

    def regroup(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.unwrap()

    def _wrap(self) -> None:
        options: dict[str, Any] = {
            "process_group": self._group,
            "bucket_cap_mb": self._bucket_mb,
            # weights were broadcast by nbtrain, and batch statistics are global
            "init_sync": False,
            _SYNC_OPTION: False,
            "gradient_as_bucket_view": True,
        }
        # in the dict, so that DDP isn't a submodule: its names would show in every name of the model
        vars(self)["_ddp"] = DistributedDataParallel(self.module, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._reached.clear()
        return self._reducer()(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward inside adds to local gradients and moves nothing."""
        context: AbstractContextManager[None] = self._reducer().no_sync()
        return context

    def _reducer(self) -> DistributedDataParallel:
        if vars(self)["_ddp"] is None:
            self._wrap()
        reducer: DistributedDataParallel = vars(self)["_ddp"]
        return reducer

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return self.module.named_buffers(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the model, not laid out: for averages of weights."""
        return copy.deepcopy(self.module, memo)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def _marker(self, index: int) -> Callable[[torch.Tensor], None]:
        def mark(parameter: torch.Tensor) -> None:
            if self._completing:
                return
            if not self._reached and self._reducer().require_backward_grad_sync:
                Variable._execution_engine.queue_callback(self._complete)
            self._reached.add(index)
            self.usage.mark(index)

        return mark

    def _complete(self) -> None:
        """At the end of backward: gives the reducer zeros for what backward did not reach.

        DDP waits for every parameter. Its own cure (``find_unused_parameters``) walks the whole graph in each step
        and never orders its buckets by arrival.
        """
        missing = [parameter for index, parameter in enumerate(self._trained) if index not in self._reached]
        self._reached.clear()
        if not missing:
            return
        self._completing = True
        try:
            torch.autograd.backward(missing, [torch.zeros_like(parameter) for parameter in missing])
        finally:
            self._completing = False
