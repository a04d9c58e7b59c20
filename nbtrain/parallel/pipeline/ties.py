"""Parameters that several pipeline ranks hold: tied ones, and those that several stages read.

Each holder has the gradient of its own stages. They are summed in one order and sent back, so that all copies take bit
for bit the same step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.events import EventKind
from nbtrain.parallel.local import local
from nbtrain.parallel.messages import Messages
from nbtrain.telemetry.timeline import recorder


class Ties:
    """Of one rank's model.

    Args:
        shared: The parameters that other pipeline ranks hold too, with all that do, in one order on every rank.
    """

    def __init__(self, shared: list[tuple[nn.Parameter, tuple[int, ...]]]) -> None:
        self._by_holders: Mapping[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = defaultdict(list)
        for parameter, holders in shared:
            self._by_holders[holders, parameter.dtype].append(parameter)

    def sum_gradients(self, group: dist.ProcessGroup) -> None:
        """Collective over ``group``, the pipeline ranks; where one has no gradient it adds zeros."""
        messages = Messages(group)
        for (holders, _), parameters in sorted(
            self._by_holders.items(), key=lambda item: (item[0][0], str(item[0][1]))
        ):
            flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in parameters])
            with recorder().span(EventKind.COLLECTIVE, name="sum over stages"):
                if flat.numel():
                    _sum(flat, holders, group, messages.tag((holders, flat.numel(), flat.dtype)))
            sizes = [local(parameter).numel() for parameter in parameters]
            for parameter, part in zip(parameters, torch.split(flat, sizes), strict=True):
                gradient = local(parameter.grad) if parameter.grad is not None else None
                if gradient is None:
                    parameter.grad = part.view_as(parameter)
                else:
                    gradient.copy_(part.view_as(gradient))


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    return torch.zeros_like(local(parameter.detach())) if gradient is None else local(gradient)


def _sum(flat: torch.Tensor, holders: tuple[int, ...], group: dist.ProcessGroup, tag: int) -> None:
    """The first holder adds up, in the order of the ranks, and sends the sum to the others."""
    first, *others = holders
    if group.rank() != first:
        dist.send(flat, group=group, tag=tag, group_dst=first)
        dist.recv(flat, group=group, tag=tag, group_src=first)
        return
    for rank in others:
        part = torch.empty_like(flat)
        dist.recv(part, group=group, tag=tag, group_src=rank)
        flat += part
    for rank in others:
        dist.send(flat, group=group, tag=tag, group_dst=rank)
