"""How each torch function passes a mark on, and how the sizes that it is given are read.

A rule is called as ``rule(marks, func, args, kwargs)`` and returns what ``func`` returns.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.nn.functional as F

from nbtrain.parallel.tensor import mixing, moves
from nbtrain.parallel.tensor import operations as known
from nbtrain.parallel.tensor.marks import Marks
from nbtrain.parallel.tensor.names import tensors
from nbtrain.parallel.tensor.operands import Args, Func, Kwargs, Rule


def rule_of(func: Func) -> Rule:
    return _RULES.get(func, unknown)


def unknown(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Right only for what gives no tensor: a shape, a dtype."""
    result = func(*args, **kwargs)
    if any(True for _ in tensors(result)):
        raise marks.lost(func)
    return result


def random(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    with marks.random() if marks.random else nullcontext():
        return mixing.elementwise(marks, func, args, kwargs)


def unmarked(marks: Marks, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Its result has nothing of its input's features."""
    return func(*args, **kwargs)


_RULES: dict[Func, Rule] = {
    **dict.fromkeys(known.ELEMENTWISE, mixing.elementwise),
    **dict.fromkeys(known.RANDOM, random),
    **dict.fromkeys(known.NEW, unmarked),
    **dict.fromkeys(known.PERMUTE, moves.move),
    **dict.fromkeys(known.GATHER, moves.gather),
    **dict.fromkeys(known.VIEW, moves.view),
    **dict.fromkeys(known.LIKE, moves.view_as),
    **dict.fromkeys(known.FLATTEN, moves.flatten),
    **dict.fromkeys(known.UNFLATTEN, moves.unflatten),
    **dict.fromkeys(known.EXPAND, moves.expand),
    **dict.fromkeys(known.EXPAND_AS, moves.expand_as),
    **dict.fromkeys(known.REPEAT_INTERLEAVE, moves.repeat_interleave),
    **dict.fromkeys(known.REPEAT, moves.repeat),
    **dict.fromkeys(known.SPLIT, moves.split),
    **dict.fromkeys(known.CHUNK, moves.chunk),
    **dict.fromkeys(known.NARROW, moves.narrow),
    **dict.fromkeys(known.INDEX, moves.index),
    **dict.fromkeys(known.CAT, moves.cat),
    **dict.fromkeys(known.STACK, moves.stack),
    **{func: mixing.along(at, *names, default=default) for func, (at, names, default) in known.ALONG.items()},
    **dict.fromkeys(known.GLU, mixing.glu),
    **dict.fromkeys(known.NORMS, mixing.norm),
    **dict.fromkeys([F.linear], mixing.linear),
    **dict.fromkeys(known.MATMUL, mixing.matmul),
    **dict.fromkeys(known.EINSUM, mixing.einsum),
    **dict.fromkeys(known.ATTENTION, mixing.attention),
}
