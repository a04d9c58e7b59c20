"""Every fault, on one rank and on all but one, under every layout, one after another in one session.

What a fault leaves behind shows at the next one; under DDP each comes twice in a row on one rank. `make soak` takes
many more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import matrix
import psutil
import pytest
from notebook import Notebook
from rig import Rig
from scenarios import FAULTS, LAYOUTS, WHO, Fault

FIRST, ON_ONE = "DDP", "one rank"
# shards and replicas, as FSDP and DDP have them
ALIKE = "HSDP"


def _cases() -> list[Any]:
    """Every layout with every fault on one rank; on all but one under the first only, else in `make slow`."""
    cases = []
    for layout, fault, who in itertools.product(LAYOUTS, FAULTS, WHO):
        is_like = layout == ALIKE or (layout != FIRST and who != ON_ONE)
        marks = [pytest.mark.slow] * is_like
        cases.append(pytest.param(layout, fault, who, marks=marks, id=f"{layout}-{fault.name}-{who}"))
    return cases


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A session a layout; when it stops, no process and no port of it is left."""
    with Notebook() as nb:
        nb("%distributed start -n 4")
        rig = Rig(nb)
        rig.make(request.param)
        yield rig
        kernel = psutil.Process(nb.manager.provisioner.process.pid)  # type: ignore[union-attr]
        ours = kernel.children(recursive=True)
        ports = {c.laddr.port for p in ours for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        nb("%distributed stop")
        assert kernel.children(recursive=True) == []
        assert not ports & {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(("rig", "fault", "who"), _cases(), indirect=["rig"])
def test_a_fault_costs_nothing_but_its_cell(rig: Rig, fault: Fault, who: str, results: matrix.Results) -> None:
    for _ in range(2 if (rig.layout, who) == (FIRST, ON_ONE) else 1):
        results.setdefault((rig.layout, fault.name, who), []).append(rig.suffer(fault, who))
