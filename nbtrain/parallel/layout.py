"""`Layout`: what nbtrain remembers about a model that it laid out."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nbtrain.parallel import shard
from nbtrain.parallel.blueprint import Blueprint
from nbtrain.parallel.live import Grouped
from nbtrain.parallel.mesh import data_mesh
from nbtrain.parallel.usage import Usage
from nbtrain.plan import Plan

_ATTRIBUTE = "_nbtrain_layout"


@dataclass
class Layout:
    """How a model lies on the ranks.

    Attributes:
        plan: Resolved.
        mesh: None for one device.
        originals: The parameters before sharding, by name. Weak: they must not outlive their owners, or the
            unsharded model would stay in memory.
        units: Names of the modules that are gathered as a whole, apart from the root.
        usage: Marks of the parameters that backward reached, where FSDP shards.
        result: What `parallelize` returned, where that isn't the model itself.
        blueprint: The model's structure before it was laid out; None on one device.
        ddp: Options of DDP's reducer.
        order: Of the units in forward, as ranks agreed on it, by training mode; where FSDP shards.
    """

    plan: Plan
    mesh: DeviceMesh | None
    originals: dict[str, weakref.ref[nn.Parameter]] = field(default_factory=dict)
    units: tuple[str, ...] = ()
    usage: Usage | None = None
    result: nn.Module | None = None
    blueprint: Blueprint | None = None
    ddp: Mapping[str, bool] = field(default_factory=dict)
    order: dict[bool, list[str]] = field(default_factory=dict)
    _models: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)

    @property
    def dp(self) -> int:
        return self.plan.dp

    @property
    def shards(self) -> bool:
        """Whether FSDP shards the parameters; one shard is a replica."""
        return self.plan.shards_parameters and self.plan.dp_shard > 1

    @property
    def shards_update(self) -> bool:
        """Whether replicas share the optimizer's step: ``zero=1``."""
        return self.plan.zero == 1 and self.plan.dp_shard > 1

    @property
    def copies(self) -> int:
        """How many ranks hold the same part of a reduced gradient."""
        return self.plan.dp_replicate if self.shards or self.shards_update else self.dp

    @property
    def kind(self) -> str:
        """In a few words."""
        if self.group is None:
            return "one device"
        if self.shards_update:
            return "replicated, optimizer state sharded"
        return "sharded" if self.shards else "replicated"

    @functools.cached_property
    def group(self) -> dist.ProcessGroup | None:
        """All data-parallel ranks; None when this rank is alone."""
        return None if self.mesh is None or self.dp == 1 else data_mesh(self.mesh).get_group()

    def rebind(self) -> None:
        """Process groups were formed again: take the new ones, here and in the models."""
        vars(self).pop("group", None)
        self.order.clear()  # some ranks may have been cut off before they had agreed on it
        self.regroup()
        if self.shards:
            for model in list(self._models):
                shard.regroup(model)

    def regroup(self) -> None:
        """Give the group to the modules that talk by it."""
        if self.group is None:
            return
        for model in list(self._models):
            for module in model.modules():
                if isinstance(module, Grouped):
                    module.regroup(self.group)

    def __deepcopy__(self, memo: dict[int, object]) -> Layout:
        # goes along with a copied model, of which `layout_of` then knows that it isn't laid out
        return self


def remember(model: nn.Module, layout: Layout) -> None:
    """Makes `layout_of` find ``layout``."""
    layout._models.add(model)
    object.__setattr__(model, _ATTRIBUTE, layout)


def layout_of(model: nn.Module) -> Layout | None:
    """The layout that `parallelize` gave ``model``, or None."""
    # not getattr: a replica passes unknown names on to the model inside it
    layout: Layout | None = vars(model).get(_ATTRIBUTE)
    return layout if layout is not None and model in layout._models else None


def weak(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, weakref.ref[nn.Parameter]]:
    """Weak references by name."""
    return {name: weakref.ref(parameter) for name, parameter in parameters}
