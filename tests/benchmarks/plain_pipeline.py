"""Pipelines without nbtrain, as one writes them by hand for the benchmark's GPT, on torch's stages and schedules.

The model is cut into parts of its own, each with a forward of its own; with tensor parallelism it is written anew, as
`plain_script` does. Every function runs on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, token_mean
from plain_script import SplitBlock
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

Step = Callable[[], torch.Tensor | None]
"""One training step; the mean loss on the ranks that have the last stage, else None."""


class Part(nn.Module):
    """Blocks ``first`` to ``end``, behind the embedding where ``first`` is 0, and before the head at the other end."""

    def __init__(self, model: GPT, first: int, end: int) -> None:
        super().__init__()
        if first == 0:
            self.tokens, self.positions = model.tokens, model.positions
        self.blocks = nn.ModuleList(model.blocks[first:end])
        if end == len(model.blocks):
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "tokens"):
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def one_f_one_b(inputs: torch.Tensor, targets: torch.Tensor, num_microbatches: int) -> Step:
    """One stage a rank, all ranks in a row."""
    num_stages, index = dist.get_world_size(), dist.get_rank()
    stage = PipelineStage(_part(GPT(), index, num_stages), index, num_stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=token_mean)
    return _step(schedule, [stage], inputs, targets, fused=True)


def interleaved(inputs: torch.Tensor, targets: torch.Tensor, num_microbatches: int) -> Step:
    """Two stages a rank."""
    num_ranks, index, model = dist.get_world_size(), dist.get_rank(), GPT()
    stages = [
        PipelineStage(_part(model, number, 2 * num_ranks), number, 2 * num_ranks, torch.device("cpu"))
        for number in (index, index + num_ranks)
    ]
    schedule = ScheduleInterleaved1F1B(stages, num_microbatches, loss_fn=token_mean)
    return _step(schedule, stages, inputs, targets, fused=True)


def three_dimensions(inputs: torch.Tensor, targets: torch.Tensor, num_microbatches: int, *, reshard: bool) -> Step:
    """1F1B over two stages, FSDP2 over two shards, tensor parallelism over two ranks.

    Args:
        reshard: Whether parameters are let go after each forward, to be gathered again for each backward.
    """
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    index, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    part = _part(_separated(GPT()), index, 2)
    _cut(part, mesh["tp"])
    for block in part.blocks:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=reshard)
    fully_shard(part, mesh=mesh["dp"], reshard_after_forward=reshard)
    stage = PipelineStage(part, index, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=token_mean)
    # torch's fused step refuses DTensors on one mesh beside those on another
    return _step(schedule, [stage], inputs, targets, fused=False)


def _part(model: GPT, index: int, num_stages: int) -> Part:
    size = len(model.blocks) // num_stages
    return Part(model, index * size, (index + 1) * size)


def _step(
    schedule: Any, stages: list[PipelineStage], inputs: torch.Tensor, targets: torch.Tensor, *, fused: bool
) -> Step:
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, fused=fused)
    begins, ends = stages[0].is_first, stages[-1].is_last

    def step() -> torch.Tensor | None:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        given: dict[str, Any] = {"target": targets, "losses": losses} if ends else {}
        schedule.step(*[inputs] * begins, **given, return_outputs=False)
        optimizer.step()
        return torch.stack(losses).mean() if ends else None

    return step


def _separated(model: GPT) -> GPT:
    """The same weights with separate projections."""
    width = model.tokens.embedding_dim
    blocks = [SplitBlock(width, block.num_heads) for block in model.blocks]
    for new, old in zip(blocks, model.blocks, strict=True):
        for name in ("norm1", "norm2", "mlp"):
            setattr(new, name, getattr(old, name))
        weights, biases = old.qkv.weight.chunk(3), old.qkv.bias.chunk(3)
        with torch.no_grad():
            for name, weight, bias in zip("qkv", weights, biases, strict=True):
                new.attention[name].weight.copy_(weight)
                new.attention[name].bias.copy_(bias)
            new.attention["out"].load_state_dict(old.out.state_dict())
    model.blocks = nn.ModuleList(blocks)
    return model


def _cut(part: Part, mesh: DeviceMesh) -> None:
    """Megatron's cut, by torch's styles; one all-reduce for the three projections."""
    whole = {"input_layouts": (Replicate(),), "desired_input_layouts": (Replicate(),)}
    plan: dict[str, Any] = {}
    if hasattr(part, "tokens"):
        plan["tokens"] = RowwiseParallel(input_layouts=Replicate())
    if hasattr(part, "head"):
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    for index in range(len(part.blocks)):
        block = f"blocks.{index}"
        plan |= {f"{block}.attend": PrepareModuleInput(**whole), f"{block}.attend.out": RowwiseParallel()}
        plan |= {f"{block}.attend.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"{block}.mlp.0": ColwiseParallel(), f"{block}.mlp.2": RowwiseParallel()}
    parallelize_module(part, mesh, plan)
