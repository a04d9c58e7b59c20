"""`loader`: each data-parallel rank's share of every global batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from nbtrain.errors import BatchError, UsageError, nearest
from nbtrain.parallel.mesh import data_coordinate, rank, world_size
from nbtrain.parallel.sampler import Order, share
from nbtrain.plan import Plan

_OURS = ("sampler", "batch_sampler", "generator")


class Loader:
    """Iterating it goes once through the dataset; the next time through the next epoch, in another order.

    Attributes:
        dataset: What it reads.
        batch_size: Global, in samples.
        epoch: Of the next iteration, or of the one that runs.
    """

    def __init__(self, dataset: Dataset[Any], order: Order, plan: Plan, options: dict[str, Any]) -> None:
        self.dataset = dataset
        self._order = order
        self._plan = plan
        self._options = options
        self._done = 0
        self._resumed = True
        self.epoch = 0

    @property
    def batch_size(self) -> int:
        return self._order.batch_size

    def __repr__(self) -> str:
        share = f"{self.batch_size} samples a batch over {self._plan.dp} rank{'s' * (self._plan.dp > 1)}"
        return f"<Loader: {share}, {len(self)} batches an epoch>"

    def __len__(self) -> int:
        """Batches an epoch."""
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        if not self._resumed:
            self.epoch += 1
            self._done = 0
        self._resumed = False
        for batch in self._remaining():
            # before the batch is used: a position that is saved after its step is behind it
            self._done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The position: epoch and batches taken of it."""
        return {"epoch": self.epoch, "batches": self._done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Makes the next iteration go on at a saved position, on any number of ranks with the same batch size."""
        self.epoch, self._done = int(state["epoch"]), int(state["batches"])
        self._resumed = True
        if self._done >= len(self):
            self.epoch, self._done = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration begin ``epoch``. Not needed: iterations count."""
        self.load_state_dict({"epoch": epoch, "batches": 0})

    def _remaining(self) -> Iterator[Any]:
        # asked for here, not kept: a rank that takes a dead one's place gets another rank's loader
        part = data_coordinate(self._plan, rank())
        shares = [
            share(indices, part, self._plan.dp)
            for number, indices in enumerate(self._order.batches(self.epoch))
            if number >= self._done
        ]
        # its own generator: workers' seeds must not draw from the global one
        generator = self._order.generator(self.epoch)
        yield from DataLoader(self.dataset, batch_sampler=shares, generator=generator, **self._options)


def loader(
    dataset: Dataset[Any],
    plan: Plan,
    *,
    batch_size: int,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = True,
    num_workers: int = 0,
    **options: Any,
) -> Loader:
    """Batches of ``dataset`` for this rank.

    Each data-parallel rank gets its part of a global batch; peers along pp and tp get the same. The order depends
    on ``seed`` and epoch alone: the parts of all ranks, put together in order, are one device's batch.

    Args:
        dataset: With ``len()`` and an index, e.g. ``torch.utils.data.TensorDataset``.
        plan: Resolved against the number of ranks here.
        batch_size: Global, in samples; the number of data-parallel ranks divides it.
        shuffle: A new order each epoch.
        seed: Of the order.
        drop_last: Leave a smaller last batch out. Else it is divided as evenly as it goes: ranks' parts then
            differ by one sample, and `Trainer` weights them.
        num_workers: Processes that read samples.
        **options: Of ``torch.utils.data.DataLoader``, e.g. ``collate_fn``.

    Raises:
        BatchError: A batch cannot be divided among the ranks; it names sizes that can.
        UsageError: The dataset has no length.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"{type(dataset).__name__} has no len() and no index, so that ranks could not share it; "
            "read it into a list first: nt.loader(list(dataset), ...)"
        )
    plan = plan.resolve(world_size())
    order = Order(len(dataset), batch_size, shuffle, seed, drop_last)
    _check(order, plan.dp)
    _check_options(options)
    return Loader(dataset, order, plan, {"num_workers": num_workers, **options})


def _check_options(options: Mapping[str, Any]) -> None:
    known = [name for name in inspect.signature(DataLoader).parameters if name not in _OURS]
    for name in options:
        if name in _OURS:
            raise UsageError(f"loader has no option {name!r}: it makes its own; leave it away")
        if name not in known:
            raise UsageError(
                f"loader has no option {name!r}; {nearest(name, ['shuffle', 'drop_last', 'seed', *known])}"
            )


def _check(order: Order, dp: int) -> None:
    size = order.batch_size
    if not isinstance(size, int) or size < 1 or size % dp:
        raise BatchError(
            f"batch_size={size} cannot be divided among {dp} data-parallel ranks; choose {_neighbours(size, dp)}"
        )
    if len(order) == 0:
        raise BatchError(
            f"the dataset has {order.num_samples} samples, less than one batch_size={size}; "
            f"choose a smaller one{f' (a multiple of {dp})' if dp > 1 else ''} or drop_last=False"
        )
    rest = order.num_samples % size
    if not order.drop_last and 0 < rest < dp:
        raise BatchError(
            f"the last batch would have {rest} samples for {dp} data-parallel ranks; type drop_last=True or "
            f"choose another batch_size: {_fitting(order.num_samples, dp)}"
        )


def _neighbours(size: int, dp: int) -> str:
    below = int(size) // dp * dp
    return f"{below} or {below + dp}" if below > 0 else str(dp)


def _fitting(num_samples: int, dp: int) -> str:
    fitting = [size for size in range(dp, num_samples + 1, dp) if not 0 < num_samples % size < dp]
    return ", ".join(map(str, fitting[-5:])) or "none fits"
