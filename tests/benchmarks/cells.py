"""The round trip of an empty cell, and what printing publishes, with all contenders' ranks alive at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import zmq
from contenders import NUM_RANKS, Contender, NbDistributed, NbTrain, Stock, running
from measure import Row, Samples, at_most, interleave, ratio

# A line as of a training log, 57 bytes.
LINE = "loss {{2.5 - i * 1e-4:.6f}} {{i * 37 % 1000:03d}} tokens a second"
DIFFERING = "for i in range({n}): print(f'rank {{rank}} step {{i:06d}} " + LINE + "')"
ALIKE = "for i in range({n}): print(f'all ranks step {{i:06d}} " + LINE + "')"
WITHIN_CAP, FLOOD = 1_000, 2_000  # lines a rank; nbtrain shows 5,000 lines a cell, and spills the rest to a file


def run(nbdistributed_missing: str, cells: int = 60, repeats: int = 3) -> list[Row]:
    with ExitStack() as stack:
        ours, stock = (stack.enter_context(running(kind)) for kind in (NbTrain, Stock))
        slow = [] if nbdistributed_missing else [stack.enter_context(running(NbDistributed))]
        rows = [_latency([ours, stock, *slow], cells)]
        for lines in (FLOOD, WITHIN_CAP):
            rows.append(_published(ours, stock, DIFFERING, lines, repeats, copies=NUM_RANKS))
            rows.append(_published(ours, stock, ALIKE, lines, repeats, copies=1))
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


def _published(ours: Contender, stock: Contender, code: str, lines: int, repeats: int, copies: int) -> Row:
    """Bytes on the wire to the page for each byte printed; with ``copies=1``, for each byte that one rank printed."""
    printed = copies * _printed_by_one(code, lines)
    cell = code.format(n=lines)

    def per_byte(contender: Contender) -> float:
        with _counting(contender) as wire:
            contender.cell(cell)
        return wire.num_bytes / printed

    mine, theirs = interleave(repeats, lambda: per_byte(ours), lambda: per_byte(stock))
    differ = copies > 1
    return Row(
        what=f"bytes published a byte printed, {lines:,} {'differing' if differ else 'alike'} lines a rank",
        ours=_bytes(mine),
        peers=f"%%px {_bytes(theirs)}",
        result=f"{mine.median:.2f}" + ("" if differ else " copies"),
        target="at most 1.3" if differ else "one copy, at most 1.3 with its framing",
        met=at_most(mine.median, 1.3),
    )


def _bytes(samples: Samples) -> str:
    return samples.text("", 2 if samples.median < 10 else 0).replace(" (", "(").replace("(", " (").strip()


def _printed_by_one(code: str, lines: int) -> int:
    sample = code.format(n=1).partition("print(f'")[2].rpartition("')")[0]
    width = len(eval(f"f{sample!r}", {"rank": 0, "i": 0}))
    return lines * (width + 1)


class _Wire:
    """Counts what a kernel publishes, as the page's server receives it."""

    def __init__(self, address: str) -> None:
        self.num_bytes = 0
        self._address = address
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._listen)

    def _listen(self) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.rcvhwm = 0
            socket.connect(self._address)
            socket.subscribe(b"")
            self._ready.set()
            while not self._stop.is_set():
                if socket.poll(100):
                    self.num_bytes += sum(len(frame) for frame in socket.recv_multipart())


@contextmanager
def _counting(contender: Contender) -> Iterator[_Wire]:
    manager = contender.kernel.manager
    wire = _Wire(f"tcp://{manager.ip}:{manager.iopub_port}")
    wire._thread.start()
    wire._ready.wait()
    time.sleep(0.3)  # a subscription takes effect without notice
    yield wire
    time.sleep(0.3)  # what is still on its way
    wire._stop.set()
    wire._thread.join()
