"""Which samples a rank takes: a cut of a global order that knows nothing of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Order:
    """The order of a dataset's samples, by seed and epoch alone.

    Attributes:
        num_samples: Of the dataset.
        batch_size: Global.
    """

    num_samples: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool

    def __len__(self) -> int:
        """Global batches an epoch."""
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def of_part(self, num_parts: int) -> Order:
        """With the batch that each of ``num_parts`` ranks takes from a dataset of its own."""
        return replace(self, batch_size=self.batch_size // num_parts)

    def of_samples(self, num_samples: int) -> Order:
        return replace(self, num_samples=num_samples)

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """The indices of each global batch of an epoch."""
        indices = self._indices(epoch)
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield indices[start : start + self.batch_size].tolist()

    def generator(self, epoch: int) -> torch.Generator:
        """Random numbers of one epoch; different seeds and epochs have nothing in common."""
        mixed = random.Random(f"nbtrain {self.seed} {epoch}").getrandbits(63)
        return torch.Generator().manual_seed(mixed)

    def _indices(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.num_samples)
        return torch.randperm(self.num_samples, generator=self.generator(epoch))


def share(indices: list[int], part: int, num_parts: int) -> list[int]:
    """The contiguous part of a batch that belongs to one data-parallel rank; sizes differ by one at most.

    All parts in order are the batch.
    """
    size, longer = divmod(len(indices), num_parts)
    start = part * size + min(part, longer)
    return indices[start : start + size + (part < longer)]
