"""`Draft`: a layout to be, made of a blueprint: rehearsed without memory, then for real."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from nbtrain.errors import ModelError
from nbtrain.parallel import transplant
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.moving import Catalog, Key
from nbtrain.parallel.parallelize import lay_out_anew
from nbtrain.parallel.pieces import Held, held_parameters
from nbtrain.parallel.spill import num_bytes
from nbtrain.parallel.transfer import gather

T = TypeVar("T")


class Draft:
    """Of one change of layout.

    Args:
        module: Of `structure.build`, with its buffers filled.
        optimizer: The live one.
        estate: Of it.
        catalog: Of the weights and the optimizer's tensors.

    Attributes:
        catalog: As given.
        layout: Of the new plan.
        model: As `parallelize` gives it, once it is laid out.
        twin: Of the optimizer, with the new parameters and state.
    """

    layout: Layout
    model: nn.Module
    twin: Optimizer

    def __init__(self, module: nn.Module, optimizer: Optimizer, estate: transplant.Estate, catalog: Catalog) -> None:
        self._module, self._optimizer, self._estate, self.catalog = module, optimizer, estate, catalog
        self._probe: Any = None

    def begin(self, layout: Layout, probe: Any) -> None:
        """Sets what is to be laid out.

        Args:
            layout: Of the new plan.
            probe: As of `parallelize`.
        """
        self.layout, self._probe = layout, probe

    @property
    def most_bytes(self) -> int:
        """No rank needs more: as if tensor and pipeline parallelism cut nothing."""
        weights = sum(entry.num_bytes for key, entry in self.catalog.items() if len(key) == 1)
        state = sum(entry.num_bytes for key, entry in self.catalog.items() if len(key) > 1)
        plan = self.layout.plan
        # zero=1 copies weights into its buckets; dim 0 of a small tensor may not divide evenly
        held = weights // plan.dp_shard if self.layout.shards else 2 * weights
        return held + (state // plan.dp_shard if plan.zero else state) + weights // 8

    def rehearse(self) -> int:
        """Everything without memory; how many bytes this rank needs. Collective.

        Raises:
            PlanError, ModelError, OptimizerError: The layout is not possible.
        """
        real = self.layout
        trial = replace(real, originals={}, order={}, _models=weakref.WeakSet())
        _, _, held = self._laid_out(copy.deepcopy(self._module), trial, torch.device("meta"))
        real.tensor, real.split, real.draws = trial.tensor, trial.split, trial.draws  # decided once
        return num_bytes(held.values())

    def lay_out(self) -> dict[Key, Held]:
        """Makes `model` and `twin`; their memory, with arbitrary numbers in it. Collective.

        Raises:
            PlanError, ModelError, OptimizerError: The layout is not possible.
        """
        self.model, self.twin, held = self._laid_out(self._module, self.layout, None)
        return held

    def drop(self) -> None:
        """Lets go of everything."""
        vars(self).clear()

    def _laid_out(
        self, module: nn.Module, layout: Layout, memory: torch.device | None
    ) -> tuple[nn.Module, Optimizer, dict[Key, Held]]:
        model = lay_out_anew(module, layout, self._probe, memory)
        twin = transplant.twin_of(self._optimizer, self._estate, model, layout)
        state = together(lambda: transplant.make_room(twin, self._estate, self.catalog, model, layout))
        return model, twin, {**by_key(held_parameters(model, layout)), **state}


def by_key(held: dict[str, Held]) -> dict[Key, Held]:
    """Weights, as `nbtrain.parallel.moving` knows them."""
    return {(name,): value for name, value in held.items()}


def together(attempt: Callable[[], T]) -> T:
    """What ``attempt`` gives; where it fails on one rank, all raise. Collective.

    Raises:
        ModelError: It failed on another rank; there, what it raised.
    """
    try:
        value = attempt()
    except Exception as problem:  # the others wait to hear of it
        gather(f"{type(problem).__name__}: {problem}")
        raise
    reports = gather("")
    if found := next(((rank, text) for rank, text in enumerate(reports) if text), None):
        raise ModelError(f"the layout cannot change: rank {found[0]} has {found[1]}")
    return value
