"""Which part of each layer a tensor-parallel rank holds: plain data, the same on every rank, picklable.

Megatron-LM (arXiv 1909.08053, section 3): a layer's first matrices are cut by columns, its last by rows, so that what
lies between needs no communication::

    x --> f --> [ A_0 ] --> GeLU --> [ B_0 ] --> g --> y        f: identity, all-reduce in backward
          f --> [ A_1 ] --> GeLU --> [ B_1 ] --> g              g: all-reduce, identity in backward
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STYLES = ("colwise", "colwise_gather_output", "rowwise", "vocab", "attention", "sequence", "replicate")
"""What a module can become.

::

    colwise                 output features are cut; its output is this rank's part
    colwise_gather_output   the same, and the parts are gathered: a head whose logits are wanted whole
    rowwise                 input features are cut; partial outputs are summed
    vocab                   an embedding whose rows are cut; lookups are summed
    attention               `nn.MultiheadAttention`, cut by heads
    sequence                a norm or dropout between layers, on this rank's part of the sequence
    replicate               left whole
"""


@dataclass(frozen=True)
class Cut:
    """How one dim of a tensor is cut into ``degree`` parts.

    The dim consists of segments, one behind the other; part r is the r-th of ``degree`` equal pieces of each, in
    order. A fused QKV weight has the segments (q, k, v): a rank holds its heads of each.
    """

    dim: int
    segments: tuple[int, ...]

    @property
    def size(self) -> int:
        """Of the whole dim."""
        return sum(self.segments)


@dataclass(frozen=True)
class Layer:
    """What one module becomes.

    Attributes:
        style: One of `STYLES`.
        cuts: By the parameter's own name in the module ("weight"); what isn't named stays whole.
    """

    style: str
    cuts: Mapping[str, Cut] = field(default_factory=dict)


@dataclass(frozen=True)
class Region:
    """A module whose forward encloses cut layers, from the columns to the row.

    Attributes:
        written: Its code writes sizes of whole tensors (``view(B, T, self.num_heads, -1)``, ``split(self.width)``),
            which must be read as sizes of a rank's part.
        inputs: The arguments of its forward that its column layers take: positions and keywords.
        layers: Names of the cut layers inside, relative to the region.
    """

    written: bool = False
    inputs: tuple[int | str, ...] = (0,)
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class TensorPlan:
    """A model's tensor parallelism.

    Attributes:
        degree: Of tp.
        layers: By module name.
        regions: By module name.
        partial: Names of whole parameters that act on cut tensors (a norm of each head's queries), so that each rank
            has a part of their gradient, to be summed over tp.
        whole: Names of modules with parameters that stay whole, and why, for people.
        trunk: With sequence parallelism: names of the repeated blocks, in order, between whose layers activations are
            cut along the sequence; empty without.
        told: All of it as a table for people.
    """

    degree: int
    layers: Mapping[str, Layer] = field(default_factory=dict)
    regions: Mapping[str, Region] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)
    trunk: tuple[str, ...] = ()
    told: str = ""
