"""`Trainer`: the ways in which a batch enters, what comes out, and what bad input gets."""

import collections
import json
from collections.abc import Callable
from typing import Any

import models
import parity
import pytest
import torch
import torch.nn.functional as F
from parity import rank, world_size
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nbtrain as nt
from nbtrain.errors import BatchError, ModelError, PlanError, UsageError
from nbtrain.parallel.holdings import holdings


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


X = torch.ones(4, 3)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.layer(a + b) * scale


A, B, Y = torch.ones(4, 3), torch.ones(4, 3), torch.zeros(4, 2)


def loss_of(make: Any, loss_fn: Any, *positional: Any, **named: Any) -> float:
    torch.manual_seed(0)
    return nt.Trainer(make(), nt.Plan(), optimizer=sgd, loss_fn=loss_fn).step(*positional, **named).item()


def test_inputs_are_unpacked_into_the_forward() -> None:
    def labelled(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, labels)

    expected = loss_of(Two, F.mse_loss, (A, B), Y)
    assert loss_of(Two, F.mse_loss, [A, B], Y) == expected
    assert loss_of(Two, F.mse_loss, {"a": A, "b": B}, Y) == expected
    assert loss_of(Two, labelled, a=A, b=B, labels=Y) == expected
    assert loss_of(Two, F.mse_loss, a=A, b=B, target=Y) == expected
    assert loss_of(Two, lambda output, target: (F.mse_loss(output, target, reduction="sum"), 8), (A, B), Y) == (
        pytest.approx(expected)
    )
    assert loss_of(Two, F.mse_loss, (A, B, 2.0), Y) == pytest.approx(4 * expected)


class Own(Two):
    def forward(self, a: torch.Tensor, b: torch.Tensor, form: str = "scalar") -> Any:  # type: ignore[override]
        output = super().forward(a, b)
        loss = output.square().mean()
        return {
            "scalar": loss,
            "tuple": (output, loss),
            "dict": {"loss": loss, "logits": output},
            "attribute": type("Output", (), {"loss": loss})(),
            "none": (output, None),
            "two": (loss, loss),
        }[form]


@pytest.mark.parametrize("form", ["scalar", "tuple", "dict", "attribute"])
def test_a_models_own_loss_is_found(form: str) -> None:
    expected = loss_of(Two, F.mse_loss, (A, B), Y)
    assert loss_of(Own, None, A, B, form) == expected
    assert loss_of(Own, None, {"a": A, "b": B, "form": form}) == expected
    assert loss_of(Own, None, a=A, b=B, form=form) == expected


@pytest.mark.parametrize("form", ["none", "two"])
def test_a_model_without_one_loss_says_what_it_gave(form: str) -> None:
    with pytest.raises(ModelError, match="a tuple of 2; give Trainer a loss_fn"):
        loss_of(Own, None, A, B, form)


def test_a_loss_function_of_another_kind_is_refused() -> None:
    with pytest.raises(UsageError, match=r"loss_fn returned a tensor of shape \(4, 2\)"):
        loss_of(Two, lambda output, target: output - target, (A, B), Y)
    with pytest.raises(UsageError, match="takes none of the batch's 'a', 'b', 'labels'"):
        loss_of(Two, lambda output, wrong: output.mean(), a=A, b=B, labels=Y)
    with pytest.raises(BatchError, match=r"type trainer\.step\(inputs, targets\)"):
        loss_of(Two, F.mse_loss)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_fn": 3}, "loss_fn=3 is no function"),
        ({"grad_clip": 0.0}, "grad_clip=0.0 must be a positive norm"),
        ({"accumulate": 0}, "accumulate=0 must be an integer of at least 1"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR(sgd([torch.zeros(1)]), 1)}, "belongs to another optimizer"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        nt.Trainer(Two(), nt.Plan(), optimizer=sgd, **options)


