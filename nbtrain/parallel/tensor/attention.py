"""``nn.MultiheadAttention`` cut by heads.

Shapes: N samples, L queries, S keys, E features, H heads of which this rank has h = H/t, d = E/H features a head.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nbtrain.errors import ModelError
from nbtrain.parallel.tensor.collectives import join_sequence, leave
from nbtrain.parallel.tensor.cuts import Cut
from nbtrain.parallel.tensor.linear import Entrance, entered, finished
from nbtrain.parallel.tensor.peers import TensorGrouped
from nbtrain.parallel.tensor.random import sharded
from nbtrain.parallel.tensor.swap import swap_class


def attention_cuts(module: nn.MultiheadAttention) -> dict[str, Cut]:
    """How each parameter is cut by heads, by name within the module; what isn't named stays whole."""
    width = module.embed_dim
    fused, one = (width, width, width), (width,)
    cuts = {name: Cut(0, one) for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")}
    cuts |= {"in_proj_weight": Cut(0, fused), "in_proj_bias": Cut(0, fused)}
    held = {name: cut for name, cut in cuts.items() if getattr(module, name) is not None}
    return held | {"out_proj.weight": Cut(1, one)}


def check_attention(name: str, module: nn.MultiheadAttention, degree: int) -> None:
    """Refuses what cannot be cut by heads.

    Raises:
        ModelError: ``degree`` does not divide the heads, or there are keys that no head projects.
    """
    if module.num_heads % degree:
        raise ModelError(
            f"tp={degree} does not divide num_heads={module.num_heads} of '{name}'; choose tp from "
            f"{', '.join(str(d) for d in range(1, module.num_heads + 1) if module.num_heads % d == 0)}"
        )
    if module.bias_k is not None or module.add_zero_attn:
        option = "add_zero_attn" if module.bias_k is None else "add_bias_kv"
        raise ModelError(
            f"'{name}' has {option}=True, which tensor parallelism does not cut; build it with {option}=False, or keep "
            f"it whole with tp_plan={{..., '{name}': 'replicate'}}"
        )


class HeadsAttention(TensorGrouped):
    """The same numbers as ``nn.MultiheadAttention``, in training and in eval; each rank computes its heads.

    Attributes:
        entrance: How queries, keys and values come in.
        scatters: The output is cut along dim 1, as the inputs are then.
    """

    entrance: Entrance = "sum"
    scatters: bool = False
    embed_dim: int
    num_heads: int
    head_dim: int
    batch_first: bool
    dropout: float
    training: bool
    in_proj_weight: torch.Tensor | None
    in_proj_bias: torch.Tensor | None
    q_proj_weight: torch.Tensor
    k_proj_weight: torch.Tensor
    v_proj_weight: torch.Tensor
    out_proj: nn.Linear

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As of ``nn.MultiheadAttention``."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal says what attn_mask is; give attn_mask too")
        batched, first = query.dim() == 3, self.batch_first or query.dim() == 2
        q_NhLd, k_NhSd, v_NhSd = (self._heads(x, batched, first) for x in self._projected(query, key, value))
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q_NhLd, batched)
        dropout = self.dropout if self.training else 0.0
        with sharded(self.peers) if dropout else nullcontext():
            if need_weights:
                weights_NhLS = F.dropout(_weights(q_NhLd, k_NhSd, mask), dropout)
                out_NhLd = weights_NhLS @ v_NhSd
            else:
                out_NhLd = F.scaled_dot_product_attention(q_NhLd, k_NhSd, v_NhSd, mask, dropout, is_causal=causal)
        out = self._back(out_NhLd, batched, first)
        output = finished(F.linear(out, self.out_proj.weight), self.out_proj.bias, self.scatters, self.peers)
        if not need_weights:
            return output, None
        weights = self._all_heads(weights_NhLS, average_attn_weights)
        return output, weights if batched else weights[0]

    def _projected(self, query: Any, key: Any, value: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of this rank's heads; what is the same tensor comes in once."""
        once = {id(x): entered(x, self.entrance, self.peers) for x in (query, key, value)}
        q, k, v = (once[id(x)] for x in (query, key, value))
        if query is key is value and self.in_proj_weight is not None:
            fused: Any = F.linear(q, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            return fused  # type: ignore[no-any-return]
        if self.in_proj_weight is not None:
            weights: Any = self.in_proj_weight.chunk(3)
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(F.linear(x, w, b) for x, w, b in zip((q, k, v), weights, biases, strict=True))  # type: ignore[return-value]

    def _heads(self, x: torch.Tensor, batched: bool, first: bool) -> torch.Tensor:
        """(N, h, L, d) of (N, L, hd), (L, N, hd) or (L, hd)."""
        x = x if batched else x.unsqueeze(0)
        x = x if first else x.transpose(0, 1)
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # type: ignore[no-untyped-call,no-any-return]

    def _back(self, x_NhLd: torch.Tensor, batched: bool, first: bool) -> torch.Tensor:
        x = x_NhLd.transpose(1, 2).flatten(2)
        x = x if first else x.transpose(0, 1)
        return x if batched else x.squeeze(0)

    def _mask(
        self, attention: torch.Tensor | None, padding: torch.Tensor | None, q_NhLd: torch.Tensor, batched: bool
    ) -> torch.Tensor | None:
        """What is added to the scores, broadcast to (N, h, L, S)."""
        N, h = q_NhLd.shape[:2]
        total = None
        if attention is not None:
            total = _added(attention, q_NhLd.dtype)
            if total.dim() == 3:
                total = total.unflatten(0, (N, self.num_heads)).narrow(1, self.peers.rank * h, h)  # type: ignore[no-untyped-call]
        if padding is not None:
            padding = _added(padding if batched else padding.unsqueeze(0), q_NhLd.dtype)[:, None, None]
            total = padding if total is None else total + padding
        return total

    def _all_heads(self, weights_NhLS: torch.Tensor, average: bool) -> torch.Tensor:
        """(N, L, S), or (N, H, L, S)."""
        if average:
            return leave(weights_NhLS.sum(1), self.peers) / self.num_heads
        return join_sequence(weights_NhLS, self.peers)


def cut_attention(module: nn.MultiheadAttention) -> None:
    """Swaps the class of an attention whose weights are parts already; ``num_heads`` stays the whole number."""
    swap_class(module, HeadsAttention)


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask whose True means "not this one", as what is added to scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _weights(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    return (scores if mask is None else scores + mask).softmax(-1)
