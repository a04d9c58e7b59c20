"""From a fresh kernel to the first collective on four ranks, and the memory that each rank then holds."""

from __future__ import annotations

import statistics

from contenders import NUM_RANKS, Contender, NbDistributed, NbTrain, Stock
from measure import Row, Samples, at_most, interleave, pss_bytes, ratio

PREPARE = "import torch\nfrom torch.distributed.fsdp import fully_shard"
MIB = 2**20


def run(nbdistributed_missing: str, rounds: int = 5) -> list[Row]:
    kinds: list[type[Contender]] = [NbTrain, Stock] if nbdistributed_missing else [NbTrain, Stock, NbDistributed]
    memory: dict[type[Contender], list[float]] = {kind: [] for kind in kinds}
    seconds = interleave(rounds, *(lambda kind=kind: _start(kind, memory[kind]) for kind in kinds))
    held = [Samples(tuple(memory[kind])) for kind in kinds]
    return [_time_row(seconds, nbdistributed_missing), _memory_row(held)]


def _start(kind: type[Contender], memory: list[float]) -> float:
    """Seconds to the first collective; adds the mean PSS of a rank to ``memory``."""
    contender = kind()
    try:
        seconds = contender.start()
        contender.cell(PREPARE)
        memory.append(statistics.mean(pss_bytes(contender.rank_pids())))
    finally:
        contender.close()
    return seconds


def _time_row(seconds: list[Samples], missing: str) -> Row:
    ours, stock = seconds[:2]
    share = ratio(ours, stock).median
    faster = bool(missing) or ours.median < seconds[2].median
    nbdistributed = missing or seconds[2].text("s")
    return Row(
        what=f"start to the first collective, {NUM_RANKS} ranks",
        ours=ours.text("s"),
        peers=f"ipyparallel {stock.text('s')}; nbdistributed {nbdistributed}",
        result=f"{share:.2f} of ipyparallel",
        target="at most 0.35, and less than nbdistributed",
        met=at_most(share, 0.35) and faster,
    )


def _memory_row(held: list[Samples]) -> Row:
    share = ratio(held[0], held[1]).median
    others = [f"nbdistributed {held[2].text('MiB', 0, 1 / MIB)}"] if len(held) > 2 else []
    return Row(
        what="memory (PSS) of a rank after importing torch with FSDP",
        ours=held[0].text("MiB", 0, 1 / MIB),
        peers="; ".join([f"ipyparallel {held[1].text('MiB', 0, 1 / MIB)}", *others]),
        result=f"{share:.2f} of ipyparallel",
        target="at most 0.55",
        met=at_most(share, 0.55),
    )
