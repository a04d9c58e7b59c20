"""Training goes on behind a rank's death as if it had not died."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import zoo
from lives import Life, die, run_lives
from torch import nn

import nbtrain as nt
from nbtrain.errors import SessionError
from nbtrain.parallel.heal import heal
from nbtrain.parallel.mesh import data_coordinate
from nbtrain.parallel.pipeline import pipeline
from nbtrain.parallel.totals import Tally

STEPS, FATAL = 6, 3
BATCH = 8

PLACES = (
    "forward",
    "backward",
    "mirroring",
    "before the wait",
    "in the wait",
    "behind the wait",
    "optimizer",
    "between",
)
"""Where the rank dies in step `FATAL`."""

LIKE = ("hsdp", "zero2", "bf16")
"""Much like ``ddp`` and ``zero3``: they take some places only."""

TENSOR = ("tp ddp", "tp zero3")
TENSOR_PLACES = ("forward", "in the wait", "optimizer")
"""With ``tp``: peers wait for each other in every layer."""

STAGES = ("pp ddp", "pp zero3", "pp zero1")
STAGE_DEATHS = [
    ("noisy", "pp ddp", "forward", 2),
    ("noisy", "pp ddp", "in the wait", 1),
    ("conv", "pp zero3", "backward", 0),
    ("conv", "pp zero3", "optimizer", 3),
    ("gpt", "pp zero1", "backward", 2),
    ("gpt", "pp zero1", "gathering", 3),
]
"""With ``pp``: the lowest survivor holds other stages than ranks 2 and 3, the embedding is tied over stages, and
dropout goes on without a mirror: what a microbatch draws depends on its number."""

UPDATES = ("zero1", "zero1 mirrored")
UPDATE_PLACES = ("backward", "behind the wait", "optimizer", "gathering")
"""With ``zero=1``: what only it does is behind the wait."""


class Net(nn.Module):
    """Batch normalisation, and a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 33), nn.BatchNorm1d(33), nn.Tanh(), nn.Linear(33, 3))
        self.idle = nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((), 1.5), persistent=False)
        self.calls, self._offset = 0, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers(x) * self.scale + self._offset


# eps: gradients that are 0 but for rounding, as of a key's bias, would be divided by themselves
def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    half = len(params) // 2
    return torch.optim.AdamW([{"params": params[:half]}, {"params": params[half:], "lr": 2e-3}], lr=5e-3, eps=1e-4)


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], str, dict[str, Any]]] = {
    "net": (Net, nn.functional.mse_loss, "mlp", {"optimizer": momentum, "grad_clip": 0.5}),
    "gpt": (models.GPT, models.token_mean, "gpt", {"optimizer": adamw, "scheduler": cosine, "accumulate": 2}),
    "conv": (models.ConvNet, nn.functional.cross_entropy, "conv", {"optimizer": momentum, "grad_clip": 0.5}),
    "noisy": (models.Noisy, models.token_mean, "gpt", {"optimizer": adamw}),
    "split": (zoo.SplitGPT, models.token_mean, "gpt", {"optimizer": adamw, "grad_clip": 0.5}),
}
PLANS = {
    "ddp": ("zero=0", 3, {}),
    "hsdp": ("dp_replicate=2", 4, {}),
    "zero3": ("zero=3", 3, {"redundancy": True}),
    "zero2": ("zero=2", 2, {"redundancy": True}),
    "bf16": ("zero=3,precision=bf16", 2, {"redundancy": True}),
    "zero1": ("zero=1,dp_replicate=2,dp_shard=2", 4, {}),
    "zero1 mirrored": ("zero=1", 3, {"redundancy": True}),
    "pp ddp": ("zero=0,pp=2,num_microbatches=4", 4, {}),
    "pp zero3": ("zero=3,pp=2,num_microbatches=4", 4, {"redundancy": True}),
    "pp zero1": ("zero=1,pp=2,schedule=zbv,num_microbatches=4", 4, {"redundancy": True}),
    "tp ddp": ("zero=0,tp=2", 4, {}),
    "tp zero3": ("zero=3,tp=2,sequence_parallel=true", 4, {"redundancy": True}),
}


def make(kind: str, plan: str) -> nt.Trainer:
    model, loss_fn, _, options = KINDS[kind]
    spec, _, more = PLANS[plan]
    torch.manual_seed(0)
    trainer = nt.Trainer(model(), nt.Plan.parse(spec), loss_fn=loss_fn, **options, **more)
    torch.manual_seed(100 + trainer_rank())
    return trainer


def trainer_rank() -> int:
    return torch.distributed.get_rank()


def share(trainer: nt.Trainer, kind: str, step: int) -> tuple[torch.Tensor, ...]:
    """This rank's part of the batch of ``step``."""
    batch = models.CASES[KINDS[kind][2]].batch(torch.Generator().manual_seed(step), BATCH * 3)
    part = data_coordinate(trainer.plan, trainer_rank())
    return tuple(tensor.chunk(trainer.plan.dp)[part] for tensor in batch)


