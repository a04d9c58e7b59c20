"""Finding the repeated blocks of a model by its structure, and the parameters that several modules share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from nbtrain.parallel.mixin import own_class

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_ELSEWHERE = "_nbtrain_elsewhere"


def mark_elsewhere(block: nn.Module) -> None:
    """Says that another pipeline stage holds ``block``, which is empty here."""
    block.__dict__[_ELSEWHERE] = True


def is_elsewhere(block: nn.Module) -> bool:
    """Whether `mark_elsewhere` was called."""
    return _ELSEWHERE in vars(block)


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of every outermost trunk that this rank holds, by name, in the order of the model.

    A trunk is a ModuleList, Sequential or ModuleDict of at least two modules of one class that have modules inside:
    transformer layers, residual blocks. Lists of bare layers, such as a choice of branches, are not trunks; nor are
    lists of lists, which nothing calls.
    """
    return {name: block for name, block in _walk(model, "") if not is_elsewhere(block)}


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    children = [(f"{prefix}{name}", child) for name, child in module.named_children()]
    if _is_trunk(module):
        yield from children
        return
    for name, child in children:
        yield from _walk(child, f"{name}.")


def _is_trunk(module: nn.Module) -> bool:
    blocks = list(module.children())
    return (
        isinstance(module, _CONTAINERS)
        and len(blocks) >= 2
        and len({own_class(type(block)) for block in blocks}) == 1
        and all(any(True for _ in block.children()) for block in blocks)
        and type(blocks[0]).forward is not nn.Module.forward
        and all(is_elsewhere(block) or any(True for _ in block.parameters()) for block in blocks)
    )


def self_contained(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Those of ``blocks`` that share no parameter with a module outside of themselves.

    A parameter must be gathered by one unit only; what is shared across blocks is left to the root.
    """
    holders = Counter(_slots(model))
    return {
        name: block
        for name, block in blocks.items()
        if all(holders[slot] == count for slot, count in Counter(_slots(block)).items())
    }


def _slots(module: nn.Module) -> Iterator[nn.Parameter]:
    """Each parameter once for every distinct module that holds it."""
    for child in module.modules():
        yield from (parameter for parameter in child._parameters.values() if parameter is not None)
