"""Every plan gives one device's numbers, for every model, loss and option."""

import models
import pytest
import torch
from parity import BF16, SAME_BF16, Run, Tolerance, check
from ranks import run_ranks

# on more ranks they are much alike, and the parity matrix has them
ON_FOUR = ("zero=0", "zero=2", "zero=3", "zero=2,dp_replicate=2", "zero=0,dp_replicate=2")
LAYOUTS = [
    *((spec, 2) for spec in ("zero=0", "zero=2", "zero=3")),
    ("zero=0", 1),
    *(pytest.param(spec, 1, marks=pytest.mark.slow) for spec in ("zero=2", "zero=3")),
    ("zero=3,dp_replicate=2", 4),
    *(pytest.param(spec, 4, marks=pytest.mark.slow) for spec in ON_FOUR),
]


@pytest.mark.parametrize(("spec", "ranks"), LAYOUTS)
def test_equals_one_device(spec: str, ranks: int) -> None:
    def on_rank() -> None:
        for model in models.CASES:
            check(model, spec, Run())

    run_ranks(on_rank, ranks)


@pytest.mark.parametrize(("spec", "ranks"), LAYOUTS)
def test_accumulating_and_clipping_equal_one_device(spec: str, ranks: int) -> None:
    def on_rank() -> None:
        for model in models.CASES:
            check(model, spec, Run(accumulate=3, grad_clip=0.05, steps=2))

    run_ranks(on_rank, ranks)


@pytest.mark.parametrize(
    ("spec", "ranks"), [("zero=0", 1), ("zero=0", 2), ("zero=2", 2), ("zero=3", 2), ("zero=3,dp_replicate=2", 4)]
)
def test_bf16_stays_near_fp32(spec: str, ranks: int) -> None:
    def on_rank() -> None:
        for model in models.CASES:
            check(model, f"{spec},precision=bf16", Run(steps=2, grad_clip=1.0), BF16)

    run_ranks(on_rank, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_replicated_bf16_is_one_device_under_autocast(ranks: int) -> None:
    def on_rank() -> None:
        for model in models.CASES:
            # one rounding more or less flips a ReLU; batch normalisation spreads that over the batch
            steps = 1 if model == "conv" else 2
            check(model, "zero=0,precision=bf16", Run(steps=steps, grad_clip=1.0, autocast=torch.bfloat16), SAME_BF16)

    run_ranks(on_rank, ranks)


@pytest.mark.parametrize("spec", ["zero=0", "zero=3"])
def test_uneven_shares_are_weighted_by_samples(spec: str) -> None:
    def on_rank() -> None:
        for model in ("mlp", "conv", "gpt_ragged", "llama"):
            check(model, spec, Run(sizes=(4, 3, 3, 2)))
            check(model, spec, Run(sizes=(6, 2, 2, 2), accumulate=2, grad_clip=0.1))

    run_ranks(on_rank, 4)


@pytest.mark.parametrize("spec", ["zero=0", "zero=2", "zero=3"])
def test_adam_equals_one_device(spec: str) -> None:
    def on_rank() -> None:
        run = Run(steps=5, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
        # Adam divides by the gradient's own size: rounding of small gradients shows in full
        check("mlp", spec, run, Tolerance(atol=5e-5, rtol=2e-5))

    run_ranks(on_rank, 2)


def test_one_device_needs_no_process_group() -> None:
    def on_rank() -> None:
        for model in models.CASES:
            for spec in ("zero=0", "zero=3"):
                check(model, spec, Run(steps=2, accumulate=2, grad_clip=0.1))

    run_ranks(on_rank, 1, group=False)
