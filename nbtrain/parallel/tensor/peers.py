"""The tensor-parallel ranks, as every cut layer of a model knows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(eq=False)
class Peers:
    """One object for all layers of a model, so that groups which are formed again are given once.

    Attributes:
        group: Of the tensor-parallel ranks; None where nothing is communicated, on a meta device.
        rank: In the group.
        degree: Size of the group.
    """

    group: dist.ProcessGroup | None
    rank: int
    degree: int

    def __deepcopy__(self, memo: dict[int, Any]) -> Peers:
        return self  # a copied model talks to the same ranks


class TensorGrouped:
    """A module that talks to its tensor-parallel peers."""

    peers: Peers

    def regroup_tensor(self, group: dist.ProcessGroup) -> None:
        """Talk by ``group`` from now on, here and in the model's other layers."""
        self.peers.group = group