def doom(trainer: nt.Trainer, place: str) -> None:
    """Makes this rank die in the next step, or before it."""
    if place == "between":
        die()
    if trainer.plan.pp > 1 and place in ("forward", "backward"):
        setattr(pipeline.Stage, f"{place}_one_chunk", _third_time(getattr(pipeline.Stage, f"{place}_one_chunk")))
    elif place == "forward":
        trainer._stepper.loss_fn = lambda *args: die()
    elif place == "backward":
        loss_fn = trainer._stepper.loss_fn
        trainer._stepper.loss_fn = lambda *args: _Fatal.apply(loss_fn(*args))
    if place == "mirroring" and trainer._stepper.mirror is not None:
        trainer._stepper.mirror._trained = die  # its state has been heard, its gradients have not
    elif place in ("mirroring", "before the wait"):
        trainer._stepper._settle = lambda tally: die()
    if place in ("in the wait", "behind the wait"):
        reduce = Tally.reduce

        def fatal(tally: Tally, *args: Any, **options: Any) -> Any:
            if place == "behind the wait":
                reduce(tally, *args, **options)
            die()

        Tally.reduce = fatal
    if place == "optimizer":
        trainer.optimizer.step = die
    if place == "gathering":
        trainer.model._all_gather = lambda buffers: die()


def _third_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """Dies in the middle of a schedule."""
    calls = itertools.count(1)
    return lambda *args, **options: die() if next(calls) == 3 else function(*args, **options)


class _Fatal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        die()
        return gradient


def take_step(trainer: nt.Trainer, kind: str, step: int) -> float:
    module = getattr(trainer.model, "module", trainer.model)
    if step == 1 and isinstance(module, Net):
        module._offset = torch.full((), 0.25)  # in no state dict
    return trainer.step(*share(trainer, kind, step)).item()


def train(namespace: dict[str, Any], kind: str) -> dict[int, float]:
    """The steps that are left; the losses by step."""
    trainer = namespace["trainer"]
    losses = {}
    while trainer.num_steps < STEPS:
        step = trainer.num_steps + 1
        losses[step] = take_step(trainer, kind, step)
    return losses


def states(namespace: dict[str, Any]) -> dict[str, Any]:
    trainer = namespace["trainer"]
    module = getattr(trainer.model, "module", trainer.model)
    extra = {"scale": module.scale} if isinstance(module, Net) else {}
    return {**trainer.state_dict(), **extra}


@functools.cache
def undisturbed(kind: str, plan: str) -> tuple[dict[int, float], dict[str, Any]]:
    def on_rank(life: Life) -> Any:
        namespace = {"trainer": make(kind, plan)}
        return train(namespace, kind), states(namespace)

    return run_lives(on_rank, on_rank, PLANS[plan][1], ())[0]


def disturbed(kind: str, plan: str, dying: tuple[int, ...], place: str) -> list[Any]:
    def live_on(life: Life) -> Any:
        trainer = make(kind, plan)
        namespace = {"trainer": trainer, "model": trainer.model, "optimizer": trainer.optimizer, "before": 1}
        if plan == "pp ddp":
            namespace["positions"] = trainer.model.positions.weight  # of the first stage: the others have a blank
        losses = {}
        try:
            for step in range(1, FATAL + 1):
                if step == FATAL and life.rank in dying:
                    doom(trainer, place)
                losses[step] = take_step(trainer, kind, step)
            trainer.evaluate([share(trainer, kind, 0)])  # where no rank waits for the dead one's step
        except RuntimeError:
            pass
        return go_on(life, namespace, losses)

    def begin(life: Life) -> Any:
        return go_on(life, {}, {})

    def go_on(life: Life, namespace: dict[str, Any], losses: dict[int, float]) -> Any:
        life.rejoin(1, dying)
        report = heal(namespace, dying)
        # two ranks that have the same number say that it is nobody's own
        missing = [] if PLANS[plan][1] - len(dying) > 1 else ["before"]
        healed = ["trainer", "model", "optimizer", *(["positions"] if plan == "pp ddp" else [])]
        assert report == {"healed": healed, "lost": {}, "missing": missing, "reset": []}
        trainer = namespace["trainer"]
        assert namespace["model"] is trainer.model
        assert namespace["optimizer"] is trainer.optimizer
        assert getattr(trainer.model, "calls", FATAL) >= FATAL - 1
        losses |= train(namespace, kind)
        trainer.evaluate([share(trainer, kind, 0)])
        return losses, states(namespace)

    return [result for result in run_lives(live_on, begin, PLANS[plan][1], dying) if result is not None]


def check(kind: str, plan: str, dying: tuple[int, ...], place: str) -> None:
    losses, state = undisturbed(kind, plan)
    results = disturbed(kind, plan, dying, place)
    assert len(results) == PLANS[plan][1]
    for got, after in results:
        assert got == pytest.approx({step: losses[step] for step in got}, rel=2e-6)
        assert set(got) >= set(range(FATAL + 1, STEPS + 1))
        torch.testing.assert_close(after, state, rtol=1e-5, atol=1e-6)


