"""`zero=1`: one device's numbers, with the optimizer's state and work divided among ranks."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from lives import Life, die, run_lives
from parity import BF16, Run, Tolerance, check, rank
from ranks import run_ranks
from torch import nn

import nbtrain as nt
from nbtrain.errors import GradientError, OptimizerError, PlanError, SessionError, UsageError
from nbtrain.parallel.heal import heal
from nbtrain.parallel.optimizer import ELEMENTWISE

LAYOUTS = [("zero=1", 1), ("zero=1", 2), ("zero=1,bucket_mb=0.004", 4), ("zero=1,dp_replicate=2,dp_shard=2", 4)]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


@pytest.mark.parametrize(("spec", "ranks"), LAYOUTS)
def test_equals_one_device(spec: str, ranks: int) -> None:
    def on_rank() -> None:
        for model in models.CASES:
            check(model, spec, Run())

    run_ranks(on_rank, ranks)


@pytest.mark.parametrize(("spec", "ranks"), LAYOUTS[1:])
def test_accumulating_and_clipping_equal_one_device(spec: str, ranks: int) -> None:
    def on_rank() -> None:
        for model in models.CASES:
            check(model, spec, Run(accumulate=3, grad_clip=0.05, steps=2))

    run_ranks(on_rank, ranks)


def some(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params)[1:3], lr=0.1)


def test_parameters_that_the_optimizer_does_not_step_count_in_the_norm() -> None:
    def on_rank() -> None:
        trainer = trainer_of(grad_clip=0.1, optimizer=some)
        torch.manual_seed(0)
        one = models.MLP()
        optimizer = some(one.parameters())
        for step in range(2):
            one.zero_grad()
            x, y = (torch.cat(parts) for parts in zip(batch(step, of=0), batch(step, of=1), strict=True))
            F.mse_loss(one(x), y).backward()
            norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            optimizer.step()
            trainer.step(*batch(step))
            assert trainer.grad_norm == pytest.approx(norm.item(), rel=1e-5)
            trainer.model.gather_gradients()
            expected = {name: parameter.grad for name, parameter in one.named_parameters()}
            found = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
            torch.testing.assert_close(found, expected)
        torch.testing.assert_close(trainer.state_dict(), dict(one.state_dict()))

    run_ranks(on_rank, 2)


def test_a_group_that_is_added_later_trains() -> None:
    def on_rank() -> None:
        trainer, other = trainer_of(optimizer=some), trainer_of("zero=0", optimizer=some)
        for one in (trainer, other):
            one.step(*batch(0))
            first, *_ = one.model.parameters()
            one.optimizer.add_param_group({"params": [first], "lr": 0.2})
            one.step(*batch(1))
        torch.testing.assert_close(trainer.state_dict(), other.state_dict())
        trainer.optimizer.add_param_group({"params": [first for first, *_ in [trainer.model.parameters()]]})
        with pytest.raises(OptimizerError, match="got 1 parameters that the optimizer has already"):
            trainer.step(*batch(2))

    run_ranks(on_rank, 2)


def test_bf16_stays_near_fp32() -> None:
    def on_rank() -> None:
        for model in models.CASES:
            check(model, "zero=1,precision=bf16", Run(steps=2, grad_clip=1.0), BF16)

    run_ranks(on_rank, 2)


def test_uneven_shares_are_weighted_by_samples() -> None:
    def on_rank() -> None:
        for model in ("mlp", "conv", "gpt_ragged", "llama"):
            check(model, "zero=1,bucket_mb=0.01", Run(sizes=(4, 3, 3, 2)))
            check(model, "zero=1,dp_replicate=2,dp_shard=2", Run(sizes=(6, 2, 2, 2), accumulate=2, grad_clip=0.1))

    run_ranks(on_rank, 4)


def test_every_element_wise_optimizer_equals_one_device() -> None:
    def on_rank() -> None:
        for kind in ELEMENTWISE:
            run = Run(steps=3, optimizer=lambda params, kind=kind: kind(params, lr=1e-2))
            # some divide by the gradient's own size: rounding of small gradients shows in full
            check("mlp", "zero=1", run, Tolerance(atol=2e-4, rtol=2e-5))

    run_ranks(on_rank, 3)


class Own(torch.optim.SGD):
    """Takes the mean out of each gradient: no piece has the mean of the whole."""

    per_parameter = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.sub_(parameter.grad.mean())
        super().step()


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width + 1, bias=False) for width in range(8, 11)))
        self.last = nn.Linear(11, 3, bias=False)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.layers(x_BD)))


@pytest.mark.parametrize(
    "make",
    [
        lambda params: Own(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.Adafactor(params, lr=0.1),
        lambda params: torch.optim.Muon(params, lr=0.1),
    ],
    ids=["own", "adafactor", "muon"],
)
def test_an_optimizer_that_needs_whole_parameters_gets_them_dealt_out(make: Any) -> None:
    case = models.Case(Matrices, models.CASES["mlp"].batch, F.mse_loss)

    def on_rank() -> None:
        models.CASES["matrices"] = case
        # Muon's bf16 iterations magnify a last place
        check("matrices", "zero=1", Run(optimizer=make, grad_clip=0.2), Tolerance(atol=2e-3, rtol=2e-5))
        trainer = nt.Trainer(Matrices(), nt.Plan(zero=1), optimizer=make, loss_fn=F.mse_loss)
        whole = {tuple(piece.shape) for _, piece in trainer.model.named_pieces() if piece.numel()}
        assert 0 < len(whole) < 4
        assert whole <= {tuple(parameter.shape) for parameter in trainer.model.parameters()}

    run_ranks(on_rank, 2)


class Coupled(torch.optim.SGD):
    """Divides by the norm over all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None]
        norm = sum(parameter.grad.square().sum() for parameter in held).sqrt()
        for parameter in held:
            parameter.grad.div_(norm)
        super().step()


