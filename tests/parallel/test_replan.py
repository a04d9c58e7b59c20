"""The layout of a live model changes between two steps, and the numbers do not notice."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from lives import Life, die, run_lives
from parity import FP32, Tolerance, rank
from ranks import run_ranks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import nbtrain as nt
from nbtrain.errors import BatchError, ModelError, NbtrainError, OptimizerError, PlanError, SessionError, UsageError
from nbtrain.parallel import replan as replanning
from nbtrain.parallel import spill
from nbtrain.parallel.draft import Draft
from nbtrain.parallel.heal import heal
from nbtrain.parallel.local import local
from nbtrain.parallel.mesh import data_coordinate
from nbtrain.parallel.moving import Move
from nbtrain.parallel.pieces import Held, held_optimizer, held_parameters
from nbtrain.parallel.scaler import Scaling
from nbtrain.parallel.transfer import gather

CHAIN = ("zero=3", "tp=2,zero=1", "zero=0", "zero=3,dp_replicate=2", "tp=4", "pp=2,zero=1", "pp=2,tp=2")
"""On four ranks; and back to the first."""
BATCH = 12


# eps: gradients that are 0 but for rounding, as of a key's bias, would be divided by themselves
def adamw(params: Any) -> torch.optim.Optimizer:
    """Two groups."""
    params = list(params)
    matrices = [parameter for parameter in params if parameter.ndim > 1]
    others = [parameter for parameter in params if parameter.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "lr": 2e-3}], lr=5e-3, eps=1e-4)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


class Counting(models.GPT):
    """Keeps a count as a number, one in a buffer, and a mode in a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        if self.training:
            self.calls += 1
            self.seen += 1
        return super().forward(ids) * self.scale


def make(spec: str, kind: type[nn.Module] = Counting, **options: Any) -> nt.Trainer:
    torch.manual_seed(0)
    loss_fn = models.token_mean if issubclass(kind, models.GPT) else nn.functional.cross_entropy
    options = {"optimizer": adamw, "loss_fn": loss_fn, **options}
    with quiet():
        return nt.Trainer(kind(), nt.Plan.parse(spec), **options)


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        yield text


def batch(case: str, step: int) -> Any:
    return models.CASES[case].batch(torch.Generator().manual_seed(step), BATCH)


def take_step(trainer: nt.Trainer, case: str = "gpt") -> float:
    part = data_coordinate(trainer.plan, rank())
    share = (tensor.chunk(trainer.plan.dp)[part] for tensor in batch(case, trainer.num_steps))
    return trainer.step(*share).item()


def everything(trainer: nt.Trainer) -> dict[str, Any]:
    """Model and optimizer state, whole, by canonical names, put together from all ranks' pieces: replicas are alike."""
    layout = trainer._stepper.layout
    parts: dict[str, Any] = dict(held_parameters(trainer.model, layout))
    for name, entries in held_optimizer(trainer.optimizer, trainer.model, layout).state.items():
        parts |= {f"{name}/{key}": value for key, value in entries.items()}
    state, filled = {}, {}
    for report in gather({key: described(value) for key, value in parts.items()}):
        for key, value in report.items():
            if not isinstance(value, tuple):
                state[key] = value
                continue
            shape, dtype, pieces = value
            full = state.setdefault(key, torch.zeros(shape, dtype=dtype))
            known = filled.setdefault(key, torch.zeros(shape, dtype=torch.bool))
            for box, part in pieces:
                place = tuple(slice(start, start + size) for start, size in zip(box.starts, box.sizes, strict=True))
                assert torch.equal(full[place][known[place]], part[known[place]]), key
                full[place], known[place] = part, True
    assert all(known.all() for known in filled.values())
    return state


def described(value: Any) -> Any:
    if not isinstance(value, Held):
        return value
    return value.shape, value.dtype, [(piece.box, piece.view.clone()) for piece in value.pieces]


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        equal = torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name]
        assert equal, name


