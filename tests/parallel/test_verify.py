"""`verify` on plans that are right, and on faults that were planted: it names the first tensor and the cause."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parity import rank
from ranks import run_ranks
from torch import nn

import nbtrain as nt
from nbtrain.engine.values import portable
from nbtrain.errors import BatchError, ModelError, PlanError, UsageError
from nbtrain.parallel import batchnorm, gradients, parallelize, verify
from nbtrain.parallel.report import Report, Row

Plant = Callable[[nn.Module], None]


def batch_of(name: str, size: int = 8) -> Any:
    return models.CASES[name].batch(torch.Generator().manual_seed(0), size)


def under_meta(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with nt.meta_init():
            return make()

    return build


# --- what is right ---


def test_right_plans_are_verified() -> None:
    def on_rank() -> list[str]:
        reports = [
            nt.verify(models.MLP, nt.Plan(zero=0), batch_of("mlp"), accumulate=2, grad_clip=0.1),
            nt.verify(models.GPT, nt.Plan.parse("zero=3,dp_replicate=2"), batch_of("gpt")),
            nt.verify(models.ConvNet, nt.Plan(zero=3), batch_of("conv", 10)),
            nt.verify(models.GPT, nt.Plan(zero=3, precision="bf16"), batch_of("gpt"), steps=2),
            nt.verify(under_meta(models.gpt2), nt.Plan(zero=3), batch_of("gpt2"), steps=1),
            nt.verify(models.Tied, nt.Plan(zero=2), batch_of("gpt_ragged"), 1, loss_fn=models.token_sum),
        ]
        for report in reports:
            assert report.raise_() is report
            assert report.first_difference is None
            assert not report.likely_cause
            assert {row.kind for row in report.rows} >= {"weights", "loss", "gradient", "parameter"}
        return [str(report) for report in reports]

    first, *others = run_ranks(on_rank, 4)
    assert all(first == other for other in others), "what ranks print alike is shown once"
    assert first[0].startswith("verified: zero=0,dp_shard=4 on 4 ranks gives the numbers of one device (3 steps, 45 c")


def test_one_device_without_ranks() -> None:
    report = nt.verify(models.MLP, None, batch_of("mlp"), steps=1)
    assert report.ok
    assert report.world_size == 1
    assert pickle.loads(pickle.dumps(report)) == report
    assert report._repr_html_().startswith("<div style='color:var(--jp-success-color1, #1a7f37)")


def test_dropout_is_off_and_told() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
            self.head = nn.Linear(8, 3)
            self.drop_rate = 0.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(F.dropout(self.layer(x[:, None])[:, 0], self.drop_rate, self.training))

    def on_rank() -> None:
        report = nt.verify(Dropping, nt.Plan(zero=3), batch_of("mlp")).raise_()
        assert "dropout was off in 5 modules" in str(report)  # the model, three of the layer, its attention

    run_ranks(on_rank, 2)


def test_dropout_of_functions_is_off_and_told() -> None:
    class Dropping(models.MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(super().forward(F.alpha_dropout(x, 0.1, True)), 0.5, self.training)

    def on_rank() -> None:
        original = F.dropout
        report = nt.verify(Dropping, nt.Plan(zero=0), batch_of("mlp")).raise_()
        assert "dropout was off in F.alpha_dropout and F.dropout: masks" in str(report)
        assert F.dropout is original

    run_ranks(on_rank, 2)


def test_one_device_takes_the_same_chunks_where_their_statistics_count() -> None:
    def on_rank() -> None:
        for size in (8, 11):
            nt.verify(models.ConvNet, nt.Plan(zero=0), batch_of("conv", size), accumulate=2).raise_()

    run_ranks(on_rank, 2)


def test_an_optimizer_of_some_parameters_is_verified() -> None:
    def some(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(params)[:2], lr=0.1)

    def on_rank() -> None:
        for zero in (0, 1):
            nt.verify(models.MLP, nt.Plan(zero=zero), batch_of("mlp"), optimizer=some, grad_clip=0.1).raise_()

    run_ranks(on_rank, 2)


# --- what is wrong ---


def faulty(plant: Plant) -> type[nt.Trainer]:
    """A trainer of a model in which ``plant`` has planted a fault, after it was laid out."""

    class Faulty(nt.Trainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            plant(self.model)

    return Faulty


def change_gradients(change: Callable[[torch.Tensor], torch.Tensor], word: str) -> Plant:
    def plant(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if word in name:
                parameter.register_hook(change)

    return plant


def halve(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


def turn(gradient: torch.Tensor) -> torch.Tensor:
    """As if heads were cut wrongly."""
    return gradient.roll(16, 0)


@pytest.mark.parametrize(
    ("plant", "name", "cause"),
    [
        (
            change_gradients(halve, "norm"),
            "blocks.0.norm1.weight",
            "only parameters of norms.*must be summed over ranks",
        ),
        (change_gradients(halve, "out.bias"), "blocks.0.out.bias", "only biases.*here 'blocks.0.out.bias', 'b"),
        (change_gradients(halve, "tokens"), "tokens.weight", "only tied weights"),
        (change_gradients(turn, "qkv.weight"), "blocks.0.qkv.weight", "only fused QKV layers.*heads"),
        (
            change_gradients(lambda g: g * 3, "blocks.1."),
            "blocks.1.norm1.weight",
            "of 'blocks.1' differ.*They are 3 times",
        ),
        (
            change_gradients(lambda g: g.flip(0), "1.out.weight"),
            "blocks.1.out.weight",
            "only the gradients of 'blocks.1.out",
        ),
        (change_gradients(lambda g: g * float("nan"), "0.out.weight"), "blocks.0.out.weight", "not finite"),
        (change_gradients(lambda g: g + 1, "weight"), "tokens.weight", "backward, or the reduction of gradients"),
    ],
    ids=["norm", "bias", "tied", "qkv", "block", "one", "nan", "many"],
)
def test_gradients_that_differ_are_named(plant: Plant, name: str, cause: str) -> None:
    def on_rank() -> Report:
        verify.Trainer = faulty(plant)
        return nt.verify(models.GPT, nt.Plan(zero=0), batch_of("gpt"), steps=1)

    report, other = run_ranks(on_rank, 2)
    assert str(report) == str(other)
    first = report.first_difference
    assert (first.step, first.kind, first.name) == (1, "gradient", name)
    with pytest.raises(
        ModelError, match=f"(?s)NOT verified: .*the gradient of '{name}' at step 1.*likely cause: .*{cause}"
    ):
        report.raise_()


def sum_over_ranks() -> None:
    original = gradients.scale
    gradients.scale = lambda parameters, factor: original(parameters, 2 * factor)


def broadcast_nothing() -> None:
    parallelize.broadcast_weights = lambda model, group: None


def normalise_locally() -> None:
    batchnorm.normalise_globally = lambda model, group: None


def skip_reduction() -> None:
    original = gradients.scale
    gradients.scale = lambda parameters, factor: original(parameters, factor * (1 + rank()))


@pytest.mark.parametrize(
    ("plant", "model", "spec", "first", "cause"),
    [
        (
            sum_over_ranks,
            "mlp",
            "zero=3",
            (1, "gradient"),
            "all gradients are 2 times.*summed over the 2 data-parallel",
        ),
        (broadcast_nothing, "mlp", "zero=0", (0, "weights"), "only rank 1 differs: weights were not broadcast"),
        (broadcast_nothing, "mlp", "zero=3", (0, "weights"), "the plan starts from other weights"),
        (normalise_locally, "conv", "zero=0", (1, "loss"), "the weights are the same and the first loss is not"),
        (skip_reduction, "mlp", "zero=0", (1, "gradient"), "only rank 1 differs: gradients were not reduced"),
    ],
    ids=["sum", "broadcast", "broadcast-shards", "statistics", "reduction"],
)
def test_faults_of_a_layout_are_named(
    plant: Callable[[], None], model: str, spec: str, first: tuple[int, str], cause: str
) -> None:
    def on_rank() -> Report:
        plant()
        return nt.verify(models.CASES[model].make, nt.Plan.parse(spec), batch_of(model), steps=2)

    report = run_ranks(on_rank, 2)[0]
    assert (report.first_difference.step, report.first_difference.kind) == first
    with pytest.raises(ModelError, match=f"(?s)likely cause: .*{cause}"):
        report.raise_()


def drawing() -> nn.Module:
    class Net(models.MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x) + torch.randn(3)

    return Net()


def from_numpy() -> nn.Module:
    net = models.MLP()
    nn.init.constant_(net.layers[0].bias, np.random.rand())
    return net


class Branches(models.MLP):
    """Leaves a parameter unused."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2, bias=False)


