"""`Draft`: a layout to be, made of a blueprint: rehearsed without memory, then for real."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
LaidOut = tuple[nn.Module, Optimizer, dict[Key, Held]]


class Draft:
    """Of one change of layout.

    Args:
        module: Of `structure.build`, with its buffers filled.
        layout: Of the new plan.
        optimizer: The live one.
        estate: Of it.
        catalog: Of the weights and the optimizer's tensors.
        probe: As of `parallelize`.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        optimizer: Optimizer,
        estate: transplant.Estate,
        catalog: Catalog,
        probe: Any,
    ) -> None:
        self._module, self._layout, self._optimizer = module, layout, optimizer
        self._estate, self._catalog, self._probe = estate, catalog, probe

    @property
    def most_bytes(self) -> int:
        """No rank needs more: as if tensor and pipeline parallelism cut nothing."""
        weights = sum(entry.num_bytes for key, entry in self._catalog.items() if len(key) == 1)
        state = sum(entry.num_bytes for key, entry in self._catalog.items() if len(key) > 1)
        plan = self._layout.plan
        # zero=1 copies weights into its buckets, one bucket at a time; an uneven shard is at most twice an even one
        shared = weights // plan.dp_shard if self._layout.shards else 2 * weights
        return shared + (state // plan.dp_shard if plan.zero else state) + weights // 8

    def rehearse(self) -> int:
        """Everything without memory; how many bytes this rank needs. Collective.

        Raises:
            PlanError, ModelError, OptimizerError: The layout is not possible.
        """
        plan, old = self._layout.plan, self._layout
        trial = Layout(plan, old.mesh, compile=old.compile, ddp=old.ddp, tensor=old.tensor, draws=old.draws)
        trial.blueprint = old.blueprint
        _, _, held = self._laid_out(copy.deepcopy(self._module), trial, torch.device("meta"))
        self._layout.tensor, self._layout.draws = trial.tensor, trial.draws  # decided once
        return num_bytes(held.values())

    def lay_out(self) -> LaidOut:
        """The model, a twin of the optimizer, and their memory, with arbitrary numbers in it. Collective.

        Raises:
            PlanError, ModelError, OptimizerError: The layout is not possible.
        """
        return self._laid_out(self._module, self._layout, None)

    def _laid_out(self, module: nn.Module, layout: Layout, memory: torch.device | None) -> LaidOut:
        model = lay_out_anew(module, layout, self._probe, memory)
        twin = transplant.twin_of(self._optimizer, self._estate, model, layout)
        state = together(lambda: transplant.make_room(twin, self._estate, self._catalog, model, layout))
        return model, twin, {**by_key(held_parameters(model, layout)), **state}


def by_key(held: dict[str, Held]) -> dict[Key, Held]:
    """Weights, as `nbtrain.parallel.moving` knows them."""
    return {(name,): value for name, value in held.items()}


def together(attempt: Callable[[], T]) -> T:
    """What ``attempt`` gives; where it fails on one rank, all raise. Collective.

    Raises:
        ModelError: It failed on another rank; there, what it raised.
    """
    value: Any = None
    problem: Exception | None = None
    try:
        value = attempt()
    except Exception as failure:  # the others wait to hear of it
        problem = failure
    reports = gather("" if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    if found := next(((rank, text) for rank, text in enumerate(reports) if text), None):
        raise ModelError(f"the layout cannot change: rank {found[0]} has {found[1]}")
    return value  # type: ignore[no-any-return]  # there is one where nothing failed