def test_a_loss_and_its_count_may_lie_in_buffers() -> None:
    total, count = torch.zeros(()), torch.zeros(())

    def in_place(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = F.mse_loss(output, target, reduction="none")[: target.shape[0] // 2 + 1]
        total.copy_(loss.detach().sum())
        return (loss.sum(), count.fill_(loss.numel())) if loss.requires_grad else (total, count.fill_(loss.numel()))

    def plain(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        loss = F.mse_loss(output, target, reduction="none")[: target.shape[0] // 2 + 1]
        return loss.sum(), loss.numel()

    found = []
    for loss_fn in (in_place, plain):
        torch.manual_seed(0)
        trainer = nt.Trainer(nn.Linear(4, 2), nt.Plan(), optimizer=sgd, loss_fn=loss_fn, accumulate=2)
        x, y = torch.randn(7, 4), torch.randn(7, 2)
        steps = [trainer.step(x, y) for _ in range(2)]
        found.append([*steps, trainer.evaluate([(x[:2], y[:2]), (x, y)])])
    assert found[0] == found[1]
    options = {"optimizer": sgd, "loss_fn": lambda output, y: (output.sum(), y > 0)}
    trainer = nt.Trainer(nn.Linear(4, 2), nt.Plan(), **options)
    with pytest.raises(UsageError, match=r"a count of shape \(7, 2\) and dtype bool; return one number"):
        trainer.step(x, y)


@pytest.mark.parametrize(
    ("wrong", "cure"),
    [
        (lambda trainer, data: trainer.step(data), r"step takes one batch, not a TensorDataset; type for batch in"),
        (lambda trainer, data: trainer.evaluate(data), r"gives samples; type trainer\.evaluate\(trainer\.loader\("),
        (lambda trainer, data: trainer.evaluate((X, X)), r"in a list: trainer\.evaluate\(\[\(x, y\)\]\)"),
        (lambda trainer, data: trainer.evaluate(X), "in a list"),
        (lambda trainer, data: trainer.loader(DataLoader(data), batch_size=2), "give its dataset"),
        (lambda trainer, data: trainer.load(None), r"None is no path; give what trainer\.save was given"),
        (lambda trainer, data: trainer.save(3), "3 is no path"),
        (lambda trainer, data: trainer.load_state_dict("model.pt"), r"is no state dict; give torch\.load"),
        (lambda trainer, data: trainer.step(inputs=X, targets=X), r"loss_fn=lambda output, targets: \.\.\."),
        (
            lambda trainer, data: nt.Trainer(nn.Linear(3, 3), optimizer=sgd, loss_fn=nn.MSELoss),
            r"give one of it: loss_fn=MSELoss\(\)",
        ),
    ],
)
def test_wrong_arguments_are_told_what_to_give(wrong: Callable[..., Any], cure: str) -> None:
    trainer = nt.Trainer(nn.Linear(3, 3), optimizer=sgd, loss_fn=lambda output, y: (output - y).square().mean())
    with pytest.raises(UsageError, match=cure):
        wrong(trainer, TensorDataset(X, X))
    with pytest.raises(TypeError, match="missing 1 required") as caught:
        trainer.step(X)
    assert "type trainer.step(inputs, targets)" in caught.value.__notes__[0]
    trainer.step(X, X)


def test_a_batch_too_small_to_accumulate_is_refused() -> None:
    trainer = nt.Trainer(Two(), nt.Plan(), optimizer=sgd, loss_fn=F.mse_loss, accumulate=8)
    with pytest.raises(BatchError, match="type accumulate=4"):
        trainer.step((A, B), Y)


def test_tensors_of_another_first_dim_go_to_every_chunk() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor, positions: torch.Tensor, flag: bool) -> torch.Tensor:
            assert positions.shape == (5, 3)
            assert flag
            return self.layer(x + positions.sum(0))

    trainer = nt.Trainer(Positions(), nt.Plan(), optimizer=sgd, loss_fn=F.mse_loss, accumulate=2)
    trainer.step((torch.ones(4, 3), torch.ones(5, 3), True), torch.zeros(4, 1))


def test_mappings_of_other_kinds_are_unpacked_and_cut() -> None:
    trainer = nt.Trainer(Two(), nt.Plan(), optimizer=sgd, loss_fn=F.mse_loss, accumulate=2)
    torch.manual_seed(0)
    assert trainer.step(collections.UserDict(a=A, b=B), Y).isfinite()


def test_a_scheduler_steps_with_the_optimizer() -> None:
    trainer = nt.Trainer(
        Two(),
        nt.Plan(),
        optimizer=sgd,
        loss_fn=F.mse_loss,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )
    for _ in range(2):
        trainer.step((A, B), Y)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def test_evaluation_is_the_mean_over_all_samples_and_puts_the_mode_back() -> None:
    def on_rank() -> None:
        for spec in ("zero=0", "zero=2", "zero=3"):
            torch.manual_seed(0)
            net, twin = models.GPT(), models.GPT()
            twin.load_state_dict(net.state_dict())
            trainer = nt.Trainer(net, nt.Plan.parse(spec), optimizer=sgd, loss_fn=models.token_sum)
            generator = torch.Generator().manual_seed(0)
            ids, targets = models._ragged(generator, 10)
            dataset = torch.utils.data.TensorDataset(ids, targets)
            loader = trainer.loader(dataset, batch_size=4, drop_last=False, shuffle=False)
            trainer.model.blocks[0].eval()
            got = trainer.evaluate(loader)
            total, count = models.token_sum(twin(ids), targets)
            torch.testing.assert_close(got, (total / count).detach(), rtol=1e-5, atol=1e-5)
            assert trainer.model.training
            assert not trainer.model.blocks[0].training
            # a training step right after is right, too
            halves = [tensor[: 4 * 2].chunk(2)[rank()] for tensor in (ids, targets)]
            total, count = models.token_sum(twin(ids[:8]), targets[:8])
            torch.testing.assert_close(trainer.step(*halves), (total / count).detach(), rtol=1e-5, atol=1e-5)

    run_ranks(on_rank, 2)


def test_evaluation_refuses_what_would_hang() -> None:
    def on_rank() -> None:
        trainer = nt.Trainer(Two(), nt.Plan(), optimizer=sgd, loss_fn=F.mse_loss)
        with pytest.raises(BatchError, match="ranks have from 1 to 2 batches"):
            trainer.evaluate([((A, B), Y)] * (1 + rank()))
        with pytest.raises(BatchError, match="nothing in the global batch counts"):
            trainer.evaluate([])
        assert trainer.evaluate([((A, B), Y)]).isfinite()

    run_ranks(on_rank, 2)


def test_a_state_goes_from_one_layout_into_another() -> None:
    def on_rank() -> None:
        torch.manual_seed(rank())
        trainers = [
            nt.Trainer(models.Tied(), nt.Plan.parse(spec), optimizer=sgd, loss_fn=models.token_mean)
            for spec in ("zero=0", "zero=2", "zero=3", "zero=3,dp_replicate=2")
        ]
        state = trainers[0].state_dict()
        ids = torch.arange(8).view(2, 4)
        losses = []
        for trainer in trainers:
            trainer.evaluate([(ids, ids)])  # leaves nothing gathered that a load would miss
            trainer.load_state_dict(state)
            losses.append(trainer.evaluate([(ids, ids)]))
            torch.testing.assert_close(trainer.state_dict(), state, rtol=0, atol=0)
        torch.testing.assert_close(torch.stack(losses), losses[0].expand(4))

    run_ranks(on_rank, 4)


class Extra(nn.Linear):
    """Keeps a tensor of any shape and a number beside its parameters."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.seen: list[float] = []

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": torch.tensor(self.seen)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"].tolist()


@pytest.mark.parametrize("spec", ["zero=0", "zero=1", "zero=3"])
def test_a_state_has_what_modules_keep_beside_tensors(spec: str) -> None:
    def on_rank() -> None:
        for make in (Extra, lambda: nn.Sequential(Extra())):
            one, other = (
                nt.Trainer(make(), nt.Plan.parse(spec), optimizer=sgd, loss_fn=F.mse_loss) for make in (make, make)
            )
            next(module for module in one.model.modules() if isinstance(module, Extra)).seen = [1.0, 2.0]
            other.load_state_dict(one.state_dict())
            assert next(module for module in other.model.modules() if isinstance(module, Extra)).seen == [1.0, 2.0]

    run_ranks(on_rank, 2)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    trainer = nt.Trainer(Two(), nt.Plan(), optimizer=sgd, loss_fn=F.mse_loss)
    before = trainer.state_dict()
    with pytest.raises(ModelError) as raised:
        trainer.load_state_dict({"layer.weight": torch.zeros(1, 3), "other": torch.zeros(1)})
    message = str(raised.value)
    assert all(part in message for part in ("lacks layer.bias", "has no other", "(1, 3) and must be (2, 3)"))
    torch.testing.assert_close(trainer.state_dict(), before)


def test_a_state_is_a_copy() -> None:
    trainer = nt.Trainer(Two(), nt.Plan(), optimizer=sgd, loss_fn=F.mse_loss)
    before = trainer.state_dict()
    kept = before["layer.weight"].clone()
    trainer.step((A, B), Y)
    assert torch.equal(before["layer.weight"], kept)


@pytest.mark.parametrize(("spec", "share"), [("zero=0", 1), ("zero=2", 4), ("zero=3", 4), ("zero=3,dp_replicate=2", 2)])
def test_holdings_are_measured_shares(spec: str, share: int) -> None:
    def on_rank() -> dict[str, Any]:
        trainer = nt.Trainer(
            models.GPT(length=16), nt.Plan.parse(spec), optimizer=torch.optim.Adam, loss_fn=models.token_mean
        )
        ids = torch.zeros(2, 4, dtype=torch.long)
        trainer.step(ids, ids)
        held = holdings(trainer)
        assert json.loads(json.dumps(held)) == held
        assert held["parameters_bytes"] == trainer.memory()["parameters"]
        text = trainer.describe()
        assert f"{held['num_parameters']:,} parameters" in text
        assert "rank" in text
        return held

    held = run_ranks(on_rank, 4)
    total = sum(parameter.numel() for parameter in models.GPT(length=16).parameters())
    assert {of_rank["num_parameters"] for of_rank in held} == {total}
    assert [of_rank["rank"] for of_rank in held] == [0, 1, 2, 3]
    # every size here is a multiple of 4
    assert {of_rank["parameters_bytes"] for of_rank in held} == {4 * total // share}
    assert {of_rank["gradients_bytes"] for of_rank in held} == {4 * total // share}
    num_scalars = sum(1 for _ in models.GPT().parameters())  # Adam counts steps for each parameter
    assert {of_rank["optimizer_bytes"] for of_rank in held} == {8 * total // share + 4 * num_scalars}
    assert held[0]["layout"] == ("replicated" if share == 1 else "sharded")
    assert held[0]["num_units"] == (0 if share == 1 else 4)


def test_a_plain_model_has_holdings_too() -> None:
    held = holdings(nn.BatchNorm1d(4))
    assert (held["plan"], held["layout"], held["parameters_bytes"]) == (None, "one device", 32)
    assert held["buffers_bytes"] == 4 * 4 * 2 + 8


class Adapted(nn.Module):
    """A frozen base with a small trained part, as LoRA has."""

    def __init__(self) -> None:
        super().__init__()
        self.base = models.MLP().requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def test_a_frozen_base_stays_frozen() -> None:
    def on_rank() -> None:
        case = models.Case(Adapted, models.CASES["mlp"].batch, F.mse_loss)
        for spec in ("zero=0", "zero=2", "zero=3"):
            parity.check_case(case, spec, parity.Run(accumulate=2, grad_clip=0.5), parity.FP32)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("spec", ["zero=0", "zero=1", "zero=3"])
def test_parameters_that_take_the_place_of_others_are_an_error(spec: str) -> None:
    def swap_frozen(model: Any) -> None:
        model.layers[0].weight.requires_grad_(False)
        model.layers[2].weight.requires_grad_(True)

    def replace_head(model: Any) -> None:
        model.layers[2] = nn.Linear(33, 17)

    def on_rank() -> None:
        for change in (swap_frozen, replace_head):
            model = models.MLP()
            model.layers[2].weight.requires_grad_(False)
            trainer = nt.Trainer(model, nt.Plan.parse(spec), optimizer=sgd, loss_fn=F.mse_loss)
            batch = torch.ones(2, 8), torch.ones(2, 3)
            trainer.step(*batch)
            trainer.model(batch[0])  # leaves FSDP's gathered parameters in the module
            trainer.step(*batch)
            change(trainer.model)
            with pytest.raises(ModelError, match="replaced, frozen or unfrozen after the trainer was made"):
                trainer.step(*batch)

    run_ranks(on_rank, 2)


class Gated(nn.Module):
    """A block that leaves a loss of its own on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = x + self.layer(x)
        self.aux = self.gate(x).logsumexp(-1).mean()
        return output


@pytest.mark.parametrize("spec", ["zero=3", "zero=3,recompute=full"])
def test_a_loss_that_goes_past_the_outputs_of_a_block_is_an_error_with_the_cure(spec: str) -> None:
    def on_rank() -> None:
        blocks = nn.ModuleList([Gated(), Gated(), Gated()])
        model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*blocks))
        trainer = nt.Trainer(
            model,
            nt.Plan.parse(spec),
            optimizer=sgd,
            loss_fn=lambda output, target: F.mse_loss(output, target) + sum(block.aux for block in blocks),
        )
        before = trainer.state_dict()
        for _ in range(2):
            with pytest.raises(ModelError, match=r"self\.aux = .*return it as an output of the block, or type zero=2"):
                trainer.step(torch.ones(2, 8), torch.ones(2, 8))
        torch.testing.assert_close(trainer.state_dict(), before, rtol=0, atol=0)

    run_ranks(on_rank, 2)


def test_a_plan_in_text_is_refused_with_the_cure() -> None:
    with pytest.raises(PlanError, match=r"type nt\.Plan\.parse\('zero=3'\)"):
        nt.Trainer(Two(), "zero=3", optimizer=sgd)  # type: ignore[arg-type]


def test_a_laid_out_model_is_taken_as_it_is() -> None:
    """What a cell with --parallelize leaves is given to a trainer."""

    def on_rank() -> None:
        for spec in ("zero=0", "zero=3"):
            plan = nt.Plan.parse(spec)
            net = nt.parallelize(models.MLP(), plan)
            for _ in range(2):  # the cell with the trainer is run again
                trainer = nt.Trainer(net, plan, optimizer=sgd, loss_fn=F.mse_loss)
                assert trainer.model is net
                trainer.step(torch.ones(2, 8), torch.ones(2, 3))
            assert world_size() == 2

    run_ranks(on_rank, 2)


def test_a_loss_without_gradient_and_a_batch_in_one_piece_are_told() -> None:
    def on_rank() -> None:
        options = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}
        x, y = torch.randn(4, 8), torch.randn(4, 3)
        detached = nt.Trainer(models.MLP(), nt.Plan(zero=0), loss_fn=lambda a, b: F.mse_loss(a, b).detach(), **options)
        with pytest.raises(UsageError, match="the loss has no gradient"):
            detached.step(x, y)
        trainer = nt.Trainer(models.MLP(), nt.Plan(zero=0), loss_fn=F.mse_loss, **options)
        with pytest.raises(TypeError) as raised:
            trainer.step((x, y))
        assert "trainer.step(*batch)" in raised.value.__notes__[0]
        trainer.step(x, y)

    run_ranks(on_rank, 2)
