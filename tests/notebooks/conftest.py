"""A notebook is run once for the tests that are named after it: ``NAME`` in their module."""

from __future__ import annotations

from typing import Any

import executed
import pytest


@pytest.fixture(scope="module")
def cells(request: pytest.FixtureRequest) -> list[Any]:
    return executed.run(request.module.NAME)
