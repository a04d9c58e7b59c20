"""The table of the fault matrix."""

from __future__ import annotations

import statistics

import pytest
from rig import Result
from scenarios import FAULTS, LAYOUTS, WHO

Results = dict[tuple[str, str, str], list[Result]]  # by layout, fault and who has it
RESULTS = pytest.StashKey[Results]()
_HEADINGS = ("fault", "on", "interrupts", "prompt back after", "ranks replaced in", *LAYOUTS)


def render(results: Results) -> str:
    """A Markdown table: a row for each fault and who has it; times are over layouts and repetitions."""
    lines = [_HEADINGS, ("---",) * len(_HEADINGS)]
    for fault in FAULTS:
        for who in WHO:
            cells = {layout: results.get((layout, fault.name, who), []) for layout in LAYOUTS}
            if found := [result for some in cells.values() for result in some]:
                heals = [result.heal_s for result in found if result.heal_s]
                healed = f"{max(heals):.1f} s" if heals else ""
                back = (
                    f"{statistics.median(r.back_s for r in found):.1f} s (at most {max(r.back_s for r in found):.1f})"
                )
                fates = (", ".join(sorted({result.trainer for result in some})) for some in cells.values())
                lines.append((fault.name, who, str(fault.interrupts or "none"), back, healed, *fates))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
