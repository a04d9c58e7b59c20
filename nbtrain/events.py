"""What travels between the ranks and the notebook's kernel, as frozen dataclasses. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

TRAIL_VARIABLE = "NBTRAIN_TRAIL"  # names the file in which a rank leaves the line that it runs
TRAIL_BYTES = 2048  # of its record there; behind it is what faulthandler wrote
FOR_ALL = {"nbtrain": "for all"}  # metadata of a display that is a text which one rank says for all
REGISTRY = "processes"  # a file of the session's folder: a line "pid create_time" of each process that ends with it


@dataclass(frozen=True, repr=False)
class Unportable:
    """Stands in the notebook for a value that can live on a rank only, a model for instance."""

    type_name: str
    text: str

    def __repr__(self) -> str:
        return f"<on the rank: {self.type_name}>\n{self.text}"


@dataclass(frozen=True)
class RankInfo:
    """What a rank says of itself once its process groups stand.

    ``backend`` is the default group's; ``mesh`` is the mesh's repr; ``threads`` counts intra-operation CPU threads.
    """

    rank: int
    local_rank: int
    world_size: int
    pid: int
    host: str
    device: str
    backend: str
    threads: int
    mesh: str


class EventKind(StrEnum):
    """What a rank did in a `TimelineEvent`."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    SEND = "send"
    RECEIVE = "receive"  # until the message is there
    OPTIMIZER = "optimizer"
    COLLECTIVE = "collective"  # the event's name says which, e.g. "all-reduce"


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Something that took time on a rank.

    Args:
        kind: What it was.
        stage: The pipeline stage, or None where it belongs to none.
        microbatch: The microbatch, or None.
        step: The training step in which it fell.
        start_s: When it began, in seconds of the host's monotonic clock, which its ranks share.
        wall_s: Seconds until its end, as a clock shows.
        busy_s: Seconds of work in it: CPU time of the thread, or the device's time on CUDA.
        name: Says more where the kind does not, e.g. of a collective.
    """

    kind: EventKind
    stage: int | None
    microbatch: int | None
    step: int
    start_s: float
    wall_s: float
    busy_s: float
    name: str = ""

    @property
    def end_s(self) -> float:
        """When it ended, on the same clock."""
        return self.start_s + self.wall_s
