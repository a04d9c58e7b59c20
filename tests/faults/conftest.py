"""The fault matrix is printed, with times, when its tests have run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))

import matrix


@pytest.fixture(scope="session")
def results(pytestconfig: pytest.Config) -> matrix.Results:
    return pytestconfig.stash.setdefault(matrix.RESULTS, {})


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if matrix.RESULTS in config.stash:
        terminalreporter.section("fault matrix")
        terminalreporter.write_line(matrix.render(config.stash[matrix.RESULTS]))
