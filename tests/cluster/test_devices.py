"""Which GPUs and how many threads, from what the machine says."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbtrain.cluster import devices
from nbtrain.cluster.options import Options
from nbtrain.errors import UsageError


@pytest.mark.parametrize(("text", "cores"), [("max 100000", None), ("100000 100000", 1), ("150000 100000", 2)])
def test_a_containers_quota_bounds_the_cores(tmp_path: Path, text: str, cores: int | None) -> None:
    quota = tmp_path / "cpu.max"
    unbounded = devices.usable_cores(tmp_path / "missing")
    quota.write_text(text)
    assert devices.usable_cores(quota) == min(cores or unbounded, unbounded)


def test_gpus_are_chosen_by_position() -> None:
    assert devices.choose_gpus(None, ["3", "7"]) == ["3", "7"]
    assert devices.choose_gpus("1", ["3", "7"]) == ["7"]
    assert devices.choose_gpus("none", ["3", "7"]) == []
    with pytest.raises(UsageError, match=r"no GPU '2'; choose from 0, 1"):
        devices.choose_gpus("0,2", ["3", "7"])
    with pytest.raises(UsageError, match="twice"):
        devices.choose_gpus("1,1", ["3", "7"])


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert Options().request().num_ranks == 2
    assert Options(n=1).request().gpus == ("0",)
    with pytest.raises(UsageError, match=r"-n 4: there are 2 GPUs .* type -n 2, or -n 4 --gpus none"):
        Options(n=4).request()
    assert Options(n=4, gpus="none").request().gpus == ()


@pytest.mark.parametrize("options", [{"n": 0}, {"n": True}, {"n": 1.5}, {"threads": 0}, {"backend": "mpi"}])
def test_values_that_cannot_be(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Options(**options)  # type: ignore[arg-type]
