"""Linear layers cut by columns (output features) or rows (input features), over ``nn.Linear`` and its like.

A layer becomes one of a subclass of its own class: names, hooks and ``isinstance`` stay. Weights are (out, in) as in
``nn.Linear``, or (in, out) as in Hugging Face's ``Conv1D``. Attributes that hold these sizes are the part's.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from nbtrain.parallel.tensor.collectives import (
    enter,
    enter_sequence,
    gather_last,
    leave,
    scatter_sequence,
)
from nbtrain.parallel.tensor.cuts import Cut
from nbtrain.parallel.tensor.logits import as_logits
from nbtrain.parallel.tensor.marks import Mark, mark
from nbtrain.parallel.tensor.parts import joined
from nbtrain.parallel.tensor.peers import Peers, TensorGrouped
from nbtrain.parallel.tensor.region import marking
from nbtrain.parallel.tensor.swap import cut_class, swap_class

Output = Literal["part", "gathered", "logits"]
Entrance = Literal["sum", "gather", "open"]
"""How a column layer takes its input.

::

    sum       whole; its gradient is summed over peers
    gather    this rank's part of the sequence, which is gathered
    open      whole, and whoever made it whole sums the gradient
"""


class Cutting(TensorGrouped):
    """Either kind. ``weight`` is a rank's part."""

    weight: nn.Parameter
    transposed: bool

    @property
    def _bias(self) -> nn.Parameter | None:
        return getattr(self, "bias", None)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self.weight.t() if self.transposed else self.weight, bias)


class Column(Cutting):
    """(..., in) to this rank's (..., out/t), or to the whole (..., out) with ``output``.

    Attributes:
        cut: Of the output features.
        output: What becomes of the part: it stays one, is gathered, or is one that a loss takes for the whole.
    """

    cut: Cut
    entrance: Entrance = "sum"
    output: Output = "part"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self._product(entered(x, self.entrance, self.peers), self._bias)
        if self.output == "gathered":
            return joined(gather_last(part, self.peers), self.cut, self.peers)
        if self.output == "logits":
            return as_logits(part, self.peers)
        return mark(part, Mark(part.dim() - 1, self.cut.segments)) if marking() else part


class Row(Cutting):
    """This rank's (..., in/t) to (..., out), summed over peers; the bias, which is whole, is added once, after the sum.

    With ``scatters`` the sum is cut along the sequence: (B, T, in/t) to (B, T/t, out).
    """

    scatters: bool = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return finished(self._product(x), self._bias, self.scatters, self.peers)


def entered(x: torch.Tensor, entrance: Entrance, peers: Peers) -> torch.Tensor:
    """``x`` as a layer that is cut by columns multiplies it."""
    if entrance == "open":
        return x
    return enter(x, peers) if entrance == "sum" else enter_sequence(x, peers)


def finished(partial: torch.Tensor, bias: torch.Tensor | None, scatters: bool, peers: Peers) -> torch.Tensor:
    """Sum of all peers' ``partial`` (..., out), plus the whole ``bias`` (out)."""
    total = scatter_sequence(partial, peers) if scatters else leave(partial, peers)
    # autocast computes products in bf16 and would add an fp32 bias in fp32
    return total if bias is None else total + bias.to(total.dtype)


def cut_linear(module: nn.Module, kind: type[Cutting], transposed: bool) -> None:
    """Swaps the class of a linear layer whose weight, (in, out) where ``transposed``, is a part already."""
    swap_class(module, kind, transposed=transposed)
    weight: Any = module.weight
    inputs, outputs = weight.shape if transposed else weight.shape[::-1]
    for name, size in {"in_features": inputs, "out_features": outputs, "nx": inputs, "nf": outputs}.items():
        if name in vars(module):
            setattr(module, name, size)


ColumnLinear = cut_class(Column, nn.Linear)
RowLinear = cut_class(Row, nn.Linear)