class Clamped(torch.optim.SGD):
    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-0.01, 0.01)
        super().step()


def test_an_optimizer_of_ones_own_says_what_it_needs() -> None:
    def on_rank() -> None:
        with pytest.raises(OptimizerError, match=r"Coupled may need all of them.*per_parameter = True.*type zero=0"):
            trainer_of(optimizer=lambda params: Coupled(params, lr=0.1))
        for spec in ("zero=0", "zero=3"):
            check("mlp", spec, Run(optimizer=lambda params: Coupled(params, lr=0.1)))
        check("mlp", "zero=1", Run(optimizer=lambda params: Clamped(params, lr=0.1, momentum=0.9)))
        assert not trainer_of(optimizer=lambda params: Clamped(params, lr=0.1)).model.whole

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Rprop])
def test_an_optimizer_that_torch_cannot_run_on_shards_is_refused(kind: Any) -> None:
    def on_rank() -> None:
        for spec in ("zero=2", "zero=3"):
            with pytest.raises(OptimizerError, match=rf"{kind.__name__} cannot step sharded parameters.*type zero=1"):
                trainer_of(spec, optimizer=lambda params: kind(params, lr=0.1))
        check("mlp", "zero=1", Run(optimizer=lambda params: kind(params, lr=0.01)), Tolerance(atol=2e-4, rtol=2e-5))

    run_ranks(on_rank, 2)


def trainer_of(spec: str = "zero=1", make: Any = models.MLP, **options: Any) -> nt.Trainer:
    torch.manual_seed(0)
    return nt.Trainer(make(), nt.Plan.parse(spec), **{"optimizer": adamw, "loss_fn": F.mse_loss, **options})


def batch(step: int, size: int = 4, of: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + (rank() if of is None else of))
    return torch.randn(size, 8, generator=generator), torch.randn(size, 3, generator=generator)


def test_reduction_begins_during_backward_and_always_in_one_order() -> None:
    class Stacked(models.MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # ranks reach the layers' gradients in different order
            early, late = self.layers[0].weight.square().sum(), self.layers[2].weight.square().sum()
            return self.layers(x) + (early + late if rank() else late + early)

    def on_rank() -> list[tuple[int, int]]:
        trainer = trainer_of("zero=1,bucket_mb=0.0001", Stacked)
        model = trainer.model
        assert len(model.bucket_bytes()) == 4
        seen: list[tuple[int, int]] = []
        begin = model._begin

        def noted() -> None:
            begin()
            seen.append((len(model._begun), sum(len(bucket.waiting) for bucket in model._buckets)))

        model._begin = noted
        trainer.step(*batch(0))
        return seen

    for seen in run_ranks(on_rank, 2):
        assert any(begun and waiting for begun, waiting in seen), seen
        assert [begun for begun, _ in seen] == sorted(begun for begun, _ in seen)


def test_an_own_loop_gets_whole_averaged_gradients() -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        model = nt.parallelize(models.MLP(), nt.Plan(zero=1))
        twin = copy.deepcopy(model)
        optimizer, plain = adamw(model.parameters()), adamw(twin.parameters())
        for step in range(3):
            optimizer.zero_grad()
            plain.zero_grad()
            x, y = batch(step)
            F.mse_loss(model(x), y).backward()
            for part in (0, 1):
                generator = torch.Generator().manual_seed(10 * step + part)
                x, y = torch.randn(4, 8, generator=generator), torch.randn(4, 3, generator=generator)
                (F.mse_loss(twin(x), y) / 2).backward()
            for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, other.grad)
            optimizer.step()
            plain.step()
        torch.testing.assert_close(model.state_dict(), dict(twin.state_dict()))

    run_ranks(on_rank, 2)


