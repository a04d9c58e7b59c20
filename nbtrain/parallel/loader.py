"""`loader`: each data-parallel rank's share of every global batch."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from nbtrain.errors import BatchError, UsageError, nearest
from nbtrain.parallel.batch import emptied
from nbtrain.parallel.mesh import data_coordinate, rank, world_size
from nbtrain.parallel.sampler import Order, share
from nbtrain.parallel.transfer import broadcast, gather
from nbtrain.plan import Plan

_OURS = ("sampler", "batch_sampler", "generator")
# of each loader the trainer that made it, where one did: what gives a batch must give the shares that a step expects
_owners: weakref.WeakKeyDictionary[Loader, weakref.ref[object] | None] = weakref.WeakKeyDictionary()


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
        self._turns = 0
        self.epoch = 0

    def __new__(cls, *args: Any, **options: Any) -> Loader:
        loader = super().__new__(cls)
        _owners[loader] = None  # also of one that came from another rank, which nothing initialises
        return loader

    @property
    def batch_size(self) -> int:
        return self._order.batch_size

    @property
    def traits(self) -> dict[str, int]:
        """What a loader has in common with one that gives the same batches of as large a dataset, in the same order."""
        order = self._order
        return {
            "batch_size": self.batch_size,
            "length": len(self),
            "num_samples": order.num_samples,
            "shuffle": order.shuffle,
            "seed": order.seed,
            "drop_last": order.drop_last,
        }

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
        turns = -1
        # on the way it may be laid out anew, so that this rank's share is another, or be put somewhere else
        while turns != self._turns:
            turns, self._resumed = self._turns, False
            for batch in self._remaining():
                # before the batch is used: a position that is saved after its step is behind it
                self._done += 1
                yield batch
                if turns != self._turns:
                    break

    def misfit(self, plan: Plan) -> str:
        """Why `replan` could not go on; "" where it can.

        Args:
            plan: Resolved.
        """
        try:
            _check_size(self._order, plan.dp)
            _check_length(self._order, plan.dp)
        except BatchError as problem:
            return str(problem)
        return ""

    def replan(self, plan: Plan) -> None:
        """Goes on where it is, also in the middle of an epoch, with the shares of another plan.

        Args:
            plan: Resolved.
        """
        self._plan = plan
        self._turns += 1

    def state_dict(self) -> dict[str, int]:
        """The position: epoch and batches taken of it."""
        return {"epoch": self.epoch, "batches": self._done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on at a saved position, on any number of ranks with the same batch size.

        The iteration that runs does so with its next batch; where none does, the next one.
        """
        self.epoch, self._done = int(state["epoch"]), int(state["batches"])
        self._resumed = True
        self._turns += 1
        if self._done >= len(self):
            self.epoch, self._done = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration begin ``epoch``, or the one that runs. Not needed: iterations count."""
        self.load_state_dict({"epoch": epoch, "batches": 0})

    def _remaining(self) -> Iterator[Any]:
        # asked for here, not kept: a rank that takes a dead one's place gets another rank's loader
        part = data_coordinate(self._plan, rank())
        shares = [
            share(indices, part, self._plan.dp)
            for number, indices in enumerate(self._order.batches(self.epoch))
            if number >= self._done
        ]
        yield from self._read(shares)

    def _read(self, batches: list[list[int]]) -> DataLoader[Any]:
        # its own generator: workers' seeds must not draw from the global one
        generator = self._order.generator(self.epoch)
        return DataLoader(self.dataset, batch_sampler=batches, generator=generator, **self._options)


def own(loader: Loader, owner: object) -> Loader:
    """Notes that ``owner`` takes the batches of ``loader``, which it returns."""
    _owners[loader] = weakref.ref(owner)
    return loader


def owned_by(owner: object) -> list[Loader]:
    """The loaders on this rank that `own` has noted."""
    return [loader for loader, reference in _owners.items() if reference is not None and reference() is owner]


def unowned(plan: Plan) -> list[Loader]:
    """The loaders on this rank that nobody owns, and that give the shares of ``plan``, a resolved one."""
    return [
        loader
        for loader, reference in _owners.items()
        if reference is None and (loader._plan.dp, loader._plan.tp) == (plan.dp, plan.tp)
    ]


class UnevenLoader(Loader):
    """Of ranks that have datasets of their own, of any length. Ranks iterate together."""

    def __init__(self, dataset: Dataset[Any], order: Order, plan: Plan, options: dict[str, Any]) -> None:
        super().__init__(dataset, order, plan, options)
        self._meet()

    @property
    def batch_size(self) -> int:
        return self._order.batch_size * self._plan.dp

    @property
    def traits(self) -> dict[str, int]:
        """Of all ranks' together: how many samples this one has says nothing of the others."""
        return {key: value for key, value in super().traits.items() if key != "num_samples"}

    def __len__(self) -> int:
        """Batches an epoch: of the rank that has most."""
        return self._num_batches

    def misfit(self, plan: Plan) -> str:
        if plan.dp == self._plan.dp and data_coordinate(plan, rank()) == data_coordinate(self._plan, rank()):
            return ""
        return (
            "a loader with uneven=True has a dataset of each data-parallel rank's own, and by the new plan other ranks "
            "share one; delete the loader (del), and make another after trainer.replan"
        )

    def _meet(self) -> None:
        """Tells the others how many batches this rank has. Collective."""
        num_samples = len(self.dataset)  # type: ignore[arg-type]  # it has a length
        self._order = self._order.of_samples(num_samples)
        part = data_coordinate(self._plan, rank())
        own = _Standing(part, num_samples, len(self._order), self.epoch, self._done)
        everyone: list[_Standing] = gather(own) if dist.is_initialized() else [own]
        _check_standings(everyone)
        self._num_batches = max(standing.batches for standing in everyone)
        if any(standing.samples == 0 for standing in everyone):
            source = next(rank for rank, standing in enumerate(everyone) if standing.samples)
            kind = self._emptied_sample() if rank() == source else None
            self._empty = broadcast(kind, source) if dist.is_initialized() else kind

    def _remaining(self) -> Iterator[Any]:
        self._meet()
        first = min(self._done, len(self))  # `_done` counts on while batches are taken
        own = [indices for number, indices in enumerate(self._order.batches(self.epoch)) if number >= first]
        yield from self._read(own) if own else ()
        if missing := len(self) - first - len(own):
            yield from [self._emptied_sample()] * missing

    def _emptied_sample(self) -> Any:
        if len(self.dataset) == 0:  # type: ignore[arg-type]
            return self._empty
        collate = self._options.get("collate_fn") or default_collate
        return emptied(collate([self.dataset[0]]))


