"""Every plan gives one device's numbers, for every model, loss and option."""

import models
import pytest
from parity import BF16, FP32, Run, check
from ranks import run_ranks

import nbtrain as nt

LAYOUTS = [
    *((spec, ranks) for spec in ("zero=0", "zero=2", "zero=3") for ranks in (1, 2, 4)),
    ("zero=3,dp_replicate=2", 4),
    ("zero=2,dp_replicate=2", 4),
    ("zero=0,dp_replicate=2", 4),
]


@pytest.mark.parametrize("model", models.CASES)
@pytest.mark.parametrize(("spec", "ranks"), LAYOUTS)
def test_equals_one_device(model: str, spec: str, ranks: int) -> None:
    def on_rank() -> None:
        case, plan = models.CASES[model], nt.Plan.parse(spec)
        check(case, plan, Run())
        check(case, plan, Run(accumulate=3, grad_clip=0.05, steps=2))

    run_ranks(on_rank, ranks)


@pytest.mark.parametrize("model", ["mlp", "conv", "gpt", "gpt_own_loss", "gpt2", "llama"])
@pytest.mark.parametrize(("spec", "ranks"), [("zero=0", 1), ("zero=0", 2), ("zero=2", 2), ("zero=3", 4)])
def test_bf16_stays_near_fp32(model: str, spec: str, ranks: int) -> None:
    def on_rank() -> None:
        check(models.CASES[model], nt.Plan.parse(f"{spec},precision=bf16"), Run(steps=2, grad_clip=1.0), BF16)

    run_ranks(on_rank, ranks)


@pytest.mark.parametrize("spec", ["zero=0", "zero=3"])
def test_uneven_shares_are_weighted_by_samples(spec: str) -> None:
    def on_rank() -> None:
        plan = nt.Plan.parse(spec)
        for model in ("mlp", "conv", "gpt_ragged", "llama"):
            check(models.CASES[model], plan, Run(sizes=(4, 3, 3, 2)))
            check(models.CASES[model], plan, Run(sizes=(6, 2, 2, 2), accumulate=2, grad_clip=0.1))

    run_ranks(on_rank, 4)


@pytest.mark.parametrize("spec", ["zero=0", "zero=2", "zero=3"])
def test_adam_equals_one_device(spec: str) -> None:
    import torch

    def on_rank() -> None:
        run = Run(steps=5, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
        # Adam divides by the gradient's own size: rounding of small gradients shows in full
        check(models.CASES["mlp"], nt.Plan.parse(spec), run, type(FP32)(atol=2e-5, rtol=2e-5))

    run_ranks(on_rank, 2)


def test_one_device_needs_no_process_group() -> None:
    def on_rank() -> None:
        for model in models.CASES:
            for spec in ("zero=0", "zero=3"):
                check(models.CASES[model], nt.Plan.parse(spec), Run(steps=2, accumulate=2, grad_clip=0.1))

    run_ranks(on_rank, 1, group=False)
