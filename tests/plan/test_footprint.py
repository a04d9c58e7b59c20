"""The formulas of ZeRO, held against the paper's own table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.plan import Plan
from nbtrain.plan.footprint import elements_moved, format_bytes, gathered_bytes, model_states


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "optimizer"),
    [(0, 4, 4, 8), (1, 4, 4, 8 / 64), (2, 4 / 64, 4 / 64, 8 / 64), (3, 4 / 64, 4 / 64, 8 / 64)],
)
def test_model_states_of_64_ranks(zero: int, parameters: float, gradients: float, optimizer: float) -> None:
    states = model_states(Plan(zero=zero).resolve(64), 1000)
    assert states.parameters_bytes == 1000 * parameters
    assert states.gradients_bytes == 1000 * gradients
    assert states.optimizer_bytes == 1000 * optimizer


def test_zero_2_gathers_all_parameters_once() -> None:
    assert gathered_bytes(Plan(zero=2).resolve(4), 1000) == 4000
    assert gathered_bytes(Plan(zero=2, precision="bf16").resolve(4), 1000) == 2000
    assert gathered_bytes(Plan(zero=3).resolve(4), 1000) == 0


def test_elements_moved_are_two_or_three_times_the_parameters() -> None:
    assert elements_moved(Plan(zero=0).resolve(4), 1000) == 1500
    assert elements_moved(Plan(zero=2).resolve(4), 1000) == 1500
    assert elements_moved(Plan(zero=3).resolve(4), 1000) == 2250
    # HSDP: three passes over the 2 shards, then an all-reduce of 500 elements over the 2 replicas
    assert elements_moved(Plan(zero=3, dp_replicate=2).resolve(4), 1000) == 1500 + 500


@given(st.integers(0, 3), st.integers(1, 64), st.integers(1, 10**12))
def test_more_sharding_never_needs_more_memory(zero: int, ranks: int, num_parameters: int) -> None:
    held = [model_states(Plan(zero=stage).resolve(ranks), num_parameters).total_bytes for stage in range(4)]
    assert held == sorted(held, reverse=True)
    assert elements_moved(Plan(zero=zero).resolve(1), num_parameters) == 0


def test_bytes_read_well() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 * 2**30, 2**42)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "4.0 TiB",
    ]