class _Standing(NamedTuple):
    """Of one rank's dataset."""

    part: int
    samples: int
    batches: int
    epoch: int
    done: int


def _check_standings(everyone: list[_Standing]) -> None:
    """Raises `BatchError` on all ranks alike."""
    if not any(standing.batches for standing in everyone):
        raise BatchError("no rank has a batch: all datasets are empty, or smaller than a batch with drop_last=True")
    seen: dict[int, tuple[int, int]] = {}
    for number, standing in enumerate(everyone):
        first, samples = seen.setdefault(standing.part, (number, standing.samples))
        if standing.samples != samples:
            raise BatchError(
                f"ranks {first} and {number} take the same share of a batch and have {samples} and {standing.samples} "
                "samples; give peers along tp and pp the same dataset"
            )
        if standing[3:] != everyone[0][3:]:
            raise BatchError(
                f"rank 0 is at epoch {everyone[0].epoch}, batch {everyone[0].done} and rank {number} at epoch "
                f"{standing.epoch}, batch {standing.done}; load the same position on all ranks"
            )


def loader(
    dataset: Dataset[Any],
    plan: Plan,
    *,
    batch_size: int,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool | None = None,
    num_workers: int = 0,
    uneven: bool = False,
    **options: Any,
) -> Loader:
    """Batches of ``dataset`` for this rank.

    Each data-parallel rank gets its part of a global batch; peers along pp and tp get the same. The order depends
    on ``seed`` and epoch alone: the parts of all ranks, put together in order, are one device's batch.

    Args:
        dataset: With ``len()`` and an index, e.g. ``torch.utils.data.TensorDataset``.
        plan: Resolved against the number of ranks here.
        batch_size: Global, in samples; the number of data-parallel ranks divides it.
        shuffle: A new order each epoch of this loader; another one made of the same arguments begins with the first.
        seed: Of the order.
        drop_last: Leave a smaller last batch out; None does, unless ``uneven``. Else it is divided as evenly as it
            goes: ranks' parts then differ by one sample, and `Trainer` weights them.
        num_workers: Processes that read samples.
        uneven: ``dataset`` is this rank's own, of any length (peers along pp and tp: the same). An epoch ends when the
            longest is read; a rank that has run out gets batches of 0 samples, with which `Trainer` joins the others'
            steps and adds nothing: the numbers are those of all ranks' samples together. Collective.
        **options: Of ``torch.utils.data.DataLoader``, e.g. ``collate_fn``.

    Raises:
        BatchError: A batch cannot be divided among the ranks; it names sizes that can. With ``uneven``: no rank has a
            sample, or peers have different datasets.
        UsageError: The dataset has no length.
    """
    if isinstance(dataset, DataLoader | Loader):
        raise UsageError(
            f"a {type(dataset).__name__} gives batches, and ranks share samples; give its dataset: "
            "trainer.loader(loader.dataset, batch_size=...)"
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"{type(dataset).__name__} has no len() and no index, so that ranks could not share it; "
            "read it into a list first: nt.loader(list(dataset), ...)"
        )
    plan = plan.resolve(world_size())
    order = Order(len(dataset), batch_size, shuffle, seed, not uneven if drop_last is None else drop_last)
    _check_size(order, plan.dp)
    _check_options(options)
    options = {"num_workers": num_workers, **options}
    if uneven:
        return UnevenLoader(dataset, order.of_part(plan.dp), plan, options)
    _check_length(order, plan.dp)
    return Loader(dataset, order, plan, options)


def _check_options(options: Mapping[str, Any]) -> None:
    known = [name for name in inspect.signature(DataLoader).parameters if name not in _OURS]
    for name in options:
        if name in _OURS:
            raise UsageError(f"loader has no option {name!r}: it makes its own; leave it away")
        if name not in known:
            raise UsageError(
                f"loader has no option {name!r}; {nearest(name, ['shuffle', 'drop_last', 'seed', *known])}"
            )


def _check_size(order: Order, dp: int) -> None:
    size = order.batch_size
    if not isinstance(size, int) or size < 1 or size % dp:
        raise BatchError(
            f"batch_size={size} cannot be divided among {dp} data-parallel ranks; choose {_neighbours(size, dp)}"
        )


def _check_length(order: Order, dp: int) -> None:
    size = order.batch_size
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
