"""The faults of shared/cases that belong to training, each as right numbers or as an error that names the cure."""

import copy
import re
from typing import Any

import models
import parity
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity import FP32, Run, check, rank, show_gradients, whole, world_size
from ranks import run_ranks
from torch import nn

import nbtrain as nt
from nbtrain.errors import BatchError, GradientError, ModelError, OptimizerError, UsageError

SHARDED = ["zero=2", "zero=3"]
PLANS = ["zero=0", "zero=1", *SHARDED]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def share(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(world_size())[rank()]


# --- 04: an optimizer that was built too early ---


@pytest.mark.parametrize("spec", PLANS)
def test_04_an_optimizer_built_before_sharding_trains(spec: str) -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        net, twin = nn.Linear(8, 8), nn.Linear(8, 8)
        twin.load_state_dict(net.state_dict())
        groups = [{"params": [net.weight], "lr": 0.1}, {"params": [net.bias], "lr": 0.5}]
        early = torch.optim.SGD(groups, momentum=0.9)
        trainer = nt.Trainer(net, nt.Plan.parse(spec), optimizer=lambda params: early, loss_fn=F.mse_loss)
        x, y = torch.randn(4, 8), torch.randn(4, 8)
        for tensor in (x, y):
            torch.distributed.broadcast(tensor, 0)
        for _ in range(2):
            trainer.step(share(x), share(y))
        plain = torch.optim.SGD(
            [{"params": [twin.weight], "lr": 0.1}, {"params": [twin.bias], "lr": 0.5}], momentum=0.9
        )
        for _ in range(2):
            plain.zero_grad()
            F.mse_loss(twin(x), y).backward()
            plain.step()
        torch.testing.assert_close(trainer.state_dict(), dict(twin.state_dict()))

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("spec", SHARDED)
def test_04_an_optimizer_built_between_forward_and_backward_is_refused(spec: str) -> None:
    def on_rank() -> None:
        plan = nt.Plan.parse(spec)
        net = nt.parallelize(nn.Linear(8, 8), plan)
        net(torch.randn(4, 8))
        late = sgd(net.parameters())
        with pytest.raises(OptimizerError, match="optimizer=lambda params"):
            nt.Trainer(net, plan, optimizer=late, loss_fn=F.mse_loss)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("spec", PLANS)
def test_04_a_trainer_made_after_a_forward_without_backward_trains(spec: str) -> None:
    def on_rank() -> None:
        plan = nt.Plan.parse(spec)
        net = nt.parallelize(models.GPT(), plan)
        net(torch.zeros(2, 4, dtype=torch.long))
        trainer = nt.Trainer(net, plan, optimizer=sgd, loss_fn=models.token_mean)
        before = trainer.state_dict()
        trainer.step(torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long))
        after = trainer.state_dict()
        assert all(not torch.equal(before[name], after[name]) for name in ("tokens.weight", "blocks.0.out.weight"))

    run_ranks(on_rank, 2)


def test_04_an_optimizer_of_another_model_is_refused() -> None:
    def on_rank() -> None:
        with pytest.raises(OptimizerError, match="2 of the optimizer's 2 tensors"):
            nt.Trainer(nn.Linear(2, 2), nt.Plan(), optimizer=lambda params: sgd(nn.Linear(2, 2).parameters()))
        net = nn.Linear(2, 2)
        used = torch.optim.Adam(net.parameters())
        net(torch.ones(1, 2)).sum().backward()
        used.step()
        with pytest.raises(OptimizerError, match="already stepped"):
            nt.Trainer(net, nt.Plan(), optimizer=used)

    run_ranks(on_rank, 2)


def test_04_an_optimizer_built_before_layers_are_cut_trains() -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        net, twin = models.GPT(), models.GPT()
        twin.load_state_dict(net.state_dict())
        early, plain = sgd(net.parameters()), sgd(twin.parameters())
        trainer = nt.Trainer(net, nt.Plan(tp=2), optimizer=lambda params: early, loss_fn=models.token_mean)
        for step in range(2):
            ids, targets = models.CASES["gpt"].batch(torch.Generator().manual_seed(step), 4)
            trainer.step(ids, targets)
            plain.zero_grad()
            models.token_mean(twin(ids), targets).backward()
            plain.step()
        torch.testing.assert_close(trainer.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-6)

    run_ranks(on_rank, 2)


