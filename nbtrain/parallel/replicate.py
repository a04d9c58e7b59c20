"""`Replica`: a model whose gradients are averaged over ranks by DDP."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# torch 2.13 renamed the option and warns at the old name
_SYNC_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _SYNC_OPTIONS else "broadcast_buffers": False
}


class Replica(nn.Module):
    """``model`` with DDP around its forward.

    It looks like the model: its attributes and methods are there, and its state dict has the model's names.

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
        self.rewrap()

    def rewrap(self) -> None:
        """Makes a new reducer: after an exception in backward, or on a new group, the old one is dead."""
        old = vars(self).get("_ddp")
        if old is not None:
            old._remove_autograd_hooks()
        # in the dict, so that DDP isn't a submodule: its names would show in every name of the model
        vars(self)["_ddp"] = DistributedDataParallel(
            self.module,
            process_group=self._group,
            bucket_cap_mb=self._bucket_mb,
            # weights were broadcast by nbtrain, and batch statistics are global
            init_sync=False,
            **_NO_BUFFER_SYNC,
            # a branch that only some ranks take would hang the others without it
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["_ddp"](*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward inside adds to local gradients and moves nothing."""
        context: AbstractContextManager[None] = vars(self)["_ddp"].no_sync()
        return context

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return self.module.named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