def _sweep() -> list[Any]:
    """Every plan with every place; models and ranks take turns."""
    cases = []
    everywhere = itertools.product([plan for plan in PLANS if plan not in (*UPDATES, *TENSOR, *STAGES, *LIKE)], PLACES)
    some = [
        *itertools.product(LIKE, PLACES[::3]),
        *itertools.product(UPDATES, UPDATE_PLACES),
        *itertools.product(TENSOR, TENSOR_PLACES),
    ]
    for turn, (plan, place) in enumerate([*everywhere, *some]):
        # dropout goes on where a mirror knows how
        kinds = ["net", "gpt", "noisy"] if PLANS[plan][2] else ["net", "gpt"]
        if plan in TENSOR:
            kinds = ["split"]
        case = (kinds[turn % len(kinds)], plan, place, (turn + turn // len(PLACES)) % PLANS[plan][1])
        # of the places that are left out here, another plan has some
        is_left_out = plan not in (*UPDATES, *TENSOR) and (turn + turn // len(PLACES)) % 2 == 1
        cases.append(pytest.param(*case, marks=[pytest.mark.slow] * is_left_out))
    return [*cases, *STAGE_DEATHS]


@pytest.mark.parametrize(("kind", "plan", "place", "rank"), _sweep())
def test_wherever_a_rank_dies(kind: str, plan: str, place: str, rank: int) -> None:
    check(kind, plan, (rank,), place)


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan not in ("tp zero3", *STAGES)])  # attention is inline
@pytest.mark.parametrize("kind", ["gpt", "noisy"])
def test_tied_weights_schedules_accumulation_and_dropout(kind: str, plan: str) -> None:
    if kind == "noisy" and not PLANS[plan][2]:
        pytest.skip("without a mirror nobody knows the dead rank's random state")
    check(kind, plan, (PLANS[plan][1] - 1,), "in the wait")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "dying"),
    [
        ("ddp", (0,)),
        ("ddp", (2,)),
        ("ddp", (0, 2)),
        ("hsdp", (0, 1)),
        ("hsdp", (0, 3)),
        ("zero3", (0,)),
        ("zero3", (2,)),
        ("zero2", (0,)),
        ("zero2", (1,)),
    ],
)
def test_whoever_dies(plan: str, dying: tuple[int, ...]) -> None:
    check("net", plan, dying, "behind the wait")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "hsdp", "zero3", "zero2"])
def test_one_after_another(plan: str) -> None:
    """The newcomer dies too, then the rank that had its mirror."""
    world_size = PLANS[plan][1]
    losses, state = undisturbed("net", plan)
    dying = (0, 0, 1)

    def live_on(life: Life) -> Any:
        return go_on(life, {"trainer": make("net", plan)}, 0)

    def begin(life: Life, generation: int) -> Any:
        return go_on(life, {}, generation)

    def go_on(life: Life, namespace: dict[str, Any], generation: int) -> Any:
        got = {}
        while True:
            if generation:
                life.rejoin(generation, (dying[generation - 1],))
                report = heal(namespace, (dying[generation - 1],))
                assert report == {"healed": ["trainer"], "lost": {}, "missing": [], "reset": []}
            trainer = namespace["trainer"]
            if generation == len(dying):
                return got | train(namespace, "net"), states(namespace)
            step = trainer.num_steps + 1
            got[step] = take_step(trainer, "net", step)
            if life.rank == dying[generation]:
                die()
            generation += 1

    results = run_lives(live_on, begin, world_size, dying)
    alive = [result for result in results if result is not None]
    assert len(alive) == world_size
    for got, after in alive:
        assert got == pytest.approx({step: losses[step] for step in got}, rel=2e-6)
        torch.testing.assert_close(after, state, rtol=1e-5, atol=1e-6)


def test_a_stage_that_no_other_rank_has_is_lost() -> None:
    def live_on(life: Life) -> None:
        torch.manual_seed(0)
        trainer = nt.Trainer(
            models.ConvNet(), nt.Plan(pp=2, num_microbatches=4), optimizer=momentum, loss_fn=nn.functional.cross_entropy
        )
        trainer.step(*models.CASES["conv"].batch(torch.Generator().manual_seed(1), BATCH))
        if life.rank == 1:
            die()
        go_on(life, {"trainer": trainer})
        with pytest.raises(SessionError, match=r"the trainer ended with rank 1: .*; make the model and the trainer"):
            trainer.evaluate([models.CASES["conv"].batch(torch.Generator().manual_seed(2), BATCH)])

    def go_on(life: Life, namespace: dict[str, Any]) -> None:
        life.rejoin(1, (1,))
        report = heal(namespace, (1,))
        assert "dp_replicate=2 keeps a copy" in report["lost"]["trainer"]

    run_lives(live_on, lambda life: go_on(life, {}), 2, (1,))
