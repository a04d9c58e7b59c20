"""`Layout`: what nbtrain remembers about a model that it laid out."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nbtrain.parallel import shard
from nbtrain.parallel.blueprint import Blueprint
from nbtrain.parallel.live import Grouped
from nbtrain.parallel.mesh import data_mesh
from nbtrain.parallel.messages import begin_round
from nbtrain.parallel.tensor.cuts import Cut, TensorPlan
from nbtrain.parallel.tensor.peers import TensorGrouped
from nbtrain.parallel.tensor.random import Draws
from nbtrain.parallel.update import ShardedUpdate
from nbtrain.parallel.usage import Usage
from nbtrain.plan import Plan

if TYPE_CHECKING:
    from nbtrain.parallel.own_loop import OwnLoop
    from nbtrain.parallel.pipeline.pipeline import Pipeline
    from nbtrain.parallel.pipeline.split import Split

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
        tensor: Which part of each layer a tensor-parallel rank holds; None without tp.
        cuts: How tensor-parallel peers cut parameters, by name, a tied one under each of its names; empty without tp.
        draws: With tp, what random numbers of a forward come from.
        loop: What makes training loops of one's own right with tp; None without.
        split: Which stage holds what; None without pp.
        pipeline: What takes steps of the stages; None without pp.
        compile: Whether, or by which backend, blocks are compiled.
        gone: Why the model holds nothing any more: it was laid out anew; "" where it does.
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
    tensor: TensorPlan | None = None
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    draws: Draws | None = None
    loop: OwnLoop | None = None
    split: Split | None = None
    pipeline: Pipeline | None = None
    compile: bool | str = False
    gone: str = ""
    _models: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)

    @property
    def dp(self) -> int:
        return self.plan.dp

    def begin_round(self) -> None:
        """Of all that ranks exchange in a step or an evaluation, whatever broke the last one."""
        groups = [self.everyone, self.peers, self.stages]
        if isinstance(self.result, ShardedUpdate):
            groups.append(self.result.shard_group)
        begin_round({group for group in groups if group is not None})

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
        if self.everyone is None:
            return "one device"
        data = "sharded" if self.shards else "replicated"
        if self.shards_update:
            data += ", optimizer state sharded"
        kinds = [data] * (self.dp > 1) + ["cut"] * (self.plan.tp > 1) + ["split"] * (self.plan.pp > 1)
        return " and ".join(kinds)

    @functools.cached_property
    def group(self) -> dist.ProcessGroup | None:
        """The data-parallel ranks that hold the same part of the model; None where this rank is the only one."""
        return None if self.mesh is None or self.dp == 1 else data_mesh(self.mesh).get_group()

    @functools.cached_property
    def peers(self) -> dist.ProcessGroup | None:
        """The tensor-parallel ranks that get the same batch; None where this rank is the only one."""
        return None if self.mesh is None or self.plan.tp == 1 else self.mesh.get_group("tp")

    @functools.cached_property
    def stages(self) -> dist.ProcessGroup | None:
        """The pipeline ranks that hold the other stages of this rank's part; None without pp."""
        return None if self.mesh is None or self.plan.pp == 1 else self.mesh.get_group("pp")

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """All ranks that take a step together; None when this rank is alone."""
        return self.group if self.peers is None and self.stages is None else dist.group.WORLD

    @property
    def part(self) -> int:
        """Which part of each layer this rank holds, in ``range(plan.tp)``."""
        return 0 if self.peers is None else dist.get_rank(self.peers)

    def names(self, model: nn.Module, *, dealt: bool = True) -> dict[int, str]:
        """The name of each tensor that an optimizer of ``model`` may hold, by id.

        Args:
            model: Laid out.
            dealt: Whether it holds pieces, where ``zero=1`` deals them out.
        """
        pieces = self.result.named_pieces() if dealt and isinstance(self.result, ShardedUpdate) else None
        held = model.named_parameters() if pieces is None else pieces
        return {id(parameter): name for name, parameter in held}

    def all_names(self, model: nn.Module) -> list[str]:
        """Of the parameters of the whole model, whichever stage holds them."""
        whole = model if self.split is None or self.blueprint is None else self.blueprint.module
        return [name for name, _ in (whole or model).named_parameters()]

    def rebind(self) -> None:
        """Process groups were formed again: take the new ones, here and in the models."""
        for name in ("group", "peers", "stages"):
            vars(self).pop(name, None)
        self.order.clear()  # some ranks may have been cut off before they had agreed on it
        self.regroup()
        if self.shards:
            for model in list(self._models):
                shard.regroup(model)

    def regroup(self) -> None:
        """Give the groups to the modules that talk by them."""
        if self.pipeline is not None:
            self.pipeline.regroup()
        for model in list(self._models):
            for module in model.modules():
                if isinstance(module, Grouped) and self.group is not None:
                    module.regroup(self.group)
                if isinstance(module, TensorGrouped) and self.peers is not None:
                    module.regroup_tensor(self.peers)

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
