"""``torch.compile`` of each repeated block, in place.

One block is compiled once for all of its kind, and what lies between blocks (hooks of FSDP, the order of its units)
stays outside of the compiled code, where torch cannot break it. A block that is recomputed as a whole runs its compiled
code again; with "selective" the compiler is told what to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from nbtrain.errors import UsageError, nearest
from nbtrain.parallel.blocks import repeated_blocks
from nbtrain.parallel.mixin import Mixin, mix


class Compiled(Mixin):
    """Mixed into the class of a block, whose forward then runs compiled by ``_backend``."""

    _backend: str
    _compiled: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self)._compiled(self, *args, **kwargs)


def check_backend(compile: bool | str) -> None:
    """Raises where `compile_blocks` could not be asked for that.

    Raises:
        UsageError: It is no backend of torch.compile, or torch cannot compile here.
    """
    if compile is False:
        return
    if not isinstance(compile, (bool, str)):
        raise UsageError(f"compile={compile!r} must be True, False or the name of a backend, e.g. compile='aot_eager'")
    if not torch._dynamo.eval_frame.is_dynamo_supported():
        raise UsageError("torch.compile does not run on this Python or platform; type compile=False")
    known = torch._dynamo.list_backends(None)
    if isinstance(compile, str) and compile not in known:
        raise UsageError(f"compile={compile!r} is no backend of torch.compile; {nearest(compile, known)}")


def compile_blocks(model: nn.Module, compile: bool | str, whole: Collection[str] | None = None) -> None:
    """Compiles each repeated block of ``model``, or the model where it has none. It happens in the first forward.

    Args:
        model: Changed in place, before FSDP shards it.
        compile: True takes "inductor"; a name takes that backend; False does nothing.
        whole: Names of modules that are not divided between pipeline stages: no other block is compiled, nor the model.
            None: nothing is divided.
    """
    if not compile:
        return
    backend = "inductor" if compile is True else compile
    blocks = repeated_blocks(model)
    chosen = list(blocks.values()) or [model]
    for block in chosen if whole is None else [block for name, block in blocks.items() if name in whole]:
        if not isinstance(block, Compiled):
            _compile(block, backend)


def _compile(block: nn.Module, backend: str) -> None:
    forward = type(block).forward
    mix(block, Compiled, _backend=backend)
    cls: Any = type(block)
    if "_compiled" not in vars(cls):
        cls._compiled = staticmethod(torch.compile(forward, backend=backend))
