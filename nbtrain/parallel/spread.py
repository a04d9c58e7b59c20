"""On how many ranks the same part of a gradient lies, and where it is a part of a sum still."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.parallel import gradients
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.local import local_gradients
from nbtrain.parallel.tensor.sequence import sequence_partial


class Spread:
    """Of the trained parameters of one model.

    Attributes:
        partial: Those of whose gradient each tensor-parallel peer has a part.
        partial_names: Their names.

    Args:
        model: Laid out.
        layout: Of the model.
        parameters: Those that train, as the optimizer has them.
        dealt: Whether the optimizer has this rank's pieces, where ``zero=1`` deals them out.
    """

    def __init__(self, model: nn.Module, layout: Layout, parameters: list[nn.Parameter], *, dealt: bool = True) -> None:
        self._layout = layout
        plan = layout.plan
        names = layout.names(model, dealt=dealt)
        copies = layout.copies if dealt or not layout.shards_update else layout.dp
        cuts, partial = layout.cuts, set()
        if layout.tensor is not None:
            partial = {*layout.tensor.partial, *sequence_partial(model, layout.tensor)}
        self._by_copies: dict[int, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            name = names.get(id(parameter))
            holders = 1 if layout.split is None or name is None else layout.split.num_holders(name)
            self._by_copies[copies * holders * (1 if name in cuts else plan.tp)].append(parameter)
        self.partial_names = frozenset(partial)
        self.partial = [parameter for parameter in parameters if names.get(id(parameter)) in partial]

    def square_sum(self, chosen: list[nn.Parameter] | None = None) -> torch.Tensor | float:
        """This rank's share of the squares of gradients: summed over all ranks, each counts once. 0-d, float64.

        Args:
            chosen: Whose; None: of all.
        """
        ids = None if chosen is None else {id(parameter) for parameter in chosen}
        return sum(
            gradients.square_sum(held if ids is None else [one for one in held if id(one) in ids]) / copies
            for copies, held in self._by_copies.items()
        )

    def sum_partial(self) -> None:
        """Makes gradients whole of which each tensor-parallel peer has a part. Collective over peers.

        Norms on parts of the sequence, and what acts on each head alike, see a part of the activations on each rank
        (Megatron-LM, arXiv 2205.05198, section 4.2.2).
        """
        if self._layout.peers is None or not (parts := local_gradients(self.partial)):
            return
        # one message: they are small
        flat = torch.cat([part.flatten().float() for part in parts])
        dist.all_reduce(flat, group=self._layout.peers)
        for part, total in zip(parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))
