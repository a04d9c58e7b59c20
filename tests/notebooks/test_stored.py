"""How notebooks are stored."""

from __future__ import annotations

import executed
import pytest


@pytest.mark.parametrize("name", sorted(path.name for path in executed.FOLDER.glob("*.ipynb")))
def test_it_is_stored_clean(name: str) -> None:
    assert executed.is_stored_clean(name)