def test_a_gradient_on_one_side_only_is_named() -> None:
    class Faulty(nt.Trainer):
        def step(self, *batch: Any, **named: Any) -> torch.Tensor:
            loss = super().step(*batch, **named)
            self.model.unused.weight.grad = torch.zeros(2, 2)
            return loss

    def on_rank() -> Report:
        assert nt.verify(Branches, nt.Plan(zero=0), batch_of("mlp")).ok
        verify.Trainer = Faulty
        return nt.verify(Branches, nt.Plan(zero=0), batch_of("mlp"))

    report = run_ranks(on_rank, 2)[0]
    assert report.first_difference.name == "unused.weight"
    assert report.first_difference.note == "is on one side only: one device has none"
    assert report.likely_cause.startswith("what forward uses differs")


def another_rate() -> Callable[[Any], torch.optim.Optimizer]:
    rates = [0.1, 0.2]
    return lambda params: torch.optim.SGD(params, lr=rates.pop())


class Averaging(models.MLP):
    """Keeps a mean of its inputs, and of its calls a count that is the same everywhere."""

    mean: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.mean(0), 0.1)
        self.calls += 1
        return super().forward(x - self.mean)


@pytest.mark.parametrize(
    ("make", "options", "first", "cause"),
    [
        (drawing, {}, "loss", "draws random numbers in its forward"),
        (from_numpy, {}, "weights", "make_model gives others each time"),
        (models.MLP, {"optimizer": another_rate()}, "parameter", "the optimizer: loss and gradients are the same"),
        (models.MLP, {"tolerance": 1e-12}, None, ""),
        (Averaging, {}, "loss", "buffers that forward updates from a rank's own samples: 'mean'. Take"),
    ],
    ids=["random", "numpy", "rate", "tolerance", "buffer"],
)
def test_faults_of_the_users_own_are_named(
    make: Callable[[], nn.Module], options: dict[str, Any], first: str | None, cause: str
) -> None:
    def on_rank() -> Report:
        np.random.seed(0)
        return nt.verify(make, nt.Plan(zero=3), batch_of("mlp"), **options)

    report = run_ranks(on_rank, 2)[0]
    assert not report.ok
    assert first in (None, report.first_difference.kind)
    assert cause in report.likely_cause


