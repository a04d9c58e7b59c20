"""Small models for parity tests, as a notebook's user would write them, with a batch for each.

Shapes: B samples, T tokens, V vocabulary, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

Batch = dict[str, torch.Tensor]

V, T, D = 48, 12, 16


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 3))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return self.layers(x_BD)


class ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(*(ConvBlock(width) for _ in range(2)))
        self.head = nn.Sequential(nn.Linear(width, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.out(self.attend(self.norm1(x_BTD)))
        return x_BTD + self.mlp(self.norm2(x_BTD))

    def attend(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, D = x_BTD.shape
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(x_BTD).split(D, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)


class GPT(nn.Module):
    """Tied embeddings; returns (logits, loss) as nanoGPT does."""

    def __init__(self, vocab: int = V, width: int = D, heads: int = 4, depth: int = 3, length: int = T) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x_BTD = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        if targets is None:
            return logits_BTV
        return logits_BTV, F.cross_entropy(logits_BTV.flatten(0, 1), targets.flatten())


class Noisy(GPT):
    """With dropout, outside of modules."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = F.dropout(self.tokens(ids) + self.positions.weight[: ids.shape[1]], 0.3)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Tied(nn.Module):
    """Of shared/cases/05."""

    def __init__(self, vocab: int = V, d: int = D, n: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)) for _ in range(n)
        )
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Branches(nn.Module):
    """Of shared/cases/09."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.a(x) if x.mean() > 0 else self.b(x))


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V,
            hidden_size=D,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=T,
        )
    )


def gpt2() -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # masks differ between layouts
    return GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=T, n_embd=D, n_layer=2, n_head=4, **dropout))


def token_mean(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def token_sum(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of shared/cases/12: sum and number of valid tokens."""
    loss = F.cross_entropy(logits_BTV.flatten(0, -2), targets_BT.flatten(), ignore_index=-100, reduction="sum")
    return loss, (targets_BT != -100).sum()


@dataclass(frozen=True)
class Case:
    """A model, its loss, and the batch that its trainer gets, as positional or named arguments."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], tuple[torch.Tensor, ...] | Batch]
    loss_fn: Callable[..., Any] | None = None


def _regression(g: torch.Generator, size: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(size, 8, generator=g), torch.randn(size, 3, generator=g)


def _images(g: torch.Generator, size: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(size, 3, 8, 8, generator=g), torch.randint(5, (size,), generator=g)


def _ids(g: torch.Generator, size: int) -> torch.Tensor:
    return torch.randint(V, (size, T), generator=g)


def _ragged(g: torch.Generator, size: int) -> tuple[torch.Tensor, ...]:
    """Valid tokens fall unevenly; the first half of the samples has few, and the very first none."""
    ids, targets = _ids(g, size), _ids(g, size)
    keep = torch.rand(size, T, generator=g) < torch.linspace(0, 1, size)[:, None]
    keep[0] = False
    return ids, torch.where(keep, targets, -100)


def _labelled(g: torch.Generator, size: int) -> Batch:
    ids = _ids(g, size)
    return {"input_ids": ids, "labels": ids}


CASES = {
    "mlp": Case(MLP, _regression, nn.functional.mse_loss),
    "conv": Case(ConvNet, _images, nn.functional.cross_entropy),
    "gpt": Case(GPT, lambda g, size: (_ids(g, size), _ids(g, size)), token_mean),
    "gpt_own_loss": Case(GPT, lambda g, size: (_ids(g, size), _ids(g, size))),
    "gpt_ragged": Case(GPT, _ragged, token_sum),
    "llama": Case(llama, _labelled),
    "gpt2": Case(gpt2, _labelled),
}
