"""One notebook with four ranks for a whole module: a start costs seconds, a cell costs milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from notebook import Notebook


@pytest.fixture(scope="module")
def nb() -> Iterator[Notebook]:
    with Notebook() as notebook:
        started = notebook("%distributed start -n 4")
        assert started.status == "ok", started.error
        yield notebook
        notebook("%distributed stop")
