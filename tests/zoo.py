"""The models of the parity matrix, beside those of `models`: what people define in notebooks, and Hugging Face's.

Shapes: B samples, T tokens, H heads, K their features, D features, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import models
import torch
import torch.nn.functional as F
from models import Batch, Case, D, T, V
from torch import nn
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

HEADS, KV_HEADS, IMAGE, CLASSES = 4, 4, 8, 5


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return self.layers(x_BD)


class SplitAttention(nn.Module):
    """Separate projections, written with whole sizes; fewer heads of keys and values than of queries."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: torch.Tensor, context_BSD: torch.Tensor | None = None) -> torch.Tensor:
        B, T, D = x_BTD.shape
        causal = context_BSD is None
        other = x_BTD if context_BSD is None else context_BSD
        q = self.q(x_BTD).view(B, T, self.heads, self.size).transpose(1, 2)
        k = self.k(other).view(B, other.shape[1], self.kv_heads, self.size).transpose(1, 2)
        v = self.v(other).view(B, other.shape[1], self.kv_heads, self.size).transpose(1, 2)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.o(y.transpose(1, 2).contiguous().view(B, T, D))


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class SplitBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, cross: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = SplitAttention(width, heads, kv_heads)
        self.mlp = GatedMLP(width, 2 * width)
        if cross:
            self.norm3, self.cross = nn.RMSNorm(width), SplitAttention(width, heads, kv_heads)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        if context is not None:
            x = x + self.cross(self.norm3(x), context)
        return x + self.mlp(self.norm2(x))


class SplitGPT(nn.Module):
    """With separate projections; returns logits."""

    def __init__(self, kv_heads: int = HEADS, depth: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(SplitBlock(D, HEADS, kv_heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(D), nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class UntiedGPT(models.GPT):
    """With fused projections."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, V, bias=False)


class EncoderDecoder(nn.Module):
    """(source ids, target ids) to logits."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(T, D)
        self.encoder = nn.ModuleList(SplitBlock(D, HEADS, HEADS) for _ in range(depth))
        self.decoder = nn.ModuleList(SplitBlock(D, HEADS, HEADS, cross=True) for _ in range(depth))
        self.head = nn.Linear(D, V)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        context = self.tokens(source) + self.positions.weight[: source.shape[1]]
        for block in self.encoder:
            context = block(context)
        x = self.tokens(target) + self.positions.weight[: target.shape[1]]
        for block in self.decoder:
            x = block(x, context)
        return self.head(x)


class ViT(nn.Module):
    """On ``nn.TransformerEncoderLayer``, as in many courses."""

    def __init__(self, depth: int = 2, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, D, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, D))
        self.positions = nn.Parameter(torch.randn(1, (IMAGE // patch) ** 2 + 1, D) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(D, HEADS, 4 * D, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(D, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class LoRA(nn.Module):
    """A frozen layer and its low-rank update (arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def lora() -> nn.Module:
    model = SplitGPT().requires_grad_(False)
    for block in model.blocks:
        block.attention.q, block.attention.v = LoRA(block.attention.q), LoRA(block.attention.v)
        block.mlp.down = LoRA(block.mlp.down)
    return model


def t5() -> nn.Module:
    config = T5Config(
        vocab_size=V, d_model=D, d_kv=4, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0.0,
        relative_attention_num_buckets=8, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=V, hidden_size=D, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=T, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def _pairs(g: torch.Generator, size: int) -> tuple[Any, ...]:
    return (models._ids(g, size), models._ids(g, size)), models._ids(g, size)


def _small_images(g: torch.Generator, size: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(size, 3, IMAGE, IMAGE, generator=g), torch.randint(0, CLASSES, (size,), generator=g)


def _translated(g: torch.Generator, size: int) -> Batch:
    return {"input_ids": models._ids(g, size) + 0, "labels": models._ids(g, size)}


def _tokens(g: torch.Generator, size: int) -> tuple[torch.Tensor, ...]:
    return models._ids(g, size), models._ids(g, size)


CASES = {
    "MLP": Case(MLP, models._regression, nn.functional.mse_loss),
    "conv + BatchNorm": models.CASES["conv"],
    "GPT tied, fused QKV": models.CASES["gpt"],
    "GPT untied, fused QKV": Case(UntiedGPT, _tokens, models.token_mean),
    "GPT tied, separate QKV": Case(lambda: SplitGPT(tied=True), _tokens, models.token_mean),
    "GPT untied, separate QKV": Case(SplitGPT, _tokens, models.token_mean),
    "GQA": Case(lambda: SplitGPT(kv_heads=2), _tokens, models.token_mean),
    "encoder-decoder": Case(EncoderDecoder, _pairs, models.token_mean),
    "ViT": Case(ViT, _small_images, F.cross_entropy),
    "LoRA, frozen base": Case(lora, _tokens, models.token_mean),
    "HF Llama": models.CASES["llama"],
    "HF GPT-2": models.CASES["gpt2"],
    "HF T5": Case(t5, _translated),
    "HF BERT": Case(bert, models._labelled),
}
