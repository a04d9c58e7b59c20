"""An embedding whose rows, the vocabulary, are cut: a rank looks up its own ids, and the lookups are summed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nbtrain.errors import ModelError
from nbtrain.parallel.tensor.collectives import leave
from nbtrain.parallel.tensor.peers import TensorGrouped
from nbtrain.parallel.tensor.swap import cut_class, swap_class

_REFUSED = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}


class Vocab(TensorGrouped):
    """Ids (...) of any integer dtype to (..., D). Rows [rank V/t, (rank + 1) V/t) are here.

    ``num_embeddings`` is the part's; ``padding_idx`` is the whole vocabulary's.
    """

    num_embeddings: int
    padding_idx: int | None
    weight: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = self.num_embeddings
        _check(input, rows * self.peers.degree)
        local = input - self.peers.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight, self._local_padding())
        return leave(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.peers)

    def _local_padding(self) -> int | None:
        if self.padding_idx is None:
            return None
        local = self.padding_idx - self.peers.rank * self.num_embeddings
        return local if 0 <= local < self.num_embeddings else None


VocabEmbedding = cut_class(Vocab, nn.Embedding)


def cut_embedding(module: nn.Embedding) -> None:
    """Swaps the class of an embedding whose weight is a part already.

    A class with a forward of its own (one that scales what ``super().forward`` found) runs it around the lookup.
    """
    if type(module).forward is nn.Embedding.forward:
        swap_class(module, Vocab)
    else:
        module.__class__ = cut_class(type(module), VocabEmbedding)
    module.num_embeddings = module.weight.shape[0]


def check_embedding(name: str, module: nn.Embedding) -> None:
    """Refuses what needs all rows.

    Raises:
        ModelError: It renormalises, scales gradients by frequency or has sparse gradients, or looks up by itself.
    """
    forward = type(module).forward
    if forward is not nn.Embedding.forward and "__class__" not in forward.__code__.co_freevars:
        raise ModelError(
            f"the forward of '{name}' looks up rows by itself, of which a rank has a part; call super().forward(ids) "
            f"in {type(module).__name__}, or keep it whole with tp_plan={{..., '{name}': 'replicate'}}"
        )
    for option, default in _REFUSED.items():
        if getattr(module, option, default) != default:
            raise ModelError(
                f"'{name}' has {option}={getattr(module, option)}, which needs all rows of the embedding; build it "
                f"with {option}={default}, or keep it whole with tp_plan={{..., '{name}': 'replicate'}}"
            )


def _check(ids: torch.Tensor, size: int) -> None:
    """Ids that no rank has would be looked up as zeros. On a GPU the check doesn't wait."""
    if ids.is_cuda:
        torch._assert_async(((ids >= 0) & (ids < size)).all(), f"an id is outside the embedding's {size} rows")
    elif ids.numel() and not ids.is_meta and (ids.min() < 0 or ids.max() >= size):
        raise IndexError(
            f"ids from {int(ids.min())} to {int(ids.max())} were looked up in an embedding of {size} rows; "
            f"give ids from 0 to {size - 1}"
        )
