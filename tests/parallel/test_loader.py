"""Data order depends on seed and epoch; ranks cut it, and positions outlive layouts."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity import rank, world_size
from ranks import run_ranks
from torch.utils.data import IterableDataset, TensorDataset

import nbtrain as nt
from nbtrain.errors import BatchError, UsageError
from nbtrain.parallel.sampler import Order, share


def numbers(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def taken(loader: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


@given(st.lists(st.integers(), max_size=50), st.integers(1, 9))
def test_shares_in_order_are_the_batch_and_differ_by_one_at_most(indices: list[int], parts: int) -> None:
    shares = [share(indices, part, parts) for part in range(parts)]
    assert [index for part in shares for index in part] == indices
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


orders = st.builds(
    Order, st.integers(1, 60), st.integers(1, 20), st.booleans(), st.integers(0, 3), drop_last=st.booleans()
)


@given(orders, st.integers(0, 3))
def test_an_epoch_has_every_sample_once(order: Order, epoch: int) -> None:
    batches = list(order.batches(epoch))
    flat = [index for batch in batches for index in batch]
    assert len(batches) == len(order)
    assert len(set(flat)) == len(flat)
    left_out = order.num_samples % order.batch_size if order.drop_last else 0
    assert len(flat) == order.num_samples - left_out
    assert flat == [index for batch in order.batches(epoch) for index in batch]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return next(Order(50, 50, True, seed, True).batches(epoch))

    # a sum of seed and epoch would make the last two alike
    assert len({tuple(order(*pair)) for pair in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]}) == 5


def test_ranks_together_take_one_devices_batches() -> None:
    options: dict[str, Any] = {"batch_size": 8, "seed": 3, "drop_last": False}
    # outside of any group: one device
    single = nt.loader(numbers(45), nt.Plan(), **options)
    expected = [taken(single), taken(single)]
    assert expected[0] != expected[1]

    def on_rank(spec: str) -> list[list[list[int]]]:
        loader = nt.loader(numbers(45), nt.Plan.parse(spec), **options)
        assert len(loader) == len(expected[0]) == 6
        return [taken(loader), taken(loader)]

    for spec, ranks in [("zero=0", 2), ("zero=3", 4), ("zero=3,dp_replicate=2", 4)]:
        by_rank = run_ranks(on_rank, ranks, spec)
        for epoch in (0, 1):
            batches = zip(*(of_rank[epoch] for of_rank in by_rank), strict=True)
            assert [list(itertools.chain(*parts)) for parts in batches] == expected[epoch]


def test_a_position_is_taken_up_by_another_number_of_ranks() -> None:
    loader = nt.loader(numbers(32), nt.Plan(), batch_size=8, seed=1)
    taken(loader)
    batches = iter(loader)
    first = [next(batches)[0].tolist() for _ in range(2)]
    position = loader.state_dict()
    rest = [batch[0].tolist() for batch in batches]
    following = taken(loader)
    assert position == {"epoch": 1, "batches": 2}
    assert len(first) == len(rest) == 2

    def on_rank() -> list[list[list[int]]]:
        other = nt.loader(numbers(32), nt.Plan(), batch_size=8, seed=1)
        other.load_state_dict(position)
        return [taken(other), taken(other)]

    by_rank = run_ranks(on_rank, 2)
    assert [left + right for left, right in zip(by_rank[0][0], by_rank[1][0], strict=True)] == rest
    assert [left + right for left, right in zip(by_rank[0][1], by_rank[1][1], strict=True)] == following


def test_a_loop_that_was_left_begins_the_next_epoch() -> None:
    loader = nt.loader(numbers(8), nt.Plan(), batch_size=2)
    for _ in loader:
        break
    assert loader.epoch == 0
    assert len(taken(loader)) == 4
    assert loader.epoch == 1
    loader.set_epoch(0)
    assert taken(loader) == taken(nt.loader(numbers(8), nt.Plan(), batch_size=2))


def test_a_finished_epoch_is_not_begun_again() -> None:
    loader = nt.loader(numbers(8), nt.Plan(), batch_size=2)
    taken(loader)
    other = nt.loader(numbers(8), nt.Plan(), batch_size=2)
    other.load_state_dict(loader.state_dict())
    assert taken(other) == taken(loader)


def test_a_loop_goes_on_where_it_is_put_on_the_way() -> None:
    loader = nt.loader(numbers(8), nt.Plan(), batch_size=2, shuffle=False)
    seen, back = [], {"epoch": 0, "batches": 1}
    for (batch,) in loader:
        seen.append(int(batch[0]) // 2)
        if len(seen) == 4:  # the last one of the epoch
            loader.load_state_dict(back)
    assert seen == [0, 1, 2, 3, 1, 2, 3]
    assert loader.state_dict() == {"epoch": 0, "batches": 4}
    assert len(taken(loader)) == 4
    assert loader.epoch == 1


def test_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    taken(nt.loader(numbers(8), nt.Plan(), batch_size=2))
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_read_the_same_batches() -> None:
    plain = nt.loader(numbers(16), nt.Plan(), batch_size=4)
    workers = nt.loader(numbers(16), nt.Plan(), batch_size=4, num_workers=2)
    assert taken(workers) == taken(plain)


def test_a_batch_that_cannot_be_divided_names_sizes_that_can() -> None:
    def on_rank() -> None:
        with pytest.raises(BatchError, match=r"batch_size=10 cannot be divided among 4 .* choose 8 or 12"):
            nt.loader(numbers(64), nt.Plan(), batch_size=10)
        with pytest.raises(BatchError, match="choose 4"):
            nt.loader(numbers(64), nt.Plan(), batch_size=3)
        with pytest.raises(BatchError, match="64 samples, less than one batch_size=128"):
            nt.loader(numbers(64), nt.Plan(), batch_size=128)
        with pytest.raises(BatchError, match=r"last batch would have 2 samples .* drop_last=True"):
            nt.loader(numbers(66), nt.Plan(), batch_size=8, drop_last=False)
        assert len(nt.loader(numbers(66), nt.Plan(), batch_size=8)) == 8

    run_ranks(on_rank, 4)


def test_a_dataset_without_a_length_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(UsageError, match=r"nt\.loader\(list\(dataset\)"):
        nt.loader(Stream(), nt.Plan(), batch_size=2)
    assert len(nt.loader(list(Stream()), nt.Plan(), batch_size=2)) == 1  # type: ignore[arg-type]


def test_a_trainer_makes_its_loader() -> None:
    def on_rank() -> None:
        dataset = TensorDataset(torch.randn(20, 2), torch.randn(20, 1))
        trainer = nt.Trainer(
            torch.nn.Linear(2, 1),
            nt.Plan(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            loss_fn=torch.nn.functional.mse_loss,
        )
        loader = trainer.loader(dataset, batch_size=8, drop_last=False)
        assert [len(batch[0]) for batch in loader] == [4, 4, 2]
        assert loader.batch_size == 8
        losses = [trainer.step(*batch) for batch in loader]
        assert all(loss.ndim == 0 for loss in losses)
        assert rank() < world_size() == 2

    run_ranks(on_rank, 2)
