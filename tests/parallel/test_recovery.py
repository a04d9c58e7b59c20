"""A step that raises: nothing was stepped, and the next one gives one device's numbers."""

import signal
import threading
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from parity import rank, world_size
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

import nbtrain as nt
from nbtrain.errors import SessionError, UsageError
from nbtrain.interrupts import uninterrupted
from nbtrain.parallel.phase import Phase, Stage

PLANS = [
    ("zero=0", 2),
    ("zero=1,bucket_mb=0.004", 2),
    ("zero=2", 2),
    ("zero=3", 2),
    pytest.param("zero=3,dp_replicate=2", 4, marks=pytest.mark.slow),
    ("zero=3,precision=bf16", 2),
]


class Fault(Exception):
    pass


class Raises(torch.autograd.Function):
    """Identity whose backward raises while ``armed``."""

    armed = False

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Raises.armed:
            raise Fault
        return gradient


class Faulty(models.GPT):
    """Raises where ``fail_in`` says, in the second of three blocks: collectives of the others were done before."""

    fail_in = ""
    calls = 0

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for index, block in enumerate(self.blocks):
            if index == 1 and self.fail_in == "forward":
                raise Fault
            x = block(x)
            if index == 1:
                x = Raises.apply(x)
        return self.head(self.norm(x))