# --- 05: tied embeddings ---


@pytest.mark.parametrize(
    ("spec", "ranks"), [*((spec, ranks) for spec in (*PLANS, "tp=2") for ranks in (2, 4)), ("tp=4", 4)]
)
def test_05_tied_embeddings_stay_tied(spec: str, ranks: int) -> None:
    def on_rank() -> None:
        case = models.Case(models.Tied, models.CASES["gpt"].batch, models.token_mean)
        parity.check_case(case, spec, Run(steps=5), FP32)
        trainer = nt.Trainer(models.Tied(), nt.Plan.parse(spec), optimizer=sgd, loss_fn=models.token_mean)
        state = trainer.state_dict()
        assert state["head.weight"] is state["emb.weight"]
        assert trainer.model.head.weight is trainer.model.emb.weight

    run_ranks(on_rank, ranks)


def test_05_a_block_that_shares_a_parameter_with_another_is_left_to_the_root() -> None:
    class Shared(models.GPT):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[2].mlp[0].weight = self.blocks[0].mlp[0].weight

    def on_rank() -> None:
        case = models.Case(Shared, models.CASES["gpt"].batch, models.token_mean)
        parity.check_case(case, "", Run(), FP32)
        again = models.Case(Repeated, models.CASES["gpt"].batch, models.token_mean)
        parity.check_case(again, "", Run(), FP32)

    class Repeated(models.GPT):
        """The same block at each depth, as in ALBERT."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([self.blocks[0]] * 3)

    run_ranks(on_rank, 2)


def test_05_an_in_place_sum_on_a_block_output_keeps_its_gradient() -> None:
    class InPlace(models.Tied):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.emb(ids)
            for block in self.blocks:
                update = block(x)
                update += x
                x = update
            return self.head(x)

    def on_rank() -> None:
        case = models.Case(InPlace, models.CASES["gpt"].batch, models.token_mean)
        for spec in SHARDED:
            parity.check_case(case, spec, Run(), FP32)

    run_ranks(on_rank, 2)


def test_05_tied_embeddings_stay_tied_over_stages() -> None:
    def on_rank() -> None:
        case = models.Case(models.Tied, models.CASES["gpt"].batch, models.token_mean)
        for spec in ("pp=2,tp=2", "pp=2,zero=3"):
            parity.check_case(case, spec + ",num_microbatches=2", Run(steps=5), FP32)
        trainer = nt.Trainer(models.Tied(), nt.Plan(pp=4), optimizer=sgd, loss_fn=models.token_mean)
        state = trainer.state_dict()
        assert state["head.weight"] is state["emb.weight"]

    run_ranks(on_rank, 4)


# --- 06, 07: schedules that split backward beside replicas, accumulation ---


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv"])
def test_06_zero_bubble_reduces_every_gradient(schedule: str) -> None:
    spec = f"pp=2,dp_replicate=2,zero=0,num_microbatches=2,schedule={schedule}"
    run_ranks(lambda: check("gpt", spec, Run()), 4)


def test_07_accumulation_in_a_pipeline_scales_each_gradient_once() -> None:
    def on_rank() -> None:
        for schedule in ("1f1b", "looped_bfs", "dualpipev"):
            check("gpt", f"pp=2,num_microbatches=4,schedule={schedule}", Run(steps=2, accumulate=2))

    run_ranks(on_rank, 2)


# --- 08: clipping ---


@pytest.mark.parametrize(
    ("spec", "ranks"), [*((spec, 2) for spec in PLANS), ("zero=3,dp_replicate=2", 4), ("zero=0,dp_replicate=2", 4)]
)
def test_08_the_norm_is_global(spec: str, ranks: int) -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        net, twin = models.GPT(), models.GPT()
        twin.load_state_dict(net.state_dict())
        options = {"loss_fn": models.token_sum, "grad_clip": 1e-3, "accumulate": 2}
        trainer = nt.Trainer(net, nt.Plan.parse(spec), optimizer=sgd, **options)
        ids = torch.arange(96).view(8, 12) % models.V
        trainer.step(share(ids), share(ids.flip(0)))
        show_gradients(trainer)
        loss, count = models.token_sum(twin(ids), ids.flip(0))
        (loss / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1e-3)
        assert trainer.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        for (name, parameter), expected in zip(trainer.model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(whole(parameter.grad), expected.grad, msg=name, rtol=1e-4, atol=1e-8)

    run_ranks(on_rank, ranks)


@pytest.mark.parametrize("spec", PLANS)
def test_08_a_norm_that_is_not_finite_is_reported_and_nothing_is_stepped(spec: str) -> None:
    def on_rank() -> None:
        trainer = nt.Trainer(
            models.MLP(), nt.Plan.parse(spec), optimizer=sgd, loss_fn=F.mse_loss, grad_clip=1.0, accumulate=1
        )
        x, y = torch.randn(4, 8), torch.randn(4, 3)
        trainer.step(x, y)
        before = trainer.state_dict()
        poisoned = torch.full_like(x, float("nan")) if rank() == 1 else x
        with pytest.raises(GradientError, match=r"norm is nan at step 2, from 'layers\.0\.weight'"):
            trainer.step(poisoned, y)
        torch.testing.assert_close(trainer.state_dict(), before)
        assert trainer.step(x, y).isfinite()
        assert trainer.num_steps == 2

    run_ranks(on_rank, 2)


# --- 09: parameters that only some ranks use ---


@pytest.mark.parametrize(("spec", "ranks"), [(spec, ranks) for spec in PLANS for ranks in (1, 2, 4)])
def test_09_a_branch_that_only_some_ranks_take_equals_one_device(spec: str, ranks: int) -> None:
    """Mixed, then all one way (the other branch's gradient is None, and Adam must skip it), then mixed again."""

    def on_rank() -> None:
        torch.manual_seed(0)
        net, twin = models.Branches(), models.Branches()
        twin.load_state_dict(net.state_dict())

        def adam(params: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.5)

        trainer = nt.Trainer(net, nt.Plan.parse(spec), optimizer=adam, loss_fn=F.mse_loss)
        optimizer = adam(twin.parameters())
        generator = torch.Generator().manual_seed(1)
        for signs in ("+-", "++", "--", "-+"):
            x = torch.randn(8, 8, generator=generator).abs()
            x[: 8 // 2] *= 1 if signs[0] == "+" else -1
            x[8 // 2 :] *= 1 if signs[1] == "+" else -1
            y = torch.randn(8, 1, generator=generator)
            trainer.step(share(x), share(y))
            show_gradients(trainer)
            optimizer.zero_grad()
            parts = [F.mse_loss(twin(a), b) for a, b in zip(x.chunk(ranks), y.chunk(ranks), strict=True)]
            (sum(parts) / ranks).backward()
            optimizer.step()
            for (name, got), expected in zip(trainer.model.named_parameters(), twin.parameters(), strict=True):
                assert (got.grad is None) == (expected.grad is None), (signs, name)
        torch.testing.assert_close(trainer.state_dict(), dict(twin.state_dict()), rtol=1e-4, atol=1e-5)

    run_ranks(on_rank, ranks)


@pytest.mark.parametrize("spec", PLANS)
def test_09_a_branch_used_in_one_chunk_of_one_rank_counts(spec: str) -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        net, twin = models.Branches(), models.Branches()
        twin.load_state_dict(net.state_dict())
        trainer = nt.Trainer(net, nt.Plan.parse(spec), optimizer=sgd, loss_fn=F.mse_loss, accumulate=2)
        x, y = torch.ones(4, 2, 8), torch.zeros(4, 2, 1)
        x[0] = -1  # rank 0's first chunk alone takes the other branch
        trainer.step(share(x).flatten(0, 1), share(y).flatten(0, 1))
        show_gradients(trainer)
        (sum(F.mse_loss(twin(a), b) for a, b in zip(x, y, strict=True)) / 4).backward()
        for (name, got), expected in zip(trainer.model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(whole(got.grad), expected.grad, msg=name)

    run_ranks(on_rank, 2)


class Routed(nn.Module):
    """A choice among blocks that would be sharded apart."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        for block in (self.blocks[0], self.blocks[way]):
            x = block(x)
        return self.out(x)


def test_09_blocks_in_another_order_on_some_rank_are_refused() -> None:
    def on_rank() -> None:
        trainer = nt.Trainer(Routed(), nt.Plan(), optimizer=sgd, loss_fn=F.mse_loss)
        x, y = torch.randn(4, 8), torch.randn(4, 1)
        with pytest.raises(ModelError, match=r"'blocks\.2' where another reached 'blocks\.1'.*type zero=0"):
            trainer.step((x, 1 + rank()), y)
        # all ranks one way is fine, and fixes the order
        trainer.step((x, 1), y)
        with pytest.raises(ModelError, match=r"'blocks\.2' where the first step reached 'blocks\.1'"):
            trainer.step((x, 2), y)
        trainer.step((x, 1), y)

    run_ranks(on_rank, 2)


def test_09_replicas_may_take_different_blocks() -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        net, twin = Routed(), Routed()
        twin.load_state_dict(net.state_dict())
        trainer = nt.Trainer(net, nt.Plan(zero=0), optimizer=sgd, loss_fn=F.mse_loss)
        x, y = torch.ones(4, 8), torch.zeros(4, 1)
        trainer.step((x, 1 + rank()), y)
        (sum(F.mse_loss(twin(x, way), y) for way in (1, 2)) / 2).backward()
        for (name, got), expected in zip(trainer.model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad, msg=name)

    run_ranks(on_rank, 2)


def test_09_ranks_with_different_branches_work_in_a_loop_of_ones_own() -> None:
    def on_rank() -> None:
        for spec in PLANS:
            torch.manual_seed(0)
            net = nt.parallelize(models.Branches(), nt.Plan.parse(spec))
            optimizer = sgd(net.parameters())
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.ones(2, 8) * (1 if rank() else -1)).sum().backward()
                optimizer.step()
            assert all(whole(parameter.grad).abs().sum() > 0 for parameter in net.parameters())

    run_ranks(on_rank, 2)


# --- 12: uneven tokens ---


@pytest.mark.parametrize("spec", [*PLANS, "zero=3,dp_replicate=2"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_12_uneven_tokens_count_as_on_one_device(spec: str, accumulate: int) -> None:
    def on_rank() -> None:
        # rank 0's first chunk has no valid token at all
        check("gpt_ragged", spec, Run(accumulate=accumulate))

    run_ranks(on_rank, 4)


@pytest.mark.parametrize("spec", PLANS)
def test_12_a_rank_without_any_valid_token_learns_from_the_others(spec: str) -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        net, twin = models.GPT(), models.GPT()
        twin.load_state_dict(net.state_dict())
        trainer = nt.Trainer(net, nt.Plan.parse(spec), optimizer=sgd, loss_fn=models.token_sum)
        ids = torch.arange(48).view(4, 12)
        targets = ids.clone()
        targets[:2] = -100
        loss = trainer.step(share(ids), share(targets))
        show_gradients(trainer)
        total, count = models.token_sum(twin(ids), targets)
        torch.testing.assert_close(loss, (total / count).detach())
        (total / count).backward()
        for (name, got), expected in zip(trainer.model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(whole(got.grad), expected.grad, msg=name, rtol=1e-4, atol=1e-6)
        with pytest.raises(BatchError, match="nothing in the global batch counts"):
            trainer.step(share(ids), torch.full_like(share(ids), -100))
        assert trainer.num_steps == 1
        trainer.step(share(ids), share(targets))

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("spec", PLANS)
def test_12_a_mean_over_unevenly_ignored_targets_is_refused(spec: str) -> None:
    """A mean of means would be off without a word."""

    def on_rank() -> None:
        trainer = nt.Trainer(models.GPT(), nt.Plan.parse(spec), optimizer=sgd, loss_fn=models.token_mean)
        own = nt.Trainer(models.llama(), nt.Plan.parse(spec), optimizer=sgd)
        ids = torch.arange(24).view(2, 12)
        before = trainer.state_dict()
        uneven = ids.clone()
        uneven[:, 2 * rank() + 2 :] = -100
        with pytest.raises(BatchError, match=r"targets fall unevenly.*loss_fn return \(sum, count\)"):
            trainer.step(ids, uneven)
        with pytest.raises(BatchError, match="targets fall unevenly"):
            own.step(input_ids=ids, labels=uneven)
        torch.testing.assert_close(trainer.state_dict(), before, rtol=0, atol=0)
        even = ids.clone()
        even[:, 5:] = -100
        trainer.step(ids, even)
        own.step(input_ids=ids, labels=even)

    run_ranks(on_rank, 2)


def _mean_losses_that_do_not_divide_by_samples() -> None:
    torch.manual_seed(0)
    rank = dist.get_rank()
    net = torch.nn.Linear(8, 10)
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(rank))
    targets = torch.randint(0, 10, (32,), generator=torch.Generator().manual_seed(rank))
    ignoring = targets.clone()
    if rank == 0:
        ignoring[:20] = -1
    weights = torch.tensor([1.0] * 5 + [50.0] * 5)
    losses = {
        "ignore_index": (lambda o, y: F.cross_entropy(o, y, ignore_index=-1), ignoring),
        "a module": (torch.nn.CrossEntropyLoss(ignore_index=-1), ignoring),
        "class weights": (torch.nn.CrossEntropyLoss(weight=weights), targets),
        "left out": (lambda o, y: F.cross_entropy(o[y != -1], y[y != -1]), ignoring),
    }
    ignored = "(F.cross_entropy(output, target, ignore_index=-1, reduction='sum'), (target != -1).sum())"
    cures = {
        "ignore_index": ignored,
        "a module": ignored,
        "class weights": "target, weight=weight, reduction='sum'), weight[target[target != -100]].sum())",
        "left out": "(F.cross_entropy(output, target, reduction='sum'), (target != -100).sum())",
    }
    for name, (loss_fn, target) in losses.items():
        trainer = nt.Trainer(copy.deepcopy(net), nt.Plan(zero=0), optimizer=torch.optim.SGD, loss_fn=loss_fn)
        with pytest.raises(BatchError, match=re.escape(cures[name])):
            trainer.step(inputs, target)
    summed = nt.Trainer(
        net, nt.Plan(zero=0), optimizer=torch.optim.SGD, loss_fn=torch.nn.CrossEntropyLoss(reduction="sum")
    )
    with pytest.raises(UsageError, match=r"return \(sum, count\)"):
        summed.step(inputs, targets)


def test_a_mean_that_does_not_divide_by_samples_is_refused_where_it_falls_unevenly() -> None:
    run_ranks(_mean_losses_that_do_not_divide_by_samples, 2)


def _a_model_that_is_changed_after_its_trainer() -> None:
    for change in (lambda m: m.append(torch.nn.Linear(8, 8)), lambda m: m[0].requires_grad_(False)):
        for zero in (0, 3):
            net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
            plan = nt.Plan(zero=zero)
            trainer = nt.Trainer(net, plan, optimizer=torch.optim.SGD, loss_fn=F.mse_loss)
            batch = torch.ones(4, 8), torch.ones(4, 8)
            trainer.step(*batch)
            change(net)
            with pytest.raises(ModelError, match="after the trainer was made"):
                trainer.step(*batch)


def test_a_model_that_is_changed_after_its_trainer_is_refused() -> None:
    run_ranks(_a_model_that_is_changed_after_its_trainer, 2)