def assert_close(first: torch.Tensor, second: torch.Tensor, what: str, tolerance: Tolerance = FP32) -> None:
    bound = tolerance.atol + tolerance.rtol * first.abs().max()
    assert (first - second).abs().max() <= bound, what


class OneDevice:
    """The same training by a plain loop."""

    def __init__(self, model: nn.Module, case: str, optimizer: Any, grad_clip: float | None = None) -> None:
        self.model, self.case, self.clip = model, case, grad_clip
        self.optimizer = optimizer(model.parameters())
        self.scheduler = decay(self.optimizer)
        self.steps = 0

    def step(self) -> float:
        self.optimizer.zero_grad()
        inputs, targets = batch(self.case, self.steps)
        loss = models.CASES[self.case].loss_fn(self.model(inputs), targets)
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.scheduler.step()
        self.steps += 1
        return loss.item()

    def everything(self) -> dict[str, Any]:
        state: dict[str, Any] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for name, parameter in self.model.named_parameters():
            state |= {f"{name}/{key}": value for key, value in self.optimizer.state[parameter].items()}
        return state


@pytest.mark.parametrize(("via", "chain"), [("memory", CHAIN), ("disk", ("zero=3", "tp=2", "zero=1"))])
def test_a_chain_of_layouts(via: str, chain: tuple[str, ...]) -> None:
    """One device's losses, weights and moments at every step; every byte the same right after each change."""
    world_size = 4 if via == "memory" else 2

    def on_rank() -> None:
        torch.manual_seed(0)
        plain = OneDevice(Counting(), "gpt", adamw, 0.5)
        trainer = make(chain[0], scheduler=decay, grad_clip=0.5)
        optimizer, scheduler = trainer.optimizer, trainer._stepper.scheduler
        trainer.model.blocks[1].mlp.eval()
        for number, spec in enumerate((*chain[1:], chain[0])):
            for _ in range(2 if number == 0 else 1):
                assert take_step(trainer) == pytest.approx(plain.step(), rel=1e-5), spec
            trainer.model.scale += 0.125  # in no state dict
            plain.model.scale += 0.125
            before = everything(trainer)
            with quiet() as text:
                trainer.replan(spec, via=via)
            assert_same(before, everything(trainer))
            assert trainer.plan == trainer._stepper.layout.plan == nt.Plan.parse(spec).resolve(world_size)
            assert (trainer.optimizer, scheduler.optimizer, trainer.num_steps) == (optimizer, optimizer, number + 2)
            assert not trainer.model.blocks[1].mlp.training
            assert trainer.model.blocks[0].mlp.training
            assert trainer._told in trainer.describe()
            assert (trainer._told in text.getvalue()) == (rank() == 0)
            assert trainer.grad_norm is not None
        assert take_step(trainer) == pytest.approx(plain.step(), rel=1e-5)
        assert world_size == 4 or trainer.model.calls == len(chain) + 2  # microbatches of a pipeline are calls too
        after, expected = everything(trainer), plain.everything()
        assert after.keys() == expected.keys() - {"scale"}
        for name in after.keys() - {"seen"}:
            assert_close(expected[name].detach(), after[name], name)

    run_ranks(on_rank, world_size, timeout=110)


def test_statistics_momentum_and_unused_parameters_come_along() -> None:
    """Batch statistics are buffers; what no step uses has no state; an option of a plan changes alone."""

    class Idle(models.ConvNet):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(3, 3)

    def on_rank() -> None:
        torch.manual_seed(0)
        plain = OneDevice(Idle(), "conv", momentum)
        trainer = make("zero=3", Idle, optimizer=momentum, scheduler=decay)
        for spec in ("zero=1,bucket_mb=0.001", "zero=1,recompute=full", "zero=2", "zero=0", "zero=3"):
            assert take_step(trainer, "conv") == pytest.approx(plain.step(), rel=1e-5), spec
            before = everything(trainer)
            with quiet():
                trainer.replan(spec)
            assert_same(before, everything(trainer))
        assert take_step(trainer, "conv") == pytest.approx(plain.step(), rel=1e-5)
        for name, value in everything(trainer).items():
            assert_close(plain.everything()[name].detach().float(), value.float(), name)

    run_ranks(on_rank, 2)


