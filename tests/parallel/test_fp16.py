"""fp16 under a loss scale: one device's numbers, and the steps that ``torch.amp.GradScaler`` skips."""

import contextlib
import random
from typing import Any

import models
import parity
import pytest
import torch
import torch.nn.functional as F
from parity import FP16, Run, Tolerance, check, rank, whole, world_size
from ranks import run_ranks
from torch import nn

import nbtrain as nt
from nbtrain.errors import GradientError, ModelError, SessionError
from nbtrain.parallel.scaler import Scaling

LAYOUTS = [("zero=0", 1), ("zero=0", 2), ("zero=2", 2), ("zero=3,dp_replicate=2", 4)]
# The same fp16 operations on both sides; factors that are no powers of 2 are applied before or after them, which is
# another rounding of 2^-12 here and there.
SAME_FP16 = Tolerance(atol=1e-4, rtol=2e-3)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


@pytest.mark.parametrize(("spec", "ranks"), LAYOUTS)
def test_stays_near_fp32(spec: str, ranks: int) -> None:
    def on_rank() -> None:
        for model in ("gpt_ragged", "llama") if ranks < 4 else ("gpt_ragged",):
            run = Run(steps=2, accumulate=2, grad_clip=1.0, loss_scale=2.0**10)
            check(model, f"{spec},precision=fp16", run, FP16)

    run_ranks(on_rank, ranks)


class Scaled(nn.Module):
    """A loss that is ``factor`` times too large, as a mean over samples."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) * self.factor


class Plain:
    """One device, as torch's documentation tells to do it."""

    def __init__(self, net: nn.Module, loss_fn: nn.Module, clip: float | None) -> None:
        self.net, self.loss_fn, self.clip = net, loss_fn, clip
        self.optimizer = sgd(net.parameters())
        self.scaler = torch.amp.GradScaler("cpu")

    def step(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """Whether the weights were left as they were."""
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = self.net(x)
        self.scaler.scale(self.loss_fn(output.float(), y)).backward()
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() < before


@pytest.mark.parametrize(("spec", "ranks"), LAYOUTS)
def test_skips_what_gradscaler_skips(spec: str, ranks: int) -> None:
    def skips(factor: float, clip: float | None) -> int:
        torch.manual_seed(0)
        net, twin = models.MLP(), models.MLP()
        twin.load_state_dict(net.state_dict())
        plain = Plain(twin, Scaled(factor), clip)
        trainer = nt.Trainer(
            net, nt.Plan.parse(f"{spec},precision=fp16"), optimizer=sgd, loss_fn=Scaled(factor), grad_clip=clip
        )
        generator = torch.Generator().manual_seed(1)
        skipped = 0
        for step in range(8):
            x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 3, generator=generator)
            before = trainer.state_dict()
            skipped += plain.step(x, y)
            loss = trainer.step(x.chunk(ranks)[rank()], y.chunk(ranks)[rank()])
            assert loss.isfinite()
            assert (trainer.loss_scale, trainer.num_skipped) == (plain.scaler.get_scale(), skipped), step
            if skipped == step + 1:
                torch.testing.assert_close(trainer.state_dict(), before, rtol=0, atol=0)
        assert trainer.num_steps == 8
        if factor == 1 or clip:  # a loss of 1e6 without clipping goes anywhere
            parity._compare_states(twin.state_dict(), trainer.state_dict(), SAME_FP16)
        return skipped

    def on_rank() -> None:
        assert skips(1.0, None) == 0
        assert skips(1e6, None) >= 5
        assert skips(1e6, 0.5) >= 5

    run_ranks(on_rank, ranks)


