"""Every fault, on one rank and on all but one, under every layout, one after another in one session.

What a fault leaves behind shows at the next one; under DDP each comes twice in a row on one rank. `make soak` takes
many more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import matrix
import psutil
import pytest
from notebook import Notebook
from rig import Rig
from scenarios import FAULTS, LAYOUTS, WHO, Fault

REPEATED = "DDP", "one rank"
# shards and replicas, as FSDP and DDP have them
ALIKE = "HSDP"


def _layouts() -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name == ALIKE else name for name in LAYOUTS]


@pytest.fixture(scope="module", params=_layouts())
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


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_costs_nothing_but_its_cell(rig: Rig, fault: Fault, who: str, results: matrix.Results) -> None:
    for _ in range(2 if (rig.layout, who) == REPEATED else 1):
        results.setdefault((rig.layout, fault.name, who), []).append(rig.suffer(fault, who))