def test_states_copies_and_evaluation_are_those_of_the_whole_model() -> None:
    def on_rank() -> None:
        trainer, other = trainer_of(), trainer_of("zero=0")
        for step in range(2):
            trainer.step(*batch(step))
            other.step(*batch(step))
        torch.testing.assert_close(trainer.state_dict(), other.state_dict())
        assert trainer.evaluate([batch(9)]) == pytest.approx(other.evaluate([batch(9)]).item())
        twin = copy.deepcopy(trainer.model)
        assert isinstance(twin, models.MLP)
        torch.testing.assert_close(dict(twin.state_dict()), trainer.state_dict())
        doubled = {name: value * 2 for name, value in trainer.state_dict().items()}
        trainer.load_state_dict(doubled)
        other.load_state_dict(doubled)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.data = parameter.data * 0.5  # somebody sets the data: not a view any more
            for parameter in other.model.parameters():
                parameter.mul_(0.5)
        trainer.step(*batch(3))
        other.step(*batch(3))
        torch.testing.assert_close(trainer.state_dict(), other.state_dict())

    run_ranks(on_rank, 2)


def test_a_second_trainer_of_the_same_model_goes_on() -> None:
    def on_rank() -> None:
        trainer, other = trainer_of(), trainer_of("zero=0")
        for one in (trainer, other):
            one.step(*batch(0))
            again = nt.Trainer(one.model, optimizer=one.optimizer, loss_fn=F.mse_loss)
            again.step(*batch(1))
        torch.testing.assert_close(trainer.state_dict(), other.state_dict())

    run_ranks(on_rank, 2)


def test_channels_last_scalars_and_several_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            self.gain = nn.Parameter(torch.ones(()))
            self.shift = nn.Parameter(torch.zeros(4, dtype=torch.float64))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return (self.conv(images) * self.gain).mean((2, 3)) + self.shift.float()

    def on_rank() -> None:
        trainer, other = trainer_of("zero=1", Mixed), trainer_of("zero=0", Mixed)
        assert trainer.model.conv.weight.is_contiguous(memory_format=torch.channels_last)
        generator = torch.Generator().manual_seed(rank())
        for one in (trainer, other):
            one.step(torch.randn(2, 3, 5, 5, generator=generator.manual_seed(rank())), torch.ones(2, 4))
        torch.testing.assert_close(trainer.state_dict(), other.state_dict())

    run_ranks(on_rank, 2)


def after_death(spec: str, world_size: int, make: Any, check: Any, place: str) -> None:
    """``check(trainer or None, report)`` on all ranks, when the last has died in its second step."""
    doomed = world_size - 1

    def live_on(life: Life) -> Any:
        trainer = make(spec)
        trainer.step(*batch(0))
        if life.rank == doomed and place == "gathering":
            trainer.model._all_gather = lambda buffers: die()
        elif life.rank == doomed:
            die()
        with contextlib.suppress(RuntimeError):
            trainer.step(*batch(1))
            trainer.evaluate([batch(2)])  # where no rank waits for the dead one's step
        return go_on(life, {"trainer": trainer, "model": trainer.model})

    def go_on(life: Life, namespace: dict[str, Any]) -> Any:
        life.rejoin(1, (doomed,))
        return check(namespace, heal(namespace, (doomed,)))

    run_lives(live_on, lambda life: go_on(life, {}), world_size, (doomed,))


def test_without_replicas_a_death_costs_the_optimizer_state_and_not_the_weights() -> None:
    def check(namespace: dict[str, Any], report: dict[str, Any]) -> None:
        assert report["healed"] == ["model"]
        assert report["lost"] == {
            "trainer": "its optimizer state was on no other rank (Trainer(..., redundancy=True) keeps a copy); the "
            "model is whole: make the trainer again on all ranks"
        }
        trainer = nt.Trainer(namespace["model"], optimizer=adamw, loss_fn=F.mse_loss)
        trainer.step(*batch(2))
        everyone: list[Any] = [None] * 3
        torch.distributed.all_gather_object(everyone, trainer.state_dict())
        torch.testing.assert_close(everyone[1:], everyone[:1] * 2, rtol=0, atol=0)

    after_death("zero=1", 3, trainer_of, check, "between")


def test_without_replicas_a_death_before_the_weights_are_gathered_costs_them() -> None:
    def check(namespace: dict[str, Any], report: dict[str, Any]) -> None:
        assert report["healed"] == []
        assert "its pieces of the step that was under way were on no other rank" in report["lost"]["model"]
        with pytest.raises(SessionError, match=r"the trainer ended with rank 2|trainer is lost"):
            namespace["trainer"].step(*batch(2))

    after_death("zero=1", 3, trainer_of, check, "gathering")