@pytest.mark.parametrize("spec", ["zero=0", "zero=3"])
def test_an_overflow_on_one_rank_is_skipped_by_all(spec: str) -> None:
    def on_rank() -> None:
        def loss_fn(output: torch.Tensor, target: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            return (F.mse_loss(output, target, reduction="none") * factor).mean()

        trainer = nt.Trainer(
            models.MLP(),
            nt.Plan.parse(f"{spec},precision=fp16"),
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
            loss_fn=loss_fn,
            accumulate=2,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        )
        x, y, one = torch.randn(4, 8), torch.randn(4, 3), torch.ones(4, 1)
        trainer.step(x, y, one)
        before = trainer.state_dict()
        huge = torch.full((4, 1), 1e9 if rank() == 1 else 1.0)
        loss = trainer.step(x, y, huge)
        assert loss > 1e7  # it is reported as it is
        assert (trainer.loss_scale, trainer.num_skipped, trainer.num_steps) == (2.0**15, 1, 2)
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(5e-3)
        torch.testing.assert_close(trainer.state_dict(), before, rtol=0, atol=0)
        trainer.step(x, y, one)
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(2.5e-3)
        assert any(not torch.equal(before[name], value) for name, value in trainer.state_dict().items())

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("spec", ["zero=0", "zero=3"])
def test_gradients_that_are_looked_at_and_their_norm_are_not_scaled(spec: str) -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        net, twin = models.MLP(), models.MLP()
        twin.load_state_dict(net.state_dict())
        plan = nt.Plan.parse(f"{spec},precision=fp16")
        trainer = nt.Trainer(net, plan, optimizer=sgd, loss_fn=F.mse_loss, grad_clip=100.0)
        x, y = torch.randn(8, 8), torch.randn(8, 3)
        trainer.step(x, y)
        F.mse_loss(twin(x), y).backward()
        for got, expected in zip(trainer.model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(whole(got.grad), expected.grad, rtol=2e-2, atol=1e-3)
        norm = nn.utils.get_total_norm([parameter.grad for parameter in twin.parameters()])
        assert trainer.grad_norm == pytest.approx(norm.item(), rel=1e-2)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize(("spec", "ranks"), [("zero=0", 1), ("zero=0", 2), ("zero=3", 2)])
def test_a_first_step_whose_weight_nobody_knows_is_not_skipped(spec: str, ranks: int) -> None:
    """Gradients are divided by the weight of the step before; without one they are those of the sum."""

    def on_rank() -> None:
        net = models.ConvNet()
        trainer = nt.Trainer(
            net,
            nt.Plan.parse(f"{spec},precision=fp16"),
            optimizer=sgd,
            # a mean of 0.01 over 400,000 "tokens"
            loss_fn=lambda output, target: (F.cross_entropy(output, target, reduction="sum") * 1e3, 1e5 * len(target)),
        )
        forwards: list[int] = []
        net.blocks[0].register_forward_hook(lambda *_: forwards.append(0))
        for expected in (2, 3):
            trainer.step(torch.randn(4, 3, 8, 8), torch.arange(4))
            assert (len(forwards), trainer.num_skipped, trainer.loss_scale) == (expected, 0, 2.0**16)
        assert trainer.state_dict()["stem.1.num_batches_tracked"] == 2

    run_ranks(on_rank, ranks)


def test_the_scale_is_gradscalers() -> None:
    """Any sequence of good and bad steps, and the growth after 2000 good ones."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer, scaler, scaling = sgd([weight]), torch.amp.GradScaler("cpu"), Scaling()
    dice = random.Random(0)
    bad = [dice.random() < 0.1 for _ in range(50)] + [False] * 4100 + [True] * 2
    for overflowed in bad:
        scaler.scale(weight.sum())  # makes its state
        weight.grad = torch.full((1,), float("inf") if overflowed else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scaling = scaling.after(overflowed)
        assert scaling.scale == scaler.get_scale()
    assert scaling.num_skipped == sum(bad)


def test_what_no_scale_helps_is_an_error_in_the_end() -> None:
    trainer = nt.Trainer(models.MLP(), nt.Plan(precision="fp16"), optimizer=sgd, loss_fn=F.mse_loss)
    x, y = torch.full((2, 8), float("nan")), torch.zeros(2, 3)
    before = trainer.state_dict()
    for _ in range(40):
        trainer.step(x, y)
    with pytest.raises(GradientError, match="gradients are not finite though the loss is scaled by 5"):
        trainer.step(x, y)
    assert trainer.num_steps == trainer.num_skipped == 40
    torch.testing.assert_close(trainer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("spec", ["zero=0", "zero=3"])
def test_a_rank_that_was_cut_off_skips_what_the_others_skipped(spec: str) -> None:
    """As when groups are formed again: one rank has ended the step, the other has its gradients only."""

    def on_rank() -> tuple[Any, ...]:
        def interrupt(settled: Any) -> None:
            raise KeyboardInterrupt

        plan = nt.Plan.parse(f"{spec},precision=fp16")
        trainer = nt.Trainer(models.MLP(), plan, optimizer=sgd, loss_fn=Scaled(1e9))
        stepper, before = trainer._stepper, trainer.state_dict()
        if rank() == 1:
            vars(stepper)["_finish"] = interrupt
        with pytest.raises(KeyboardInterrupt) if rank() == 1 else contextlib.nullcontext():
            trainer.step(torch.randn(2, 8), torch.randn(2, 3))
        vars(stepper).pop("_finish", None)
        standings: list[Any] = [None] * world_size()
        torch.distributed.all_gather_object(standings, stepper.standing())
        stepper.agree(standings)
        torch.testing.assert_close(trainer.state_dict(), before, rtol=0, atol=0)
        return trainer.num_steps, trainer.num_skipped, trainer.loss_scale

    assert run_ranks(on_rank, 2) == [(1, 1, 2.0**15)] * 2


def test_ranks_whose_scales_differ_never_mix_their_gradients() -> None:
    def on_rank() -> None:
        trainer = nt.Trainer(models.MLP(), nt.Plan(precision="fp16"), optimizer=sgd, loss_fn=F.mse_loss)
        batch = torch.randn(2, 8), torch.randn(2, 3)
        trainer._stepper.scaling = Scaling(2.0 ** (10 + rank()))
        with pytest.raises(SessionError, match=r"call trainer\.step again"):
            trainer.step(*batch)
        trainer.step(*batch)
        assert trainer.loss_scale == 2.0**16

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("spec", ["zero=0", "zero=3"])
def test_blocks_hand_on_16_bits_and_the_model_gives_32(spec: str) -> None:
    """Of FACTS 17: cast to fp32 behind every block, the next one's memory and traffic would double."""

    def on_rank() -> None:
        net = nt.parallelize(models.Tied(), nt.Plan.parse(f"{spec},precision=fp16"))
        seen: list[torch.dtype] = []
        net.blocks[1].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        output = net(torch.zeros(2, 4, dtype=torch.long))
        assert (seen, output.dtype) == ([torch.float16], torch.float32)
        output.sum().backward()
        assert {parameter.grad.dtype for parameter in net.parameters()} == {torch.float32}

    run_ranks(on_rank, 2)


def test_half_weights_are_refused() -> None:
    with pytest.raises(ModelError, match=r"keeps fp32 weights.*type model\.float\(\)"):
        nt.parallelize(models.MLP().half(), nt.Plan(precision="fp16"))


def test_other_precisions_have_no_scale() -> None:
    trainer = nt.Trainer(models.MLP(), nt.Plan(precision="bf16"), optimizer=sgd, loss_fn=F.mse_loss)
    assert (trainer.loss_scale, trainer.num_skipped) == (None, 0)