def test_what_cannot_be_verified_is_refused() -> None:
    def on_rank() -> None:
        torch.manual_seed(rank())
        with pytest.raises(BatchError, match=r"rank 1 is not that of rank 0.*torch.manual_seed\(0\)"):
            nt.verify(models.MLP, nt.Plan(), (torch.randn(8, 8), torch.randn(8, 3)))
        with pytest.raises(BatchError, match="1 samples for 2 data-parallel ranks and accumulate=2; give at least 4"):
            nt.verify(models.MLP, nt.Plan(), batch_of("mlp", 1), accumulate=2)
        with pytest.raises(PlanError, match="dp_shard=3"):
            nt.verify(models.MLP, nt.Plan(dp_shard=3), batch_of("mlp"))
        with pytest.raises(UsageError, match=r"make_model is a MLP; .*nt.verify\(lambda: MLP"):
            nt.verify(models.MLP(), nt.Plan(), batch_of("mlp"))
        with pytest.raises(UsageError, match="optimizer must be a function"):
            nt.verify(models.MLP, nt.Plan(), batch_of("mlp"), optimizer=torch.optim.SGD(models.MLP().parameters()))
        with pytest.raises(UsageError, match="make_model returned int"):
            nt.verify(lambda: 3, nt.Plan(), batch_of("mlp"))
        with pytest.raises(UsageError, match="steps=0"):
            nt.verify(models.MLP, nt.Plan(), batch_of("mlp"), steps=0)

    run_ranks(on_rank, 2)


# --- what people read ---


def test_the_kernel_reads_a_report_without_torch() -> None:
    code = "import sys, nbtrain.parallel.report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    report = nt.verify(models.MLP, None, batch_of("mlp"), steps=1)
    assert portable([report]) == [report], "as of %%distributed --out"


def test_a_report_is_short() -> None:
    rows = (
        Row(1, "loss", "", 0.0, 1e-5),
        Row(1, "gradient", "a.weight", 0.5, 1e-5, factor=2.0, ranks=(0, 1)),
        Row(1, "gradient", "b<c>", 0.0, 1e-5),
    )
    report = Report(nt.Plan(zero=3).resolve(2), 2, 1, rows, ("a note",), {}, "the cause")
    assert str(report) == (
        f"NOT verified: {report.plan} on 2 ranks differs from one device: the gradient of 'a.weight' at step 1 is off "
        "by 0.5 where rounding explains 1e-05\n"
        "likely cause: the cause\n"
        "1 of 3 comparisons differ\n"
        "  kind      compared  differ  largest error  allowed  where\n"
        "  loss      1         none    0.0e+00        1.0e-05  step 1\n"
        "  gradient  2         1       5.0e-01        1.0e-05  a.weight step 1\n"
        "a note"
    )
    assert "a.weight step 1</td>" in report._repr_html_()
    assert report.differences == rows[1:2]
