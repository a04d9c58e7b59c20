"""A training script without nbtrain, as one writes it for torchrun: DDP, FSDP2, tensor parallelism or both; AdamW.

For tensor parallelism the model is written anew with separate projections and sizes left open, as torch's styles need
it: the same number of parameters and of operations. ``torchrun --nproc-per-node 2 plain_script.py ddp ADDRESS``: it
trains as many steps as the socket at ADDRESS asks for, and answers with the seconds a step.
"""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Client
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, make_batch, token_mean
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


class SplitBlock(nn.Module):
    """`gpt.Block` for torch's styles."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.size = width // num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.ModuleDict({name: nn.Linear(width, width) for name in ("q", "k", "v", "out")})
        self.attend = Attend(self.attention, self.size)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attend(self.norm1(x_BTD))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class Attend(nn.Module):
    def __init__(self, layers: nn.ModuleDict, size: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = layers["q"], layers["k"], layers["v"], layers["out"]
        self.size = size

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, _ = x_BTD.shape
        q, k, v = (layer(x_BTD).view(B, T, -1, self.size).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1))


def split_gpt() -> GPT:
    model = GPT()
    width, num_heads = model.tokens.embedding_dim, model.blocks[0].num_heads
    model.blocks = nn.ModuleList(SplitBlock(width, num_heads) for _ in model.blocks)
    return model


def cut(model: GPT, mesh: DeviceMesh) -> None:
    """Megatron's cut, by torch's styles; one all-reduce for the three projections."""
    whole = {"input_layouts": (Replicate(),), "desired_input_layouts": (Replicate(),)}
    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for index in range(len(model.blocks)):
        block = f"blocks.{index}"
        plan |= {f"{block}.attend": PrepareModuleInput(**whole), f"{block}.attend.out": RowwiseParallel()}
        plan |= {f"{block}.attend.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"{block}.mlp.0": ColwiseParallel(), f"{block}.mlp.2": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


def lay_out(kind: str) -> tuple[nn.Module, int]:
    """The model, and this rank's data-parallel coordinate."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if kind == "ddp":
        return DistributedDataParallel(GPT(), gradient_as_bucket_view=True), rank
    if kind == "fsdp":
        return _sharded(GPT(), init_device_mesh("cpu", (size,))), rank
    tp = 2
    mesh = init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("dp", "tp"))
    model = split_gpt()
    cut(model, mesh["tp"])
    return (_sharded(model, mesh["dp"]) if kind == "tp_fsdp" else model), mesh.get_local_rank("dp")


def _sharded(model: GPT, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(kind: str, address: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, coordinate = lay_out(kind)
    mixed = kind.startswith("tp")  # DTensors on one mesh beside those on another: torch's fused step refuses them
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=not mixed)
    inputs, targets = make_batch(coordinate)
    with Client(address, "AF_UNIX") as link:
        while num_steps := link.recv():
            began = time.perf_counter()
            for _ in range(num_steps):
                optimizer.zero_grad()
                token_mean(model(inputs), targets).backward()
                optimizer.step()
            link.send((time.perf_counter() - began) / num_steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
