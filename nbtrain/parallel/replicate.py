"""`Replica`: a model whose gradients are averaged over ranks; `DDPReplica`: by DDP."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from nbtrain.errors import ModelError, UsageError, nearest
from nbtrain.parallel.live import Grouped
from nbtrain.parallel.usage import Usage

# torch 2.13 renamed the option and warns at the old name
_SYNC_OPTION = "forward_sync_buffers"
if _SYNC_OPTION not in inspect.signature(DistributedDataParallel).parameters:
    _SYNC_OPTION = "broadcast_buffers"

DDP_OPTIONS = {"static_graph": False, "find_unused_parameters": False, "gradient_as_bucket_view": True}
"""What ``ddp={...}`` may set, and what it is otherwise."""


class Replica(nn.Module, Grouped, Joinable):
    """``model`` with a reducer of gradients around its forward.

    It looks like the model: its attributes and methods are there, and its state dict has the model's names.
    Ranks may take different branches: what a rank's backward did not reach is reduced as zeros.

    Args:
        model: On its device, with the same weights on every rank.
    """

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = model
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.usage = Usage(self._trained)
        self._reached: set[int] = set()
        self._completing = False
        for index, parameter in enumerate(self._trained):
            parameter.register_post_accumulate_grad_hook(self._marker(index))  # type: ignore[no-untyped-call]

    def unwrap(self) -> None:
        """Drops what an exception in backward has left half done, or what lives on groups that are gone.

        The next forward begins afresh. Moves nothing.
        """
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward inside adds to local gradients and moves nothing."""
        raise NotImplementedError

    def bucket_bytes(self) -> list[int]:
        """Sizes of the buckets in which gradients travel, in their order; empty before they are known."""
        raise NotImplementedError

    def _syncs(self) -> bool:
        """Whether the backward that runs reduces."""
        raise NotImplementedError

    def _arrived(self, index: int) -> None:
        """A gradient is there."""

    def _complete(self) -> None:
        """The end of a backward that reduces."""
        raise NotImplementedError

    def _marker(self, index: int) -> Callable[[torch.Tensor], None]:
        def mark(parameter: torch.Tensor) -> None:
            if self._completing:
                return
            if not self._reached and self._syncs():
                Variable._execution_engine.queue_callback(self._complete)
            self._reached.add(index)
            self.usage.mark(index)
            self._arrived(index)

        return mark

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

    @property
    def joins(self) -> bool:
        """Whether torch's ``Join`` is around the loop."""
        raise NotImplementedError

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's ``Join([replica])`` around one's own loop; `nbtrain.loader` has ``uneven=True`` for a Trainer."""
        raise NotImplementedError

    def _require_joinable(self) -> None:
        """Raises `ModelError` where layers talk in forward: a rank that has joined runs none."""
        talking = [name for name, module in self.module.named_modules() if isinstance(module, Grouped)]
        if talking:
            raise ModelError(
                f"'{talking[0]}' takes its statistics over all ranks in forward, which a rank that has joined does not "
                "run; use nt.loader(..., uneven=True) with a Trainer, or freeze it: model.eval()"
            )


class DDPReplica(Replica):
    """`Replica` by DDP.

    Args:
        model: On its device, with the same weights on every rank.
        group: The data-parallel ranks.
        bucket_mb: Size of a gradient bucket in MiB; None takes torch's.
        options: Of `DDP_OPTIONS`.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        bucket_mb: float | None = None,
        options: Mapping[str, bool] | None = None,
    ) -> None:
        super().__init__(model)
        self._group = group
        self._bucket_mb = bucket_mb
        self._has_reduced = False
        self._options = {**DDP_OPTIONS, **(options or {})}
        # made by the first forward: a rank that takes a lost one's place must not make it before the others do
        vars(self)["_ddp"] = None

    def unwrap(self) -> None:
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
            **self._options,
        }
        self._has_reduced = False
        # in the dict, so that DDP isn't a submodule: its names would show in every name of the model
        vars(self)["_ddp"] = DistributedDataParallel(self.module, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._reached.clear()
        return self.reducer()(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        if self._options["static_graph"] and not self._has_reduced:
            return nullcontext()  # its first backward must reduce; the mean over ranks of a mean is that mean
        context: AbstractContextManager[None] = self.reducer().no_sync()
        return context

    def reducer(self) -> DistributedDataParallel:
        """torch's; another one after an exception in a step."""
        if vars(self)["_ddp"] is None:
            self._wrap()
        reducer: DistributedDataParallel = vars(self)["_ddp"]
        return reducer

    def bucket_bytes(self) -> list[int]:
        if vars(self)["_ddp"] is None:
            return []
        told = self.reducer()._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        sizes = told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or ""
        return [int(size) for size in str(sizes).split(",") if size.strip()]

    def _syncs(self) -> bool:
        return bool(self.reducer().require_backward_grad_sync)

    def _complete(self) -> None:
        """At the end of backward: gives the reducer zeros for what backward did not reach.

        DDP waits for every parameter. Its own cure (``find_unused_parameters``) walks the whole graph in each step
        and never orders its buckets by arrival.
        """
        missing = [parameter for index, parameter in enumerate(self._trained) if index not in self._reached]
        self._reached.clear()
        self._has_reduced = True
        if not missing or self._options["find_unused_parameters"] or self._options["static_graph"]:
            return  # DDP knows which
        self._completing = True
        try:
            torch.autograd.backward(missing, [torch.zeros_like(parameter) for parameter in missing])
        finally:
            self._completing = False

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self._require_joinable()
        hook: JoinHook = self.reducer().join_hook(**kwargs)  # type: ignore[no-untyped-call]
        return hook

    @property
    def joins(self) -> bool:
        return vars(self)["_ddp"] is not None and bool(self._join_config.enable)

    @property
    def join_device(self) -> torch.device:
        return self.reducer().join_device  # type: ignore[no-any-return]

    @property
    def join_process_group(self) -> Any:
        return self.reducer().join_process_group

    @property
    def _join_config(self) -> Any:
        return self.reducer()._join_config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        # the reducer's forward tells the others that this rank has not joined
        self.reducer()._join_config = config


def check_ddp_options(options: Mapping[str, Any]) -> dict[str, bool]:
    """What ``ddp={...}`` holds.

    Raises:
        UsageError: A name is unknown (with the nearest one) or a value is no bool.
    """
    if not isinstance(options, Mapping):
        raise UsageError(f"ddp={options!r} is no dict; type e.g. ddp={{'static_graph': True}}")
    for name, value in options.items():
        if name not in DDP_OPTIONS:
            raise UsageError(f"ddp has no option {name!r}; {nearest(str(name), list(DDP_OPTIONS))}")
        if not isinstance(value, bool):
            raise UsageError(f"ddp={{{name!r}: {value!r}}} must be True or False; type ddp={{{name!r}: True}}")
    return dict(options)