def trainer_of(spec: str, **options: Any) -> nt.Trainer:
    torch.manual_seed(0)
    return nt.Trainer(
        Faulty(),
        nt.Plan.parse(spec),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        loss_fn=models.token_mean,
        **options,
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(models.V, (8, models.T), generator=generator)
    share = ids.chunk(world_size())[rank()]
    return share, share.flip(1)


@pytest.mark.parametrize(("spec", "ranks"), PLANS)
def test_after_an_exception_training_goes_on_as_if_nothing_happened(spec: str, ranks: int) -> None:
    def at(place: str) -> None:
        undisturbed, trainer = trainer_of(spec, accumulate=2), trainer_of(spec, accumulate=2)
        for step in range(0 if place == "first forward" else 2):
            assert trainer.step(*batch(step)) == undisturbed.step(*batch(step))
        before = trainer.state_dict()
        with pytest.raises(Fault), fault(trainer, place):
            trainer.step(*batch(9))
        assert trainer.phase == Phase(Stage.STEPPED, undisturbed.num_steps)
        assert all(parameter.grad is None for parameter in trainer.model.parameters())
        torch.testing.assert_close(trainer.state_dict(), before, rtol=0, atol=0)
        for step in range(2, 5):
            torch.testing.assert_close(trainer.step(*batch(step)), undisturbed.step(*batch(step)))
        torch.testing.assert_close(trainer.state_dict(), undisturbed.state_dict())

    def on_rank() -> None:
        for place in ("first forward", "forward", "backward", "second chunk", "loss"):
            at(place)

    run_ranks(on_rank, ranks)


@pytest.mark.parametrize("spec", ["zero=2", "zero=3", "zero=3,pp=2,dp_shard=2"])
def test_a_forward_outside_of_a_step_that_raises_costs_nothing(spec: str) -> None:
    def on_rank() -> None:
        trainer, undisturbed = trainer_of(spec), trainer_of(spec)
        share = torch.randint(models.V, (4, models.T), generator=torch.Generator().manual_seed(3))
        fails = [lambda: trainer.model(share.double()), lambda: trainer.evaluate([(share, share[:, :2])])]
        for fail in fails[: 1 if "pp" in spec else 2]:  # the loss is on one stage only
            with pytest.raises(Exception, match=r"size|dtype|type|stages"):
                fail()
            torch.testing.assert_close(trainer.step(share, share), undisturbed.step(share, share))

    run_ranks(on_rank, 4 if "pp" in spec else 2)


class fault:  # reads as a word where it is used
    """Makes the next step of ``trainer`` raise at ``place``."""

    def __init__(self, trainer: nt.Trainer, place: str) -> None:
        self._trainer, self._place = trainer, place
        self._loss_fn = trainer._stepper.loss_fn
        self._calls = 0

    def __enter__(self) -> None:
        self._model().fail_in = self._place.removeprefix("first ")
        Raises.armed = self._place == "backward"
        if self._place in ("loss", "second chunk"):
            self._trainer._stepper.loss_fn = self._failing_loss

    def __exit__(self, *error: object) -> None:
        self._model().fail_in, Raises.armed = "", False
        self._trainer._stepper.loss_fn = self._loss_fn

    def _model(self) -> Any:
        return getattr(self._trainer.model, "module", self._trainer.model)

    def _failing_loss(self, *args: Any) -> torch.Tensor:
        self._calls += 1
        if self._calls == (2 if self._place == "second chunk" else 1):
            raise Fault
        return models.token_mean(*args)


class Halting(torch.optim.SGD):
    """Raises when it has stepped half of its parameters, as one does that runs out of memory."""

    armed = False

    def step(self, closure: Any = None) -> None:
        held = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        for index, parameter in enumerate(held):
            if self.armed and index == len(held) // 2:
                raise RuntimeError("out of memory, as it were")
            parameter.data.add_(parameter.grad, alpha=-0.1)  # which no version counter sees


@pytest.mark.parametrize("spec", ["zero=0", "zero=3", "zero=0,pp=2,num_microbatches=2"])
@pytest.mark.parametrize("who", [(0,), (0, 1)])
def test_an_optimizer_that_raises_leaves_a_mixture_that_nobody_uses(
    spec: str, who: tuple[int, ...], tmp_path: Path
) -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        make = {"optimizer": lambda params: Halting(params, lr=0.1), "loss_fn": models.token_mean}
        trainer = nt.Trainer(Faulty(), nt.Plan.parse(spec), **make)
        ids = torch.randint(models.V, (4, models.T), generator=torch.Generator().manual_seed(1))
        first = trainer.step(ids, ids)
        saved = trainer.save(tmp_path / "run").path
        Halting.armed = rank() in who
        try:
            trainer.step(ids, ids)
        except RuntimeError:
            assert rank() in who
        Halting.armed = False
        uses = [trainer.state_dict, lambda: trainer.save(tmp_path), lambda: trainer.replan("zero=1")]
        uses += [lambda: trainer.step(ids, ids), lambda: trainer.evaluate([(ids, ids)])]
        for use in uses if len(who) == 2 else ():  # another rank would wait in them
            with pytest.raises(SessionError, match=r"raised in step 2 \(RuntimeError: out of memory.*trainer\.load"):
                use()
        trainer.load(saved)
        assert trainer.num_steps == 1
        second = trainer.step(ids, ids)
        assert second < first
        trainer.load(saved)
        assert trainer.step(ids, ids) == second

    run_ranks(on_rank, 2)


def test_fsdp_completes_itself_whatever_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_rank() -> None:
        trainer, undisturbed = trainer_of("zero=3"), trainer_of("zero=3")
        complete = FSDPParam.init_dtype_attrs

        def interrupted(self: Any, *args: Any) -> None:
            monkeypatch.setattr(FSDPParam, "init_dtype_attrs", complete)
            signal.raise_signal(signal.SIGINT)
            complete(self, *args)

        monkeypatch.setattr(FSDPParam, "init_dtype_attrs", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.step(*batch(0))
        assert trainer.step(*batch(0)) == undisturbed.step(*batch(0))

    run_ranks(on_rank, 2)


def test_ranks_in_steps_of_different_trainers_are_told() -> None:
    def on_rank() -> None:
        for spec in ("zero=0", "zero=1", "zero=0,pp=2,num_microbatches=2"):
            first, second = trainer_of(spec), trainer_of(spec)
            ids = torch.randint(models.V, (4, models.T), generator=torch.Generator().manual_seed(1))
            mine = first if rank() == 0 else second
            with pytest.raises(UsageError, match=r"steps of different trainers|do not all do the same"):
                mine.step(ids, ids)
            with pytest.raises(UsageError, match=r"steps of different trainers|do not all do the same"):
                mine.evaluate([(ids, ids)])
            with pytest.raises(
                UsageError, match=r"rank 1 is in Trainer.save of trainer \d+, and rank 0 in Trainer.save of"
            ):
                mine.save("nowhere")
            assert first.step(ids, ids) == second.step(ids, ids)

    run_ranks(on_rank, 2)


def test_learning_rates_that_differ_between_ranks_are_told() -> None:
    def on_rank() -> None:
        trainer = trainer_of("zero=1")
        trainer.step(*batch(0))
        before = trainer.state_dict()
        trainer.optimizer.param_groups[0]["lr"] = 0.1 if rank() else 0.2
        with pytest.raises(UsageError, match="learning rates differ between ranks"):
            trainer.step(*batch(1))
        torch.testing.assert_close(trainer.state_dict(), before, rtol=0, atol=0)
        trainer.optimizer.param_groups[0]["lr"] = 0.05
        trainer.step(*batch(1))

    run_ranks(on_rank, 2)


def test_an_interrupt_is_delivered_behind_the_optimizer() -> None:
    def on_rank() -> None:
        trainer = trainer_of("zero=0")
        plain_step = trainer.optimizer.step
        cut = []

        def interrupted_step() -> None:
            signal.raise_signal(signal.SIGINT)
            cut.append(False)
            plain_step()

        trainer.optimizer.step = interrupted_step
        with pytest.raises(KeyboardInterrupt):
            trainer.step(*batch(0))
        assert cut == [False]
        assert trainer.phase == Phase(Stage.STEPPED, 1)
        trainer.optimizer.step = plain_step
        trainer.step(*batch(1))

    run_ranks(on_rank, 2)


def test_ranks_that_were_cut_apart_never_scale_gradients_by_different_references() -> None:
    def on_rank() -> None:
        undisturbed, trainer = trainer_of("zero=3"), trainer_of("zero=3")
        for step in range(2):
            trainer.step(*batch(step))
            undisturbed.step(*batch(step))
        trainer._stepper.reference += rank()  # as if one rank had not passed the last reduction
        with pytest.raises(SessionError, match=r"call trainer\.step again"):
            trainer.step(*batch(2))
        torch.testing.assert_close(trainer.step(*batch(2)), undisturbed.step(*batch(2)))
        torch.testing.assert_close(trainer.state_dict(), undisturbed.state_dict())

    run_ranks(on_rank, 2)


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    seen: list[Any] = []

    def work() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handler]


def test_the_handler_is_put_back() -> None:
    handler = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        assert signal.getsignal(signal.SIGINT) is not handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_model_keeps_its_mode_and_the_phase_counts() -> None:
    def on_rank() -> None:
        trainer = nt.Trainer(
            nn.Linear(2, 1),
            nt.Plan(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            loss_fn=nn.functional.mse_loss,
        )
        assert trainer.phase == Phase(Stage.STEPPED, 0)
        trainer.model.eval()
        trainer.step(torch.ones(2, 2), torch.ones(2, 1))
        assert not trainer.model.training
        assert trainer.num_steps == 1

    run_ranks(on_rank, 1, group=False)
