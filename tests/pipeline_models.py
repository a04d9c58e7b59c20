"""Models that are deep enough for eight stages, as a notebook's user would write them, with a batch for each.

Shapes: B samples, T tokens, V vocabulary, D features.
"""

from __future__ import annotations

import dataclasses

import models
import torch
import torch.nn.functional as F
import zoo
from models import Batch, Case, D, T, V
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

DEPTH = 8


class UntiedGPT(models.GPT):
    """With fused projections."""

    def __init__(self) -> None:
        super().__init__(depth=DEPTH)
        self.head = nn.Linear(D, V, bias=False)


def half_frozen() -> nn.Module:
    """Nothing trains in the first of two stages."""
    model = UntiedGPT()
    for part in (model.tokens, model.positions, *model.blocks[: DEPTH // 2 + 1]):
        part.requires_grad_(False)
    return model


class DropBlock(models.Block):
    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD + self.drop(super().forward(x_BTD))

    def __init__(self, width: int, heads: int, rate: float = 0.3) -> None:
        super().__init__(width, heads)
        self.drop = nn.Dropout(rate)


class DropGPT(UntiedGPT):
    """With dropout behind every block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DropBlock(D, 4) for _ in range(DEPTH))


class MLP(nn.Module):
    """Of layers that are no blocks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        hidden = [layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.Tanh())]
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Tanh(), *hidden, nn.Linear(width, 3))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return self.layers(x_BD)


def plain_conv(width: int = 6) -> nn.Module:
    """One flat ``nn.Sequential``, normalised by the batch."""
    layers: list[nn.Module] = []
    for index in range(DEPTH):
        layers += [nn.Conv2d(width if index else 3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, zoo.CLASSES))


class ResNet(nn.Module):
    """Residual blocks, normalised by the batch."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(*(models.ConvBlock(width) for _ in range(DEPTH)))
        self.head = nn.Linear(width, zoo.CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class ConvUnit(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """What goes down comes up again beside it (arXiv 1505.04597): skips reach over all blocks in between."""

    def __init__(self, width: int = 6, levels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 1)
        self.down = nn.ModuleList(ConvUnit(width, width) for _ in range(levels))
        self.middle = nn.Sequential(ConvUnit(width, width), ConvUnit(width, width))
        self.up = nn.ModuleList(ConvUnit(2 * width, width) for _ in range(levels))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x, skips = self.stem(images), []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return self.head(x)


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=32, num_hidden_layers=DEPTH, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=T,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # masks differ between layouts
    return GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=T, n_embd=D, n_layer=DEPTH, n_head=4, **dropout))


def t5() -> nn.Module:
    config = T5Config(
        vocab_size=V, d_model=D, d_kv=4, d_ff=32, num_layers=DEPTH // 2, num_decoder_layers=DEPTH // 2, num_heads=4,
        dropout_rate=0.0, relative_attention_num_buckets=8, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=V, hidden_size=D, num_hidden_layers=DEPTH, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=T, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def _segments(g: torch.Generator, size: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(size, 3, zoo.IMAGE, zoo.IMAGE, generator=g), torch.randint(
        2, (size, zoo.IMAGE, zoo.IMAGE), generator=g
    )


def _padded(g: torch.Generator, size: int) -> Batch:
    """Rows of different lengths, behind which attention may not look."""
    ids, lengths = models._ids(g, size), torch.randint(T // 2, T + 1, (size,), generator=g)
    return {"input_ids": ids, "attention_mask": (torch.arange(T) < lengths[:, None]).long(), "labels": ids}


CASES = {
    "GPT tied": Case(lambda: models.GPT(depth=DEPTH), zoo._tokens, models.token_mean),
    "GPT untied": Case(UntiedGPT, zoo._tokens, models.token_mean),
    "GPT, its own loss": Case(lambda: models.GPT(depth=DEPTH), zoo._tokens),
    "GPT, (sum, count) loss": Case(lambda: models.GPT(depth=DEPTH), models._ragged, models.token_sum),
    "GPT, first half frozen": Case(half_frozen, zoo._tokens, models.token_mean),
    "MLP": Case(MLP, models._regression, F.mse_loss),
    "conv + BatchNorm, one Sequential": Case(plain_conv, zoo._small_images, F.cross_entropy),
    "conv + BatchNorm, residual": Case(ResNet, zoo._small_images, F.cross_entropy),
    "encoder-decoder": Case(lambda: zoo.EncoderDecoder(depth=DEPTH // 2), zoo._pairs, models.token_mean),
    "ViT": Case(lambda: zoo.ViT(depth=DEPTH), zoo._small_images, F.cross_entropy),
    "U-Net": Case(UNet, _segments, F.cross_entropy),
    "HF Llama": Case(llama, models._labelled),
    "HF GPT-2": Case(gpt2, models._labelled),
    "HF T5": Case(t5, zoo._translated),
    "HF BERT": Case(bert, _padded),
}
"""The rows of the table."""

DROPOUT = dataclasses.replace(CASES["GPT untied"], make=DropGPT)
"""One device draws other masks."""
