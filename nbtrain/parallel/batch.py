"""A rank's batch: its size, its chunks, and how it enters a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from nbtrain.errors import BatchError, UsageError


@dataclass(frozen=True)
class Batch:
    """What one call of ``step`` got.

    Attributes:
        positional: ``step(inputs, *targets)``.
        named: ``step(**batch)``.
        num_samples: The size of dim 0 of the first tensor that has one; 1 where there is none.
    """

    positional: tuple[Any, ...]
    named: Mapping[str, Any]
    num_samples: int

    @classmethod
    def of(cls, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Batch:
        """Raises `BatchError` for a batch without anything in it."""
        if not positional and not named:
            raise BatchError("the batch is empty; type trainer.step(inputs, targets) or trainer.step(**batch)")
        # mappings of other kinds (Hugging Face's) hide their tensors from torch's trees
        plain = tuple(dict(item) if isinstance(item, Mapping) else item for item in positional)
        return cls(plain, named, _num_samples((plain, dict(named))))

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def chunks(self, count: int, *, uneven: bool = False) -> list[Batch]:
        """``count`` parts along dim 0, whose sizes differ by one at most.

        Tensors whose dim 0 has another size, and what is no tensor, go to every part whole.

        Args:
            count: Number of parts.
            uneven: Some may have no samples.

        Raises:
            BatchError: There are fewer samples than parts.
        """
        if count == 1:
            return [self]
        if self.num_samples == 0:
            return [self] * count
        if self.num_samples < count and not uneven:
            raise BatchError(
                f"a rank's batch of {self.num_samples} cannot be divided into accumulate={count} chunks; "
                f"use a batch of at least {count} a rank or type accumulate={self.num_samples}"
            )
        leaves, tree = tree_flatten((self.positional, dict(self.named)))
        columns = [self._split(leaf, count) for leaf in leaves]
        return [Batch.of(*tree_unflatten(row, tree)) for row in map(list, zip(*columns, strict=True))]

    def joined(self, parts: Sequence[Batch]) -> Batch:
        """Some parts that `chunks` has made of it, one behind the other."""
        whole, tree = tree_flatten((self.positional, dict(self.named)))
        columns = zip(*(tree_flatten((part.positional, dict(part.named)))[0] for part in parts), strict=True)
        leaves = [
            torch.cat(column) if self._is_cut(leaf) else leaf for leaf, column in zip(whole, columns, strict=True)
        ]
        return Batch.of(*tree_unflatten(leaves, tree))

    def first(self) -> Batch:
        """Its first sample: copies."""
        sample = self._map(lambda tensor: tensor[:1].clone() if self._is_cut(tensor) else tensor)
        return Batch(sample.positional, sample.named, 1)

    def cloned(self) -> Batch:
        """The same in memory of its own."""
        return self._map(torch.clone)

    def zeros(self) -> Batch:
        """One sample of zeros, where it has none."""
        sample = self._map(lambda tensor: tensor.new_zeros(1, *tensor.shape[1:]) if self._is_cut(tensor) else tensor)
        return Batch(sample.positional, sample.named, 1)

    def _is_cut(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == self.num_samples

    def _split(self, leaf: Any, count: int) -> list[Any]:
        if self._is_cut(leaf):
            return list(leaf.tensor_split(count))
        return [leaf] * count

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        leaves, tree = tree_flatten((self.positional, dict(self.named)))
        changed = [change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        positional, named = tree_unflatten(changed, tree)
        return Batch(positional, named, self.num_samples)


def emptied(item: Any) -> Any:
    """A loader's item with 0 samples of the same kind: dim 0 of its tensors is cut."""
    plain = dict(item) if isinstance(item, Mapping) else item
    num_samples = _num_samples(plain)

    def cut(leaf: torch.Tensor) -> torch.Tensor:
        return leaf[:0].clone() if leaf.ndim and leaf.shape[0] == num_samples else leaf

    return tree_map_only(torch.Tensor, cut, plain)


def _num_samples(batch: Any) -> int:
    leaves, _ = tree_flatten(batch)
    sizes = (leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim)
    return next(sizes, 1)


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """The model's output; a tuple or list of inputs is unpacked, a mapping is passed by keyword."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def target_names(loss_fn: Callable[..., Any]) -> frozenset[str]:
    """The keywords of a dict batch that belong to the loss: its parameters after the first."""
    try:
        names = list(inspect.signature(loss_fn).parameters)
    except ValueError as error:  # a function written in C
        raise UsageError(
            "the parameters of loss_fn cannot be read; wrap it: loss_fn=lambda output, labels: ..."
        ) from error
    return frozenset(names[1:])
