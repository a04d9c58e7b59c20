"""Models for the recognition of tensor parallelism, as people write them. All take ids or floats of width D.

Shapes: B samples, T tokens, D features, n heads of h features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, D, N = 64, 32, 4
H = D // N


class Fused(nn.Module):
    """nanoGPT's attention; subclasses bring the query, keys and values into shape in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = N, D
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.heads(self.c_attn(x), B, T, C)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))

    def heads(self, qkv: Tensor, B: int, T: int, C: int) -> Any:
        q, k, v = qkv.split(self.n_embd, dim=2)
        return (each.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for each in (q, k, v))


class Permuted(Fused):
    def heads(self, qkv: Tensor, B: int, T: int, C: int) -> Any:
        return qkv.view(B, T, 3, self.n_head, H).permute(2, 0, 3, 1, 4)


class HeadMajor(Fused):
    def heads(self, qkv: Tensor, B: int, T: int, C: int) -> Any:
        return qkv.view(B, T, self.n_head, 3 * H).transpose(1, 2).chunk(3, -1)


class MinusOne(Fused):
    def heads(self, qkv: Tensor, B: int, T: int, C: int) -> Any:
        return (each.reshape(B, -1, self.n_head, H).transpose(1, 2) for each in qkv.chunk(3, dim=-1))


class Sliced(Fused):
    def heads(self, qkv: Tensor, B: int, T: int, C: int) -> Any:
        parts = qkv[..., :D], qkv[..., D : 2 * D], qkv[..., 2 * D :]
        return (each.unflatten(-1, (self.n_head, H)).movedim(2, 1) for each in parts)


class Separate(nn.Module):
    """With norms of each head's queries and keys, written out softmax, and dropout of the scores."""

    def __init__(self, kv_heads: int = N, norms: bool = True) -> None:
        super().__init__()
        self.num_heads, self.kv_heads = N, kv_heads
        self.q, self.o = nn.Linear(D, D, bias=False), nn.Linear(D, D)
        self.k, self.v = nn.Linear(D, kv_heads * H, bias=False), nn.Linear(D, kv_heads * H, bias=False)
        self.q_norm, self.k_norm = (nn.LayerNorm(H), nn.RMSNorm(H)) if norms else (nn.Identity(), nn.Identity())
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.q_norm(self.q(x).view(B, T, self.num_heads, H)).transpose(1, 2)
        k = self.k_norm(self.k(x).view(B, T, self.kv_heads, H)).transpose(1, 2)
        v = self.v(x).view(B, T, self.kv_heads, H).transpose(1, 2)
        k, v = self.repeat(k), self.repeat(v)
        scores = self.bias(torch.matmul(q, k.transpose(-2, -1)) / H**0.5)
        mask = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
        probabilities = self.drop(scores.masked_fill(mask, float("-inf")).softmax(-1))
        return self.o((probabilities @ v).permute(0, 2, 1, 3).reshape(B, T, self.num_heads * H))

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.num_heads // self.kv_heads, dim=1)

    def bias(self, scores: Tensor) -> Tensor:
        return scores


class Expanded(Separate):
    """Grouped queries by expand, as Hugging Face writes them."""

    def repeat(self, x: Tensor) -> Tensor:
        B, _, T, h = x.shape
        times = self.num_heads // self.kv_heads
        return x[:, :, None].expand(B, self.kv_heads, times, T, h).reshape(B, self.num_heads, T, h)


class Repeated(Separate):
    """Query head i uses key head i modulo kv_heads: a rank's heads are not neighbours."""

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.num_heads // self.kv_heads, 1, 1)


class Alibi(Separate):
    """A slope for each head, from a buffer, and a learned temperature of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.arange(1.0, N + 1).view(N, 1, 1))
        self.temperature = nn.Parameter(torch.linspace(0.5, 1.5, N).view(N, 1, 1))

    def bias(self, scores: Tensor) -> Tensor:
        T = scores.shape[-1]
        return scores * self.temperature - self.slopes * torch.arange(T)


class Relative(Separate):
    """T5's bias: an embedding of distances, for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, N)

    def bias(self, scores: Tensor) -> Tensor:
        T = scores.shape[-1]
        distance = (torch.arange(T)[:, None] - torch.arange(T)).clamp(0, 7)
        return scores + self.table(distance).permute(2, 0, 1).unsqueeze(0)


class Einsum(Fused):
    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, H).unbind(2)
        weights = torch.einsum("bqnh,bknh->bnqk", q, k).softmax(dim=-1)
        return self.c_proj(torch.einsum("bnqk,bknh->bqnh", weights, v).reshape(B, T, C))