def test_the_old_layout_holds_nothing() -> None:
    """Though the notebook holds on to the model, its parameters, and what they were gathered into."""

    def on_rank() -> None:
        trainer = make("zero=3")
        for spec in ("zero=1", "tp=2", "pp=2", "zero=0", "zero=3"):
            take_step(trainer)
            old, module = trainer.model, getattr(trainer.model, "module", trainer.model)
            held = [*old.parameters(), *module.buffers()]
            memory = {name: StorageWeakRef(tensor.untyped_storage()) for name, tensor in owned(trainer).items()}
            with quiet():
                trainer.replan(spec)
            assert sum(local(tensor).numel() for tensor in held) == 0
            assert all(tensor.grad is None for tensor in held)
            assert not [name for name, reference in memory.items() if not reference.expired()], spec
            for use in (old, module):
                with pytest.raises(ModelError, match=r"laid out anew.*trainer\.model"):
                    use(batch("gpt", 0)[0])
            with pytest.raises(ModelError, match="laid out anew"):
                nt.parallelize(old, trainer.plan)

    run_ranks(on_rank, 2, timeout=100)


def owned(trainer: nt.Trainer) -> dict[str, torch.Tensor]:
    """This rank's memory of weights, buffers and optimizer state."""
    module = getattr(trainer.model, "module", trainer.model)
    found = dict(module.named_parameters()) | dict(module.named_buffers())
    for number, (_, entries) in enumerate(trainer.optimizer.state.items()):
        found |= {f"{number}/{key}": value for key, value in entries.items()}
    return {name: local(tensor.detach()) for name, tensor in found.items()}


class Global(torch.optim.SGD):
    """Not known to step each parameter by itself."""


def test_what_is_refused_changes_nothing() -> None:
    """One error with its cure; then the next loss, and every byte, are those of a trainer that nobody asked."""

    def on_rank() -> None:
        trainer, twin = make("tp=2"), make("tp=2")
        take_step(trainer), take_step(twin)
        data = torch.utils.data.TensorDataset(*batch("gpt", 0))
        whole_loader = trainer.loader(data, batch_size=6)
        refused: list[tuple[Any, type[NbtrainError], str]] = [
            ("tp=3", PlanError, "tp=3"),
            ({"tp": 2}, PlanError, "nt.Plan"),
            (None, PlanError, r"None is not a plan; type e\.g\. nt\.Plan\(zero=1\)"),
            ("zero=3,offload=nothing", PlanError, "offload"),
            (nt.Plan(tp=4, tp_plan={"nothing.here": "colwise"}), PlanError, "nothing.here"),
            ("dp_shard=4,zero=3", BatchError, "batch_size=6"),
        ]
        model = trainer.model
        before = everything(trainer)
        with quiet():
            for plan, kind, words in refused:
                with pytest.raises(kind, match=words):
                    trainer.replan(plan)
            with pytest.raises(UsageError, match=r"via='dsk'.*did you mean 'disk'"):
                trainer.replan("tp=2", via="dsk")
            with pytest.raises(UsageError, match="plan differs between ranks"):
                trainer.replan("tp=2" if rank() else "tp=4")
            again = nt.Trainer(trainer.model, optimizer=momentum, loss_fn=models.token_mean)
            with pytest.raises(UsageError, match="1 more trainer trains the model"):
                trainer.replan("tp=4")
            del again
        assert trainer.model is model
        assert_same(before, everything(trainer))
        assert take_step(trainer) == take_step(twin)
        assert_same(everything(twin), everything(trainer))
        del whole_loader
        with quiet():
            trainer.replan("zero=3")

    run_ranks(on_rank, 2 * 2)


