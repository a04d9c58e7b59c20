"""The model that both sides of the step benchmark train. Shapes: B samples, T tokens, D features, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attend(self.norm1(x_BTD))
        return x_BTD + self.mlp(self.norm2(x_BTD))

    def attend(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, D = x_BTD.shape
        q, k, v = (part.view(B, T, self.num_heads, -1).transpose(1, 2) for part in self.qkv(x_BTD).split(D, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D))


class GPT(nn.Module):
    def __init__(
        self, width: int = 256, depth: int = 4, num_heads: int = 8, vocab: int = 256, length: int = 128
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.tokens(ids_BT) + self.positions.weight[: ids_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def token_mean(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def make_batch(
    rank: int, batch_size: int = 4, length: int = 128, vocab: int = 256
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, both [batch_size, length]."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(vocab, (batch_size, length + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
