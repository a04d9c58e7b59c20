"""An optimizer that holds the parameters which train: those of the laid-out model.

An optimizer that was built before sharding, or between a forward and its backward, holds other tensors: training
runs and the weights never change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

from nbtrain.errors import OptimizerError
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.shardable import require_shardable
from nbtrain.parallel.update import ShardedUpdate

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]

ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.ASGD,
)
"""Those that do with a piece of a parameter what they do with the whole. A subclass may compute something else."""

PER_PARAMETER = (optim.Adafactor, optim.Muon, optim.Rprop)
"""Those that step each parameter by itself, and need it whole."""

_CURE = "pass optimizer=lambda params: torch.optim.AdamW(params, ...), which is called after sharding"


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether it does with a part of a parameter what it does with the whole: known, or said by its class."""
    return type(optimizer) in ELEMENTWISE or getattr(type(optimizer), "elementwise", False) is True


def require_elementwise(optimizer: Optimizer) -> None:
    """With tp: it steps on a rank's parts of parameters.

    Raises:
        OptimizerError: It would take them for whole ones.
    """
    if not is_elementwise(optimizer):
        raise OptimizerError(
            f"{type(optimizer).__name__} would step on a rank's parts of parameters, as if they were whole: with tp an "
            "optimizer must treat each element by itself, e.g. AdamW; one of your own says so by the class attribute "
            "elementwise = True"
        )


def is_per_parameter(optimizer: Optimizer) -> bool:
    """Whether what it does with a parameter depends on no other one: known, or said by its class."""
    kind = type(optimizer)
    return is_elementwise(optimizer) or kind in PER_PARAMETER or getattr(kind, "per_parameter", False) is True


def make_optimizer(make: MakeOptimizer | Optimizer, model: nn.Module, layout: Layout) -> Optimizer:
    """The optimizer of ``model``'s parameters.

    One that was built before sharding is re-pointed to the parameters that took the place of its own; its groups and
    options stay. With ``zero=1`` it then holds this rank's pieces of them. One that isn't element-wise (Muon,
    Adafactor, a class of one's own) holds whole parameters, dealt out to the ranks: it must step each by itself. With
    ``zero=2`` and 3 it holds DTensors, and one that isn't known to is tried on tiny ones. Collective.

    Args:
        make: Called with the trained parameters, or an optimizer.
        model: Laid out, its parameters sharded.
        layout: Of the model.

    Raises:
        OptimizerError: It holds tensors that are no parameters of the model, or already has state for old ones; or the
            plan shards what it needs whole.
    """
    optimizer = make if isinstance(make, Optimizer) else _made(make, model, layout)
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(f"optimizer returned {type(optimizer).__name__}, not a torch optimizer; {_CURE}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "LBFGS evaluates the loss several times a step, which a Trainer does not; choose e.g. AdamW"
        )
    if layout.peers is not None:
        require_elementwise(optimizer)
    _repoint(optimizer, model, layout)
    if isinstance(model, ShardedUpdate):
        _require_per_parameter(optimizer)
        model.take_over(optimizer, whole=not is_elementwise(optimizer))
    if layout.shards and type(optimizer) not in ELEMENTWISE:
        require_shardable(optimizer)
    return optimizer


def _require_per_parameter(optimizer: Optimizer) -> None:
    if is_per_parameter(optimizer):
        return
    kind = type(optimizer).__name__
    raise OptimizerError(
        f"zero=1 deals the parameters out to ranks, and {kind} may need all of them at once, e.g. for a norm over all; "
        f"if it steps each by itself, say so in its class: per_parameter = True, or elementwise = True where it treats "
        "each element by itself; else type zero=0"
    )


def _made(make: MakeOptimizer, model: nn.Module, layout: Layout) -> Optimizer:
    if not callable(make):
        raise OptimizerError(f"optimizer={make!r} is neither a function nor an optimizer; {_CURE}")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # optimizers refuse to have nothing, and the stages of a rank may all be frozen
    return make(trained or [nn.Parameter(torch.zeros(0))] if layout.split is not None else trained)


def _repoint(optimizer: Optimizer, model: nn.Module, layout: Layout) -> None:
    successors = _successors(model, layout)
    _let_go_elsewhere(optimizer, layout, successors)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.numel()]
    strangers = [parameter for parameter in held if id(parameter) not in successors]
    if strangers:
        raise OptimizerError(
            f"{len(strangers)} of the optimizer's {len(held)} tensors are no parameters of the model (built from "
            f"another model, or between a forward and its backward?); {_CURE}"
        )
    if all(successors[id(parameter)] is parameter for parameter in held):
        return
    if optimizer.state:
        raise OptimizerError(f"the optimizer has already stepped on the unsharded parameters; {_CURE}")
    for group in optimizer.param_groups:
        group["params"] = [successors.get(id(parameter), parameter) for parameter in group["params"]]


def _let_go_elsewhere(optimizer: Optimizer, layout: Layout, successors: dict[int, nn.Parameter]) -> None:
    """Parameters that other pipeline stages hold are theirs to step."""
    if layout.split is None:
        return
    elsewhere = {id(original()) for original in layout.originals.values()} - set(successors)
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in elsewhere]


def _successors(model: nn.Module, layout: Layout) -> dict[int, nn.Parameter]:
    """What trains in the place of each tensor that is, or was, a parameter of the model."""
    current = dict(model.named_parameters())
    successors = {id(parameter): parameter for parameter in current.values()}
    if isinstance(model, ShardedUpdate):  # an optimizer of an earlier trainer
        successors |= {id(piece): piece for _, piece in model.named_pieces()}
    for name, reference in layout.originals.items():
        original: Any = reference()
        successor = _held_as(name, current, layout)
        if original is not None and successor is not None:
            successors[id(original)] = successor
    return successors


def _held_as(name: str, current: dict[str, nn.Parameter], layout: Layout) -> nn.Parameter | None:
    """A parameter of the whole model, under whichever of its names this rank has it; None where it has not."""
    if layout.split is None:
        return current[name]
    canonical = layout.split.canonical
    return next((held for alias, held in current.items() if canonical[alias] == canonical[name]), None)


def trained(model: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
    """Those of ``model`` that require a gradient, with all their pieces and what the optimizer holds."""
    unique = {id(parameter): parameter for parameter in model.parameters() if parameter.requires_grad}
    if isinstance(model, ShardedUpdate):  # of those too that the optimizer doesn't step: they count in the norm
        unique |= {id(piece): piece for _, piece in model.named_pieces()}
    unique |= {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    return list(unique.values())
