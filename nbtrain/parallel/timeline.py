"""The timelines of all ranks, brought together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nbtrain.parallel.layout import Layout
from nbtrain.planner.timeline import Timeline
from nbtrain.telemetry.timeline import recorder


def collect_timeline(layout: Layout, device: torch.device, record: bool, owner: object) -> Timeline:
    """What ranks have recorded, by rank. Collective.

    Args:
        layout: Of the model that was trained.
        device: Where it computes.
        record: Whether to record from now on, if not already.
        owner: Whose steps. Another's are forgotten.
    """
    own = recorder()
    if own.owner is not owner:
        own.stop()
        own.clear()
    mine = own.events(), own.num_dropped
    theirs: list[Any] = [mine]
    if layout.everyone is not None:
        theirs = [None] * layout.everyone.size()
        dist.all_gather_object(theirs, mine, group=layout.everyone)
    if record and not own.enabled:
        own.start(device, owner)
    elif not record:
        own.stop()
    schedule = None if layout.pipeline is None else layout.pipeline.schedule()
    return Timeline(tuple(events for events, _ in theirs), schedule, tuple(dropped for _, dropped in theirs))
