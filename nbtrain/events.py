"""What travels between the ranks and the notebook's kernel, as frozen dataclasses. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

TRAIL_VARIABLE = "NBTRAIN_TRAIL"  # names the file in which a rank leaves the line that it runs
TRAIL_BYTES = 2048  # of its record there; behind it is what faulthandler wrote
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