class Merged(Fused):
    """Heads in the batch, as in fairseq and Bloom."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, H).permute(2, 0, 3, 1, 4).reshape(3, B * self.n_head, T, H)
        mask = torch.zeros(B * self.n_head, 1, T)
        weights = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=H**-0.5).view(B, self.n_head, T, T).softmax(-1)
        y = torch.bmm(weights.view(B * self.n_head, T, T), v).view(B, self.n_head, T, H)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MultiQuery(Fused):
    """One key and value head, in one matrix with the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.kv = nn.Linear(D, D), nn.Linear(D, 2 * H)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q = self.c_attn(x).view(B, T, self.n_head, H).transpose(1, 2)
        k, v = self.kv(x).unsqueeze(1).chunk(2, -1)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.c_proj((weights @ v).transpose(1, 2).reshape(B, T, C))


class Gated(nn.Module):
    def __init__(self, hidden: int = 48) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(D, hidden), nn.Linear(D, hidden), nn.Linear(hidden, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GatedFused(nn.Module):
    def __init__(self, hidden: int = 48) -> None:
        super().__init__()
        self.hidden = hidden
        self.gate_up, self.down = nn.Linear(D, 2 * hidden), nn.Linear(hidden, D)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.split(self.gate_up(x))
        return self.down(F.gelu(gate) * up)

    def split(self, x: Tensor) -> Any:
        return x.chunk(2, dim=-1)


class GatedHalves(GatedFused):
    def split(self, x: Tensor) -> Any:
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]


class Glu(nn.Module):
    """`nn.GLU`, a scale of each hidden feature, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 96), nn.Linear(48, D)
        self.glu, self.scale, self.drop = nn.GLU(), nn.Parameter(torch.linspace(0.5, 2, 48)), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.glu(self.up(x)) * self.scale))


class Escaping(nn.Module):
    """Its hidden features are normalised over."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(D, 48), nn.LayerNorm(48), nn.Linear(48, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu())


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * 2


class LoraGated(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = Lora(self.gate), Lora(self.up), Lora(self.down)  # type: ignore[assignment]


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(D), attention, nn.LayerNorm(D), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PostNorm(nn.Module):
    """Attention and MLP inline, norms behind."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.fc1, self.fc2 = (
            nn.Linear(D, 3 * D),
            nn.Linear(D, D),
            nn.Linear(D, 48),
            nn.Linear(48, D),
        )
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (each.view(B, T, N, H).transpose(1, 2) for each in self.qkv(x).split([D, D, D], -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(y))
        return self.norm2(x + self.fc2(F.relu(self.fc1(x))))


class Language(nn.Module):
    """Two blocks between an embedding and its tied head."""

    def __init__(self, block: Callable[[], nn.Module], tied: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(8, D)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wkv, self.wo = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        (B, T, _), S = x.shape, memory.shape[1]
        q = self.wq(x).view(B, T, N, H).transpose(1, 2)
        k, v = self.wkv(memory).view(B, S, 2, N, H).permute(2, 0, 3, 1, 4).unbind(0)
        return self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, D))


class Translator(nn.Module):
    """Encoder and decoder with cross-attention, over one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.encoder, self.decoder = Block(Fused(), Gated()), Block(Permuted(), GatedFused())
        self.cross, self.norm = Cross(), nn.LayerNorm(D)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.embed(source))
        x = self.decoder(self.embed(target))
        return self.head(x + self.cross(self.norm(x), memory))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, D, 8, 8)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, D)), nn.Parameter(torch.randn(1, 17, D))
        self.blocks = nn.Sequential(Block(Permuted(), Glu()), Block(Sliced(), Gated()))
        self.head = nn.Linear(D, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), 1) + self.pos
        return self.head(self.blocks(x)[:, 0])


def language(attention: Callable[[], nn.Module], mlp: Callable[[], nn.Module] = Gated) -> Callable[[], nn.Module]:
    return lambda: Language(lambda: Block(attention(), mlp()))


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{each.__name__: language(each) for each in (Fused, Permuted, HeadMajor, MinusOne, Sliced, Separate, Merged)},
    **{each.__name__: language(each) for each in (Einsum, Alibi, Relative, MultiQuery)},
    "Repeated": language(lambda: Repeated(2)),
    "GroupedQuery": language(lambda: Separate(2)),
    "Expanded": language(lambda: Expanded(2)),
    "GatedFused": language(Fused, GatedFused),
    "GatedHalves": language(Fused, GatedHalves),
    "Glu": language(Fused, Glu),
    "Lora": language(Fused, LoraGated),
    "PostNorm": lambda: Language(PostNorm, tied=False),
    "Translator": Translator,
    "ViT": ViT,
}
