"""A step that raises: nothing was stepped, and the next one gives one device's numbers."""

import signal
import threading
from typing import Any

import models
import pytest
import torch
from parity import rank, world_size
from ranks import run_ranks
from torch import nn

import nbtrain as nt
from nbtrain.errors import SessionError
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
        for place in ("first forward", "forward", "backward", "second chunk", "loss", "optimizer"):
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
        self._loss_fn, self._step = trainer._stepper.loss_fn, trainer.optimizer.step
        self._calls = 0

    def __enter__(self) -> None:
        self._model().fail_in = self._place.removeprefix("first ")
        Raises.armed = self._place == "backward"
        if self._place in ("loss", "second chunk"):
            self._trainer._stepper.loss_fn = self._failing_loss
        if self._place == "optimizer":
            self._trainer.optimizer.step = self._fail

    def __exit__(self, *error: object) -> None:
        self._model().fail_in, Raises.armed = "", False
        self._trainer._stepper.loss_fn, self._trainer.optimizer.step = self._loss_fn, self._step

    def _model(self) -> Any:
        return getattr(self._trainer.model, "module", self._trainer.model)

    def _failing_loss(self, *args: Any) -> torch.Tensor:
        self._calls += 1
        if self._calls == (2 if self._place == "second chunk" else 1):
            raise Fault
        return models.token_mean(*args)

    def _fail(self) -> None:
        raise Fault


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
