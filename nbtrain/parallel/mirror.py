"""`Mirror`: each rank's shards a second time, on the next rank of the shard group, in host memory.

With ``zero=1`` they are its pieces: the others have the weights anyway, but not while they are owed.

::

    rank r      backward -> gradient shards --------------+--> wait for all -> optimizer on r's shards
    rank r+1    backward -> ...   (r's gradients arrive) <-+--> wait for all -> optimizer on its own, and on r's mirror

The gradients are sent before the one place where all ranks wait: who passes it knows that every mirror has the final
gradients, so that a mirror takes each step that its holder takes. Whoever dies at whatever instant, its mirror stands
at the same step as the survivors. It costs the memory of one more shard, one more optimizer step on the CPU and the
traffic of one gradient shard.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nbtrain.errors import OptimizerError, SessionError
from nbtrain.parallel import mesh, optimizer_state
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.local import local
from nbtrain.parallel.optimizer import ELEMENTWISE
from nbtrain.parallel.snapshot import random_state
from nbtrain.parallel.transfer import pass_along, swap
from nbtrain.parallel.update import ShardedUpdate


class Mirror:
    """Of one trainer on this rank: sends to the next rank of the shard group, holds for the one before.

    Args:
        model: Sharded, or with a sharded update, without replicas.
        optimizer: Of its parameters.
        layout: Of the model.

    Raises:
        OptimizerError: A mirror could not do what the optimizer does.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, layout: Layout) -> None:
        require_mirrorable(optimizer)
        self._layout, self._optimizer = layout, optimizer
        self._model = model
        self._update = model if isinstance(model, ShardedUpdate) else None
        named = model.named_parameters() if self._update is None else self._update.named_pieces()
        self._own = [part for _, part in named]
        self._twins: list[nn.Parameter] = []
        self._twin_optimizer: Optimizer | None = None
        self._gradients = torch.empty(0)
        self._random = (0, torch.empty(0), torch.empty(0))  # step, and the states at its begin and end
        self._seed(pass_along(self._state(), self._group))
        self._sent = self._held = self._mark()

    def holder_of(self, rank: int) -> int:
        """The rank that holds the mirror of ``rank``."""
        ranks = mesh.data_peers(self._layout.plan, rank)
        return ranks[(ranks.index(rank) + 1) % len(ranks)]

    def exchange(self, step: int, before: torch.Tensor) -> None:
        """Sends this rank's final gradients, and takes those of the rank before. Nothing is stepped yet.

        Args:
            step: The one that is under way.
            before: This rank's random state when it began.
        """
        stale = self._sent != self._mark()
        note = torch.cat([torch.tensor([stale], dtype=torch.uint8), before, random_state(self._device)])
        heard = swap(note, torch.empty_like(note), self._group)
        if states := pass_along(self._state() if stale else None, self._group):
            self._seed(states)
            self._held = self._mark()
        trained = self._trained()
        gradients = torch.cat([_flat_gradient(own) for own, _ in trained]).cpu()
        num_elements = sum(twin.numel() for _, twin in trained)
        self._gradients = swap(gradients, torch.empty(num_elements, dtype=gradients.dtype), self._group)
        begun, ended = heard[1:].chunk(2)
        self._random = (step, begun, ended)

    def step(self, factor: float) -> None:
        """The optimizer's step on the mirror, behind the one on this rank's own shards.

        Args:
            factor: What the gradients are multiplied by.
        """
        assert self._twin_optimizer is not None, "seeded when it was made"
        trained = self._trained()
        parts = torch.split(self._gradients.mul_(factor), [twin.numel() for _, twin in trained])
        for index, ((own, twin), part) in enumerate(zip(trained, parts, strict=True)):
            twin.grad = part.to(twin.dtype).view_as(twin) if self._is_stepped(index, own, twin) else None
        for group, twin_group in zip(self._optimizer.param_groups, self._twin_optimizer.param_groups, strict=True):
            twin_group.update(self._options(group))
        self._twin_optimizer.step()
        self._twin_optimizer.zero_grad()
        self._sent = self._held = self._mark()

    def parameters(self) -> list[torch.Tensor]:
        """The shards of the rank before, in the order of the model.

        Raises:
            SessionError: They are older than the weights here.
        """
        self._require_current()
        return [twin.detach() for twin in self._twins]

    def optimizer_state(self) -> optimizer_state.Portable:
        """The optimizer state of the rank before.

        Raises:
            SessionError: It is older than what is here.
        """
        self._require_current()
        assert self._twin_optimizer is not None, "seeded when it was made"
        own = optimizer_state.portable_state(self._optimizer)
        twin = optimizer_state.portable_state(self._twin_optimizer)
        if self._update is not None:  # a piece may be here and not there
            devices = {key: device for mine in own for key, (_, _, device) in mine.items()}
            return [
                {key: (kind, value, devices.get(key, device)) for key, (kind, value, device) in theirs.items()}
                for theirs in twin
            ]
        return [
            {key: (kind, theirs[key][1], device) for key, (kind, _, device) in mine.items()}
            for mine, theirs in zip(own, twin, strict=True)
        ]

    def random_state(self, num_steps: int) -> torch.Tensor:
        """The random state in which the rank before would begin the step behind ``num_steps``."""
        step, begun, ended = self._random
        return ended if step <= num_steps else begun

    def _require_current(self) -> None:
        if self._held != self._mark():
            raise SessionError(
                "weights or optimizer state were set outside of steps, and no step has followed to copy them"
            )

    def _state(self) -> dict[str, Any]:
        """What the next rank begins with."""
        return {
            "parameters": [local(parameter) for parameter in self._own],
            "state": optimizer_state.portable_state(self._optimizer),
            "random": random_state(self._device),
        }

    def _seed(self, theirs: dict[str, Any]) -> None:
        twins = [
            nn.Parameter(tensor, requires_grad=own.requires_grad)
            for own, tensor in zip(self._own, theirs["parameters"], strict=True)
        ]
        by_own = {id(own): twin for own, twin in zip(self._own, twins, strict=True)}
        groups = [
            {**self._options(group), "params": [by_own[id(own)] for own in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        optimizer: Optimizer = type(self._optimizer)(groups)  # type: ignore[call-arg]  # their defaults are in the groups
        optimizer_state.take_state(optimizer, theirs["state"], "cpu")
        self._twins, self._twin_optimizer = twins, optimizer
        self._random = (0, theirs["random"], theirs["random"])

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        options = {
            key: value.cpu() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        if self._device.type == "cuda":  # these are for tensors on the GPU
            options.update({key: None for key in ("fused", "foreach") if key in options})
            options.update({key: False for key in ("capturable",) if key in options})
        return options

    def _is_stepped(self, index: int, own: nn.Parameter, twin: nn.Parameter) -> bool:
        """Whether the optimizer of the rank before steps its part of a parameter."""
        if self._update is None:
            return own.grad is not None
        return twin.numel() > 0 and self._update.is_used(index)

    def _trained(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Own parameters with their twins; of frozen ones a copy is enough."""
        return [pair for pair in zip(self._own, self._twins, strict=True) if pair[0].requires_grad]

    def _mark(self) -> _Mark:
        # of the model's, too: with pieces somebody sets those
        held = [*self._own, *self._model.parameters()]
        versions = [parameter._version + local(parameter)._version for parameter in held]
        if self._update is not None:
            versions.append(self._update.num_adopted)
        groups = [len(group["params"]) for group in self._optimizer.param_groups]
        return _Mark([*versions, *groups], self._optimizer.state)

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self._layout.group is not None, "it is sharded"
        return self._layout.group

    @property
    def _device(self) -> torch.device:
        return mesh.device_of(self._layout.mesh) or self._own[0].device


def require_mirrorable(optimizer: Optimizer) -> None:
    """Raises `OptimizerError` where a copy of its state might not do what it does."""
    if type(optimizer) not in ELEMENTWISE:  # a subclass may compute something else
        names = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        raise OptimizerError(
            f"redundancy=True steps a copy of each shard on another rank, which {type(optimizer).__name__} may not "
            f"allow; choose one of torch.optim's {names}, or leave redundancy away and save checkpoints"
        )


def _flat_gradient(parameter: nn.Parameter) -> torch.Tensor:
    shard = local(parameter)
    return (torch.zeros_like(shard) if parameter.grad is None else local(parameter.grad)).flatten()


class _Mark:
    """What changes when somebody sets weights, or gives the optimizer another state or other parameters."""

    def __init__(self, versions: list[int], state: Any) -> None:
        self._versions, self._state = versions, state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mark) and self._versions == other._versions and self._state is other._state

    __hash__ = None  # type: ignore[assignment]
