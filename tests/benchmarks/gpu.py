"""One GPU, one script: a GPT of a billion parameters by a Trainer and by plain torch, in turn, in bf16.

``python tests/benchmarks/gpu.py [--layers 24 --width 1792 --heads 14 --length 1024 --batch 8 --vocab 32000]``: FSDP2
with recomputation and torch.compile on both sides; tokens a second, and the share of the GPU's peak (MFU). Without a
GPU it runs on the CPU, which tries the script and tells nothing: give it a small model.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from gpt import GPT, Block, token_mean
from measure import interleave, ratio
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import nbtrain as nt

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""bf16 without sparsity, by a word in the device's name."""
STEPS = 3  # between two turns


class Recomputed(Block):
    """`Block` with its activations recomputed, as one writes it."""

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x_BTD, use_reentrant=False)  # type: ignore[no-any-return]


def main() -> None:
    options = _options()
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512", "RANK": "0", "WORLD_SIZE": "1"})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    make = functools.partial(GPT, options.width, options.layers, options.heads, options.vocab, options.length)
    ids = torch.randint(options.vocab, (options.batch, options.length + 1), device=device)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    ours, theirs = (
        _ours(make, inputs, targets, options.backend),
        _theirs(make, inputs, targets, options.backend, device),
    )
    interleave(2, ours, theirs)
    mine, plain = interleave(options.rounds, ours, theirs)
    num_parameters = sum(parameter.numel() for parameter in make().parameters())
    tokens = inputs.numel()
    for name, samples in (("nbtrain", mine), ("plain torch", plain)):
        rate = tokens / samples.median
        print(f"{name:<12} {rate:,.0f} tokens/s{_mfu(options, num_parameters, rate, device)}")
    print(f"{num_parameters / 1e9:.2f}e9 parameters; {ratio(plain, mine).text('of the throughput', 3)}, target 0.97")
    dist.destroy_process_group()


def _ours(make: Callable[[], GPT], inputs: torch.Tensor, targets: torch.Tensor, backend: str) -> Callable[[], float]:
    torch.manual_seed(0)
    plan = nt.Plan(zero=3, precision="bf16", recompute="full")
    fused = {"fused": True} if inputs.is_cuda else {}
    trainer = nt.Trainer(
        make(),
        plan,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, **fused),
        loss_fn=token_mean,
        compile=backend,
    )
    return _timed(lambda: trainer.step(inputs, targets), inputs.device)


def _theirs(
    make: Callable[[], GPT], inputs: torch.Tensor, targets: torch.Tensor, backend: str, device: torch.device
) -> Callable[[], float]:
    torch.manual_seed(0)
    model = make().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        block.__class__ = Recomputed
        block.compile(backend=backend)
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    fused = {"fused": True} if inputs.is_cuda else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **fused)

    def step() -> None:
        optimizer.zero_grad()
        token_mean(model(inputs).float(), targets).backward()
        optimizer.step()

    return _timed(step, device)


def _timed(step: Callable[[], object], device: torch.device) -> Callable[[], float]:
    def seconds() -> float:
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / STEPS

    return seconds


def _mfu(options: argparse.Namespace, num_parameters: int, rate: float, device: torch.device) -> str:
    """PaLM's count (arXiv 2204.02311, appendix B): 6 N + 12 L D T a token; recomputation is no useful work."""
    if device.type != "cuda":
        return ""
    name = torch.cuda.get_device_name()
    peak = next((flops for word, flops in PEAK_FLOPS.items() if word in name), None)
    flops = 6 * num_parameters + 12 * options.layers * options.width * options.length
    return f", MFU {rate * flops / peak:.1%} of {name}" if peak else f" on {name}, whose peak is not listed"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sizes = {"layers": 24, "width": 1792, "heads": 14, "length": 1024, "batch": 8, "vocab": 32000, "rounds": 10}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    return parser.parse_args()


if __name__ == "__main__":
    main()
