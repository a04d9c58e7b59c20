"""The round trip of an empty cell, and what printing publishes, with all contenders' ranks alive at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import zmq
from contenders import NUM_RANKS, Contender, NbDistributed, NbTrain, Stock, running
from measure import Row, Samples, at_most, interleave, ratio

PRINT = """import time
for i in range({lines}):
    print(f"{head} step {{i:06d}} loss {{2.5 - i * 1e-4:.6f}} {{i * 37 % 1000:03d}} tokens a second")
    {pause}
"""
LINE_BYTES = 53  # of what that prints, with its newline
DIFFERING, ALIKE = "rank {rank}", "a rank"
AT_ONCE, PACED = "pass", "time.sleep(0.001)"
CAP = 5_000  # lines of a cell that nbtrain shows; it spills the rest to a file
FEW, MANY = 1_000, 2_000


def run(nbdistributed_missing: str, cells: int = 60, repeats: int = 3) -> list[Row]:
    with ExitStack() as stack:
        ours, stock = (stack.enter_context(running(kind)) for kind in (NbTrain, Stock))
        slow = [] if nbdistributed_missing else [stack.enter_context(running(NbDistributed))]
        rows = [_latency([ours, stock, *slow], cells)]
        for lines, pause in ((MANY, AT_ONCE), (FEW, AT_ONCE), (FEW, PACED)):
            rows += [_published(ours, stock, head, lines, pause, repeats) for head in (DIFFERING, ALIKE)]
    return rows


def _latency(contenders: list[Contender], cells: int) -> Row:
    for contender in contenders:
        for _ in range(3):
            contender.cell("pass")
    taken = interleave(cells, *(lambda one=one: one.cell("pass").seconds for one in contenders))
    share = ratio(taken[0], taken[1]).median
    peers = [("%%px", taken[1]), *(("nbdistributed", samples) for samples in taken[2:])]
    return Row(
        what=f"round trip of an empty cell, {NUM_RANKS} ranks",
        ours=taken[0].text("ms", 1, 1e3),
        peers="; ".join(f"{name} {samples.text('ms', 1, 1e3)}" for name, samples in peers),
        result=f"{share:.2f} of %%px",
        target="at most 1.0",
        met=at_most(share, 1.0),
    )


def _published(ours: Contender, stock: Contender, head: str, lines: int, pause: str, repeats: int) -> Row:
    """Bytes on the wire to the page for each byte that the ranks printed; where they print alike, that one printed."""
    differ = head is DIFFERING
    printed = lines * LINE_BYTES * (NUM_RANKS if differ else 1)
    cell = PRINT.format(lines=lines, head=head, pause=pause)

    def per_byte(contender: Contender) -> float:
        with _counting(contender) as wire:
            contender.cell(cell)
        return wire.num_bytes / printed

    mine, theirs = interleave(repeats, lambda: per_byte(ours), lambda: per_byte(stock))
    spilled = differ and lines * NUM_RANKS > CAP
    pace = "" if pause is AT_ONCE else ", a millisecond apart"
    return Row(
        what=f"bytes published a byte printed, {lines:,} {'differing' if differ else 'alike'} lines a rank{pace}",
        ours=_bytes(mine),
        peers=f"%%px {_bytes(theirs)}",
        result=f"{mine.median:.2f}" + (", the rest in a file" if spilled else "" if differ else " copies"),
        target="at most 1.3" if differ else "one copy, 1.3 with its framing",
        met=at_most(mine.median, 1.3),
    )


def _bytes(samples: Samples) -> str:
    return samples.text("", 2).replace("  (", " (").strip()


class _Wire:
    """Counts what a kernel publishes, as the page's server receives it. Listens on its own thread."""

    def __init__(self, address: str) -> None:
        self.num_bytes = 0
        self._address = address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _listen(self) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.rcvhwm = 0
            socket.connect(self._address)
            socket.subscribe(b"")
            while not self._stop.is_set():
                if socket.poll(100):
                    self.num_bytes += sum(len(frame) for frame in socket.recv_multipart())


@contextmanager
def _counting(contender: Contender) -> Iterator[_Wire]:
    manager = contender.kernel.manager
    wire = _Wire(f"tcp://{manager.ip}:{manager.iopub_port}")
    time.sleep(0.3)  # a subscription takes effect without notice
    try:
        yield wire
        time.sleep(0.3)  # what is still on its way
    finally:
        wire.stop()
