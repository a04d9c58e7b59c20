"""What the skeleton's own code changes in a forward: counters in buffers and attributes, lists that it adds to.

Every stage runs that code. So it counts once for each stage of a rank and once more in a rehearsal, unless what it
changed is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from nbtrain.errors import ModelError
from nbtrain.parallel.blueprint import Notes
from nbtrain.parallel.pipeline.units import skeleton_of


class Skeleton:
    """The modules of a model that are in no unit.

    Args:
        model: Whose.
        units: Of the model, by name.

    Attributes:
        counts: Whether a forward was seen to change something.
    """

    def __init__(self, model: nn.Module, units: dict[str, nn.Module]) -> None:
        self._modules = skeleton_of(model, units)
        self.counts = False

    @contextmanager
    def unchanged(self, grown: Callable[[torch.Tensor], bool] | None = None) -> Iterator[None]:
        """Puts back what code inside changes, by an exception too.

        Args:
            grown: Whether a tensor comes from what units gave; None: not asked.

        Raises:
            ModelError: A buffer does: only the stage that has the activation could compute it.
        """
        buffers = {
            (name, key): (module, buffer, buffer._version, buffer.clone())
            for name, module in self._modules.items()
            for key, buffer in module._buffers.items()
            if buffer is not None
        }
        notes = Notes(self._modules.values())
        computed = ""
        try:
            yield
        finally:
            self.counts |= notes.restore()
            for (name, key), (module, buffer, version, value) in buffers.items():
                now = module._buffers.get(key)
                if now is buffer and buffer._version == version:
                    continue
                self.counts = True
                if grown is not None and now is not None and grown(now):
                    computed = computed or f"{name}.{key}".removeprefix(".")
                _put_back(module, key, buffer, version, value)
        if computed:
            raise ModelError(
                f"'{computed}' is a buffer that the model's forward computes from activations, outside of any module "
                "that one stage runs whole: put it into a module of its own, or type pp=1"
            )


def _put_back(module: nn.Module, key: str, buffer: torch.Tensor, version: int, value: torch.Tensor) -> None:
    module._buffers[key] = buffer
    if buffer._version != version:
        with torch.no_grad():
            buffer.copy_(value)