def test_an_optimizer_that_cannot_follow() -> None:
    """Found when everything but the numbers is there: nothing was changed."""

    def on_rank() -> None:
        for optimizer, spec, via, words in (
            (lambda params: Global(params, lr=0.1), "zero=1", "disk", "per_parameter"),
            (lambda params: torch.optim.Adafactor(params, lr=0.01), "tp=2", "memory", "parts of parameters"),
            (
                lambda params: torch.optim.Adafactor(params, lr=0.01),
                "zero=3",
                "memory",
                "laid out so|cannot step",
            ),
        ):
            trainer = make("zero=0", models.MLP, optimizer=optimizer, loss_fn=nn.functional.mse_loss)
            take_step(trainer, "mlp")
            before = everything(trainer)
            with pytest.raises(OptimizerError, match=words), quiet():
                trainer.replan(spec, via=via)
            assert_same(before, everything(trainer))
            take_step(trainer, "mlp")
        before = everything(trainer)
        with quiet():  # whole parameters, dealt out to ranks
            trainer.replan("zero=1")
        assert_same(before, everything(trainer))
        take_step(trainer, "mlp")

    run_ranks(on_rank, 2)


def test_an_interrupt_leaves_the_old_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """It falls while tensors move."""

    def on_rank() -> None:
        trainer, twin = make("zero=3"), make("zero=3")
        take_step(trainer), take_step(twin)

        def interrupted(move: Move, *args: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Move, "_pass", interrupted)
            with pytest.raises(KeyboardInterrupt), quiet():
                trainer.replan("tp=2")
        assert take_step(trainer) == take_step(twin)
        with quiet():
            trainer.replan("tp=2")
        assert take_step(trainer) == pytest.approx(take_step(twin), rel=1e-5)

    run_ranks(on_rank, 2)


def test_who_is_cut_off_in_the_agreement_follows_the_others() -> None:
    """Rank 1 holds all of the new layout when it is interrupted, and rank 0 has switched."""

    def live_on(life: Life) -> None:
        trainer, twin = make("zero=3"), make("zero=3")
        take_step(trainer), take_step(twin)
        if life.rank == 1:
            agree = replanning.gather

            def cut_off(thing: Any) -> Any:
                agree(thing)
                raise KeyboardInterrupt

            replanning.gather = cut_off
        with contextlib.suppress(KeyboardInterrupt), quiet():
            trainer.replan("tp=2")
        assert trainer.plan.tp == (1 if life.rank == 1 else 2)
        life.rejoin(1, ())
        assert trainer.plan.tp == 2
        for _ in range(2):
            assert take_step(trainer) == pytest.approx(take_step(twin), rel=1e-5)

    run_lives(live_on, live_on, 2, ())


@pytest.mark.parametrize("spec", ["zero=3", "tp=2"])
def test_a_rank_that_dies_behind_a_change_is_healed(spec: str) -> None:
    """By what mirrors its shards since the change, or by its replica; the newcomer has the new layout."""

    def live_on(life: Life) -> Any:
        trainer = make("zero=0", redundancy=True, scheduler=decay)
        namespace = {"trainer": trainer, "model": trainer.model}
        take_step(trainer)
        with quiet():
            replanning.replan(trainer, spec, "auto", None, (namespace,))
        assert namespace["model"] is trainer.model
        take_step(trainer)
        if life.rank == 3:
            die()
        with contextlib.suppress(RuntimeError):
            take_step(trainer)
        return go_on(life, namespace)

    def begin(life: Life) -> Any:
        return go_on(life, {})

    def go_on(life: Life, namespace: dict[str, Any]) -> Any:
        life.rejoin(1, (3,))
        assert heal(namespace, (3,)) == {"healed": ["trainer", "model"], "lost": {}, "missing": [], "reset": []}
        trainer = namespace["trainer"]
        losses = [take_step(trainer) for _ in range(2)]
        with quiet():
            trainer.replan("zero=0")
        return [*losses, take_step(trainer)]

    plain = OneDevice(seeded(Counting), "gpt", adamw)
    expected = [plain.step() for _ in range(5)][2:]
    for got in run_lives(live_on, begin, 4, (3,)):
        assert got is None or got == pytest.approx(expected, rel=1e-5)


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def test_loaders_go_on_in_the_middle_of_an_epoch() -> None:
    """Each sample once an epoch, in one device's order, whoever reads it by the plan of the moment."""

    def on_rank() -> None:
        trainer = make("zero=3")
        data = torch.utils.data.TensorDataset(torch.arange(48))
        own = trainer.loader(data, batch_size=8)
        other = nt.loader(data, trainer.plan, batch_size=8)  # of the only model that is laid out so
        one_device = [chunk.tolist() for chunk in torch.tensor(list(own._order.batches(0))).unbind()]
        seen = []
        for number, (samples,) in enumerate(own):
            parts = {data_coordinate(trainer.plan, r): part for r, part in enumerate(gather(samples.tolist()))}
            seen.append([sample for _, part in sorted(parts.items()) for sample in part])
            if number in (1, 3):
                with quiet():
                    trainer.replan("tp=2" if number == 1 else "tp=4")
        assert seen == one_device
        assert len(next(iter(other))[0]) == 8
        uneven = trainer.loader(data, batch_size=8, uneven=True)
        with pytest.raises(BatchError, match="uneven=True"), quiet():
            trainer.replan("zero=3")
        del uneven
        with quiet():
            trainer.replan("zero=3")
        assert len(next(iter(own))[0]) == 2

    run_ranks(on_rank, 4)


