"""A notebook in which faults happen, and what is measured of each."""

from __future__ import annotations

import functools
import re
import time
from dataclasses import dataclass

import pytest
import scenarios
from notebook import Notebook, Output
from scenarios import LAYOUTS, NUM_RANKS, Fault

LIMIT_S = 12.0  # the machine is shared; what the table shows is the measure
SETTLE_S = 0.9  # until every rank is where the fault has it, and peers of one that failed would have been freed
SECOND_S = 0.5  # between two interrupts of an impatient person
MAX_STEPS = 400
TOLERANCE = 1e-4  # a healed reducer sums in other buckets, and 400 steps add that up


@dataclass(frozen=True)
class Result:
    """What became of one fault.

    Attributes:
        back_s: Until the prompt was back: from the fault's cell, or from the last interrupt where there was one.
        heal_s: Seconds that the replacement of dead ranks took; 0.0 if none died.
        trainer: What became of the trainer: "went on", "healed", or "lost".
    """

    back_s: float
    heal_s: float
    trainer: str


class Rig:
    """Four ranks and a trainer under one layout."""

    def __init__(self, nb: Notebook) -> None:
        self.nb = nb
        self._ok(scenarios.SETUP)
        self.layout = ""

    def make(self, layout: str) -> None:
        """A fresh trainer."""
        self._ok(f"%%distributed\ntrainer = make({LAYOUTS[layout]})")
        self.layout = layout

    def suffer(self, fault: Fault, who: str) -> Result:
        """Let ``fault`` happen and check that everything goes on."""
        output, back_s = self._fall(fault, who)
        assert output.ename == fault.error, output.error or output.status
        assert back_s < LIMIT_S
        heal_s, fate = self._heal(fault, output)
        self._all_reduce_is_right()
        if fate == "lost":
            refused = self.nb("%%distributed\ntake(trainer, 1)")
            assert "SessionError" in refused.error, refused.error
            self.make(self.layout)
        self._losses_are_one_devices()
        return Result(back_s, heal_s, fate)

    def _fall(self, fault: Fault, who: str) -> tuple[Output, float]:
        request = self.nb.send(scenarios.cell(fault, who))
        began = time.monotonic()
        for number in range(fault.interrupts):
            time.sleep(SECOND_S if number else SETTLE_S)
            began = time.monotonic()
            self.nb.interrupt()
        output = self.nb.wait(request, timeout=60)
        return output, time.monotonic() - began

    def _heal(self, fault: Fault, output: Output) -> tuple[float, str]:
        """Replace what died; how long that took and what the report says of the trainer."""
        said, began = output.stdout, time.monotonic()
        if fault.dies and not fault.interrupts:
            dead = re.search(r"restart --ranks (\S+) --replay", output.error)
            assert dead is not None, output.error
            said = self._ok(f"%distributed restart --ranks {dead[1]} --replay").stdout
        if not fault.dies:
            return 0.0, "went on"
        took = re.search(r"replaced in ([\d.]+) s", said)
        assert took is not None, said
        assert time.monotonic() - began < LIMIT_S
        return float(took[1]), "lost" if "trainer is lost" in said else "healed"

    def _all_reduce_is_right(self) -> None:
        self._ok("%%distributed -o sums\nt = torch.ones(3); dist.all_reduce(t); t.tolist()")
        assert self.nb.value("sums") == [[float(NUM_RANKS)] * 3] * NUM_RANKS

    def _losses_are_one_devices(self) -> None:
        self._ok("%%distributed -o progress\nbegan = trainer.num_steps\n(began, take(trainer, 3))")
        progress = self.nb.value("progress")
        assert len({began for began, _ in progress}) == 1
        began, losses = progress[0]
        assert losses == pytest.approx(expected()[began : began + 3], abs=TOLERANCE)

    def _ok(self, code: str) -> Output:
        output = self.nb(code)
        assert output.status == "ok", output.error
        return output


@functools.cache
def expected() -> list[float]:
    return scenarios.one_device_losses(MAX_STEPS)