def test_dealt_parameters_are_healed_from_a_replica() -> None:
    def make(spec: str) -> nt.Trainer:
        return trainer_of(spec, optimizer=lambda params: Own(params, lr=0.1, momentum=0.9))

    def check(namespace: dict[str, Any], report: dict[str, Any]) -> None:
        assert report["healed"] == ["trainer", "model"]
        trainer = namespace["trainer"]
        assert trainer.model.whole
        trainer.step(*batch(1))
        everyone: list[Any] = [None] * 4
        torch.distributed.all_gather_object(everyone, (trainer.num_steps, trainer.state_dict()))
        torch.testing.assert_close(everyone[1:], everyone[:1] * 3, rtol=0, atol=0)

    after_death("zero=1,dp_replicate=2,dp_shard=2", 4, make, check, "gathering")


def test_what_zero1_cannot_do_is_an_error() -> None:
    def on_rank() -> None:
        trainer = trainer_of()
        with pytest.raises(OptimizerError, match="needs whole parameters"):
            nt.Trainer(trainer.model, optimizer=lambda params: Own(params, lr=0.1), loss_fn=F.mse_loss)
        with pytest.raises(GradientError, match=r"from 'layers\.0\.weight"):
            trainer_of(grad_clip=1.0).step(torch.full((4, 8), float("nan")), torch.ones(4, 3))

    run_ranks(on_rank, 2)


@pytest.mark.parametrize(
    "ddp",
    [
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": False},
        {"static_graph": True, "gradient_as_bucket_view": False},
    ],
    ids=str,
)
def test_options_of_ddp_change_no_number(ddp: dict[str, bool]) -> None:
    class Idle(models.MLP):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(2, 2)

    def on_rank() -> None:
        for accumulate in (1, 2):
            plain = trainer_of("zero=0,bucket_mb=0.001", Idle, accumulate=accumulate)
            trainer = trainer_of("zero=0,bucket_mb=0.001", Idle, accumulate=accumulate, ddp=ddp)
            reducer = trainer.model.reducer()
            assert reducer.static_graph == ddp.get("static_graph", False)
            assert reducer.find_unused_parameters == ddp.get("find_unused_parameters", False)
            assert reducer.gradient_as_bucket_view == ddp.get("gradient_as_bucket_view", True)
            for step in range(3):
                torch.testing.assert_close(trainer.step(*batch(step)), plain.step(*batch(step)))
            torch.testing.assert_close(trainer.state_dict(), plain.state_dict())
            assert trainer.model.idle.weight.grad is None

    run_ranks(on_rank, 2)


def test_options_of_ddp_are_checked() -> None:
    def on_rank() -> None:
        for ddp, message in {
            "static": "ddp='static' is no dict",
            "unknown": r"no option 'static_graf'; did you mean 'static_graph'\?",
            "value": r"ddp=\{'static_graph': 1\} must be True or False",
        }.items():
            given = {"static": "static", "unknown": {"static_graf": True}, "value": {"static_graph": 1}}[ddp]
            with pytest.raises(UsageError, match=message):
                nt.parallelize(models.MLP(), nt.Plan(zero=0), ddp=given)
        for zero in (1, 2, 3):
            with pytest.raises(UsageError, match=f"zero={zero} does not use DDP.*type zero=0"):
                nt.parallelize(models.MLP(), nt.Plan(zero=zero), ddp={"static_graph": True})
        model = nt.parallelize(models.MLP(), nt.Plan(zero=0), ddp={"static_graph": True})
        with pytest.raises(PlanError, match=r"laid out with ddp=\{'static_graph': True\}"):
            nt.parallelize(model, nt.Plan(zero=0), ddp={})

    run_ranks(on_rank, 2)


@pytest.mark.parametrize(("spec", "num_buckets"), [("zero=0", 1), ("zero=1,bucket_mb=0.0001", 4)])
def test_describe_tells_the_buckets(spec: str, num_buckets: int) -> None:
    def on_rank() -> None:
        trainer = trainer_of(spec)
        for step in range(2):  # DDP orders its buckets by arrival in the first
            trainer.step(*batch(step))
        sizes = trainer.model.bucket_bytes()
        total = sum(parameter.nbytes for parameter in trainer.model.parameters())
        assert len(sizes) == num_buckets
        assert total <= sum(sizes) <= 1.3 * total  # parts are padded
        assert f"gradients travel in {num_buckets} bucket" in trainer.describe()

    run_ranks(on_rank, 2)
