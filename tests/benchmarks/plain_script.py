"""A training script without nbtrain, as one writes it for torchrun: DDP or FSDP2, AdamW.

``torchrun --nproc-per-node 2 plain_script.py ddp ADDRESS``: it trains as many steps as the socket at ADDRESS asks
for, and answers with the seconds a step.
"""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Client

import torch
import torch.distributed as dist
from gpt import GPT, make_batch, token_mean
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def lay_out(model: GPT, kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def main(kind: str, address: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = lay_out(GPT(), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    inputs, targets = make_batch(dist.get_rank())
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
