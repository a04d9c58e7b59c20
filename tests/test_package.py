"""The public surface, what importing costs, and names that are strings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import nbtrain
from nbtrain.engine import calls
from nbtrain.engine.forkserver import resolve

PACKAGE = Path(nbtrain.__file__).parent


def test_the_public_surface() -> None:
    assert nbtrain.__all__ == [
        "Plan",
        "Session",
        "Trainer",
        "__version__",
        "errors",
        "load_ipython_extension",
        "loader",
        "meta_init",
        "parallelize",
        "progress",
        "session",
        "unload_ipython_extension",
        "verify",
    ]
    assert [getattr(nbtrain, name).__doc__ for name in nbtrain.__all__ if name != "__version__"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        nbtrain.nothing  # noqa: B018


@pytest.mark.parametrize(
    "code",
    [
        "import nbtrain",
        "import nbtrain.magics, nbtrain.cluster.session, nbtrain.plan, nbtrain.events, nbtrain.errors",
        "import nbtrain; nbtrain.Plan(zero=3).resolve(4).describe()",
    ],
)
def test_the_kernel_does_not_import_torch(code: str) -> None:
    subprocess.run([sys.executable, "-c", f"{code}\nimport sys; assert 'torch' not in sys.modules"], check=True)


def test_functions_that_are_called_by_name_exist() -> None:
    source = "\n".join(path.read_text() for path in (PACKAGE / "cluster").glob("*.py"))
    called = set(re.findall(r"(?:self\._call|self\._call_each|\.call)\(\s*\"(\w+)\"", source))
    assert {"join", "rejoin", "push", "pull", "take_result", "bind_plan", "parallelize_names"} <= called
    assert [name for name in called if not callable(getattr(calls, name, None))] == []
    forked = set(re.findall(r"\"(nbtrain\.engine\.\w+:\w+)\"", source))
    assert len(forked) == 3
    assert all(callable(resolve(target)) for target in forked)


def test_modules_that_are_run_by_name_exist() -> None:
    source = "\n".join(path.read_text() for path in (PACKAGE / "cluster").glob("*.py"))
    for name in set(re.findall(r"\"(nbtrain\.engine(?:\.\w+)?)\"", source)):
        path = PACKAGE.joinpath(*name.split(".")[1:])
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
