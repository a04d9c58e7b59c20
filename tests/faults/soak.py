"""Many random faults in one session: nothing is lost, and memory stays flat.

``python tests/faults/soak.py [--faults 200] [--seed 0]``
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))

from notebook import Notebook
from rig import Rig
from scenarios import FAULTS, LAYOUTS, WHO, Fault

WARM_UP = 20  # faults, until every library that a repair needs is loaded
FLAT = 0.10
REMAKE = 12  # faults that one trainer lives through: its batches are numbered, and the reference ends
MIB = 1 << 20


class Memory:
    """Proportional memory of the kernel and of all that it has started, in MiB, by fault."""

    def __init__(self, nb: Notebook) -> None:
        self._kernel = psutil.Process(nb.manager.provisioner.process.pid)  # type: ignore[union-attr]
        self.kernel: list[float] = []
        self.whole: list[float] = []

    def look(self) -> None:
        self.kernel.append(self._kernel.memory_full_info().uss / MIB)
        self.whole.append(sum(p.memory_full_info().pss for p in self._tree()) / MIB)

    def growth(self, samples: list[float]) -> float:
        """Of the last third over the first behind the warm-up; medians."""
        counted = samples[WARM_UP:]
        third = max(len(counted) // 3, 1)
        return statistics.median(counted[-third:]) / statistics.median(counted[:third]) - 1

    def _tree(self) -> list[psutil.Process]:
        return [self._kernel, *self._kernel.children(recursive=True)]


def soak(num_faults: int, seed: int) -> int:
    """Runs ``num_faults`` and says what was seen; 1 if memory grew."""
    chance = random.Random(seed)
    began = time.monotonic()
    fates: dict[str, int] = {}
    with Notebook() as nb:
        nb("%distributed start -n 4")
        rig, memory = Rig(nb), Memory(nb)
        for number in range(num_faults):
            if number % REMAKE == 0:
                rig.make(chance.choice(list(LAYOUTS)))
            fault, who = chance.choice(FAULTS), chance.choice(list(WHO))
            print(f"{number + 1:4} {rig.layout:5} {fault.name} on {who}", end="", flush=True)
            fate = _suffer(rig, number, fault, who)
            fates[fate] = fates.get(fate, 0) + 1
            memory.look()
            print(f": {fate}, {memory.whole[-1]:.0f} MiB in all, {memory.kernel[-1]:.0f} MiB the kernel", flush=True)
        nb("%distributed stop")
    growth, kernel = memory.growth(memory.whole), memory.growth(memory.kernel)
    # IPython itself keeps 2 KiB of each cell that a kernel runs, and a fault takes ten cells
    print(f"{num_faults} faults in {time.monotonic() - began:.0f} s (seed {seed}): trainers {fates}")
    print(f"memory grew by {growth:+.1%} in all, where {FLAT:.0%} is allowed, and by {kernel:+.1%} in the kernel")
    return int(growth > FLAT)


def _suffer(rig: Rig, number: int, fault: Fault, who: str) -> str:
    """One fault; what a rank that lives holds is there afterwards."""
    nb = rig.nb
    nb(f"%%distributed\nheld = {number}, os.getpid()")
    fate = rig.suffer(fault, who).trainer
    nb("%%distributed -o held_by\n(globals().get('held'), os.getpid())")
    for held, pid in nb.value("held_by"):
        assert held is None or held == (number, pid), f"a rank holds {held} after fault {number}"
        assert held is not None or fault.dies, "a rank that lives has lost what it held"
    return fate


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.exit(soak(options.faults, options.seed))
