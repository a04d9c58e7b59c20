"""Layouts between which checkpoints go, and what is trained in each."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import models
import torch
from torch import nn

import nbtrain as nt

LAYOUTS = (
    "zero=0",
    "zero=1",
    "zero=3",  # zero=2 lies as this one does
    "zero=3,dp_replicate=2",
    "tp=2,zero=3",
    "tp=2,zero=1",
    "pp=2,zero=1",
    "pp=2,tp=2",
)
"""On four ranks."""


class Model(models.GPT):
    """Tied embeddings, a fused QKV weight, dropout, sizes that ranks do not divide, and a buffer."""

    def __init__(self) -> None:
        super().__init__(vocab=46, width=16, depth=2)
        self.bias = nn.Parameter(torch.randn(7))
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        if self.training:
            self.seen += 1
        x_BTD = self.dropout(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD)) + self.bias.mean()
        return logits_BTV, nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets.flatten())


def adamw(params: Any) -> torch.optim.Optimizer:
    """Two groups."""
    params = list(params)
    matrices = [parameter for parameter in params if parameter.ndim > 1]
    others = [parameter for parameter in params if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def momentum(params: Any) -> torch.optim.Optimizer:
    """One tensor of state for each parameter."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def trainer(spec: str, seed: int, make: Callable[[], nn.Module] = Model, **options: Any) -> nt.Trainer:
    """A new one, without the lines that plans print."""
    torch.manual_seed(seed)
    options = {"optimizer": adamw, **options}
    with contextlib.redirect_stdout(io.StringIO()):
        return nt.Trainer(make(), nt.Plan.parse(spec), **options)


def data(num_samples: int = 64) -> torch.utils.data.Dataset[Any]:
    ids = torch.randint(46, (num_samples, 13), generator=torch.Generator().manual_seed(5))
    return torch.utils.data.TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def train(subject: nt.Trainer, batches: Iterable[Any], steps: int) -> list[float]:
    """Losses."""
    return [float(subject.step(*batch)) for batch in itertools.islice(batches, steps)]