def test_fp16_keeps_its_scale() -> None:
    """And what was counted; another precision begins with its own."""

    def on_rank() -> None:
        trainer = make("zero=0,precision=fp16")
        trainer._stepper.scaling = Scaling(2.0**20)  # overflows
        take_step(trainer)
        assert trainer.num_skipped
        told = trainer.loss_scale, trainer.num_skipped, trainer._stepper.reference
        with quiet():
            trainer.replan("zero=3,precision=fp16")
            assert (trainer.loss_scale, trainer.num_skipped, trainer._stepper.reference) == told
            take_step(trainer)
            trainer.replan("zero=3")
        assert (trainer.loss_scale, trainer.num_skipped) == (None, 0)
        take_step(trainer)

    run_ranks(on_rank, 2)


def test_where_memory_is_short_the_old_layout_waits_on_disk(tmp_path: Path) -> None:
    """Nothing of it is in memory when the new one is made; who is cut off then says that the trainer is lost."""
    (tmp_path / "memory.current").write_text("900000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100000\n")

    def on_rank() -> None:
        spill._CGROUP = tmp_path
        trainer = make("zero=3")
        take_step(trainer)
        seen: list[int] = []
        lay_out = Draft.lay_out

        def watched(draft: Draft) -> Any:
            state = [v for s in trainer.optimizer.state.values() for v in s.values()]
            seen.append(sum(local(tensor).nbytes for tensor in [*trainer.model.parameters(), *state]))
            return lay_out(draft)

        Draft.lay_out = watched
        for limit, is_beside in (("max", True), ("900000000", False), ("2000000000", True)):
            (tmp_path / "memory.max").write_text(f"{limit}\n")
            torch.distributed.barrier()
            with quiet():
                trainer.replan("zero=0" if trainer.plan.zero else "zero=3")
            assert (seen[-1] > 0) == is_beside, limit
            torch.distributed.barrier()
        take_step(trainer)

        def cut_off(draft: Draft) -> Any:
            raise RuntimeError("Connection closed by peer")

        Draft.lay_out = cut_off
        with pytest.raises(RuntimeError, match="Connection closed"), quiet():
            trainer.replan("zero=3" if trainer.plan.zero == 0 else "zero=0", via="disk")
        with pytest.raises(
            SessionError, match=r"through files \(Connection closed by peer\).*load the last checkpoint"
        ):
            take_step(trainer)

    run_ranks(on_rank, 2)


def test_one_device_has_one_layout() -> None:
    def on_rank() -> None:
        trainer = make("zero=0")
        trainer.replan("zero=0")
        with pytest.raises(UsageError, match="one device"):
            trainer.replan("zero=0,recompute=full")

    run_ranks(on_rank, 1, group=False)
