"""What people do in a model's forward, around the modules that stages run: right in a pipeline, or an error."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import nn

import nbtrain as nt
from nbtrain.errors import ModelError

WIDTH, CLASSES = 8, 3


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] | None = None, depth: int = 4) -> None:
        super().__init__()
        make = block or (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.inlet, self.outlet = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(make() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(self.through(self.inlet(x)))

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Expert(nn.Module):
    """Leaves an auxiliary loss on itself, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh()
        self.aux = y.square().mean(1)
        return y


class Auxiliary(Net):
    def __init__(self) -> None:
        super().__init__(Expert)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + sum(block.aux for block in self.blocks)[:, None] * torch.arange(CLASSES)


class WrittenInto(Net):
    """``x`` crosses, and the model's own code has written into it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        x *= 1.5
        return self.outlet(self.through(x) + x)


class InPlaceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu, self.linear = nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.relu(x))


class PassedOn(Net):
    """``h`` passes a stage whose first block writes into it."""

    def __init__(self) -> None:
        super().__init__(InPlaceBlock, depth=6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[1](self.blocks[0](self.inlet(x)))
        x = h
        for block in self.blocks[2:]:
            x = block(x)
        return self.outlet(x + h)


class Complex(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.complex(self.inlet(x), x)
        for block in self.blocks:
            x = torch.complex(block(x.real), x.imag * 0.5)
        return self.outlet(x.abs())


class Deciding(Net):
    """Python's own code looks at an activation and at a parameter, and all that follows depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        scale = 2.0 if x.abs().max() > 0 else 1.0
        x = self.through(x)
        return self.outlet(x * scale if self.gate > 0 else x) * self.gate


class Penalised(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.05 * sum(one.square().sum() for one in self.parameters()) * torch.arange(CLASSES)


class Inner(Net):
    """Calls what is inside of a module, and never the module."""

    class Backbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("never called")

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Inner.Backbone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.backbone.norm(self.backbone.stem(x)))


class Again(Net):
    def through(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 2, 1, 3, 1):
            x = self.blocks[index](x)
        return x


class Consuming(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.sub_(0.5))


class Rolling(Net):
    """Python's random numbers: not those of one device, and the same on every stage of a microbatch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rolled = [*getattr(self, "rolled", []), random.random()]
        return super().forward(x)


class Guarded(Net):
    """Looks whether activations are what they should be, as people do when a loss was not finite."""

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            assert torch.isfinite(x).all()
            if torch.isnan(x).any() or x.std() == 0:
                raise ValueError("no numbers")
        return x if x.std() < 100 else x / x.std()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        if not x.std() < 100:
            return self.outlet(x)  # never
        return self.outlet(self.through(x))


class Telling(Net):
    """Prints and remembers what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.last: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.shape[0])
        self.last = {**self.last, f"batch {len(self.seen)}": x.shape[0]}
        print("forward of", tuple(x.shape))
        return super().forward(x)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, WIDTH, generator=g), torch.randint(CLASSES, (8,), generator=g)


def trainer_of(make: Callable[[], nn.Module], loss_fn: Any = F.cross_entropy, **plan: Any) -> nt.Trainer:
    torch.manual_seed(0)
    plan = {"num_microbatches": 4, **plan}
    return nt.Trainer(make(), nt.Plan(**plan), optimizer=sgd, loss_fn=loss_fn)


def check(make: Callable[[], nn.Module], **plan: Any) -> None:
    """Beside a loop over the microbatches on one device."""
    trainer = trainer_of(make, **plan)
    torch.manual_seed(0)
    model = make()
    optimizer = sgd(model.parameters())
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad()
        losses = [F.cross_entropy(model(a.clone()), b) / 4 for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
        sum(losses).backward()
        optimizer.step()
        expected = sum(losses).detach()
        torch.testing.assert_close(trainer.step(x.clone(), y), expected, msg=f"{make.__name__} at step {step}")
    state = {name: value for name, value in model.state_dict().items() if value.dtype.is_floating_point}
    got = trainer.state_dict()
    torch.testing.assert_close({name: got[name] for name in state}, state, rtol=1e-4, atol=1e-5)


HABITS = (Auxiliary, WrittenInto, Complex, Deciding, Penalised, Inner, Again, Consuming, Guarded)


def test_right_as_on_one_device() -> None:
    def on_rank() -> list[float]:
        for make in HABITS:
            check(make, pp=2)
        for make in (Auxiliary, Deciding, Again, Guarded):
            check(make, pp=2, schedule="zbv")
        trainer = trainer_of(Rolling, pp=2)
        trainer.step(*batch(0))
        return trainer.model.rolled[-4:]

    first, second = run_ranks(on_rank, 2)
    assert first == second
    assert len(set(first)) == 4


@pytest.mark.parametrize(("schedule", "axis"), [("1f1b", "pp"), ("zbv", "pp"), ("1f1b", "tp")])
def test_a_model_prints_and_remembers_batches_and_no_trials(schedule: str, axis: str) -> None:
    def on_rank() -> tuple[str, list[int], int]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            trainer = trainer_of(Telling, **{axis: 2}, schedule=schedule)
            trainer.step(*batch(0))
        told = [line for line in out.getvalue().splitlines() if "forward" in line]
        return told, trainer.model.seen, len(trainer.model.last)

    shapes = [2] * 4 if axis == "pp" else [8]
    for told, seen, last in run_ranks(on_rank, 2):
        assert seen == shapes
        assert last == len(shapes)
        assert set(told) == {f"forward of {(shapes[0], WIDTH)}"}


def test_what_a_stage_writes_into_and_passes_on_goes_on_as_it_is() -> None:
    run_ranks(lambda: check(PassedOn, pp=3), 3)


class Appending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, seen: Any) -> torch.Tensor:
        y = self.linear(x)
        if isinstance(seen, list):
            seen.append(y.mean())
        else:
            seen.total = seen.total + y.mean()
        return y


class Total:
    total: Any = 0.0


class Listing(Net):
    def __init__(self, kind: type) -> None:
        super().__init__(Appending)
        self.kind = kind

    def through(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.kind()
        for block in self.blocks:
            x = block(x, seen)
        return x + (sum(seen) if isinstance(seen, list) else seen.total)


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, torch.Tensor] = {}
        self.blocks[1].register_forward_hook(lambda module, args, output: self.seen.update(h=output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.seen["h"].mean()


class Drawing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn(x.shape, generator=self.generator))


class SharedNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.norm(block(x))
        return x


class Numbered(Net):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
            y = self.linear(x)
            return y, y.abs().max().item()

    def __init__(self) -> None:
        super().__init__(Numbered.Block)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, largest = block(x)
            x = x / largest
        return x


REFUSED = {
    "changes a list": (lambda: Listing(list), {}),
    "or object that it was given": (lambda: Listing(Total), {}),
    "let the module return it": (Hooked, {}),
    "torch.Generator": (Drawing, {}),
    "running statistics": (SharedNorm, {}),
    "Python number": (Numbered, {}),
}


def test_what_no_other_stage_could_know_is_refused() -> None:
    def on_rank() -> None:
        for words, (make, plan) in REFUSED.items():
            with pytest.raises(ModelError, match=words):
                trainer_of(make, pp=2, **plan)

    run_ranks(on_rank, 2)


def test_a_loss_function_over_parameters_is_refused_on_the_stage_that_runs_it() -> None:
    def on_rank() -> str:
        held: list[nt.Trainer] = []

        def loss_fn(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(output, y) + sum(one.sum() for one in held[0].model.parameters())

        held.append(trainer_of(Net, loss_fn, pp=2))
        try:
            held[0].step(*batch(0))
        except ModelError as refused:
            return str(refused)
        except RuntimeError:  # the other has gone
            return ""
        return "nothing was said"

    first, last = run_ranks(on_rank, 2)
    assert first == ""
    assert "goes through the model's parameters" in last


def test_a_parameter_that_is_unfrozen_on_one_stage_is_told_on_all() -> None:
    def on_rank() -> None:
        def frozen() -> nn.Module:
            model = Net()
            model.inlet.requires_grad_(False)
            return model

        trainer = trainer_of(frozen, pp=2)
        trainer.step(*batch(0))
        for parameter in trainer.model.parameters():
            parameter.requires_grad_(True)
        with pytest.raises(ModelError, match=r"cannot take a step|unfrozen"):
            trainer.step(*batch(1))

    run_ranks(on_rank, 2)


def test_a_microbatch_in_which_nothing_counts_has_no_gradient() -> None:
    def loss_fn(output: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        keep = y >= 0
        if not keep.any():
            return torch.zeros(()), 0
        return F.cross_entropy(output[keep], y[keep], reduction="sum"), int(keep.sum())

    def on_rank() -> None:
        trainer = trainer_of(Net, loss_fn, pp=2)
        torch.manual_seed(0)
        model = Net()
        x, y = batch(0)
        y[2:4] = -1
        expected = F.cross_entropy(model(x), y, ignore_index=-1)
        torch.testing.assert_close(trainer.step(x, y), expected.detach())

    run_ranks(on_rank, 2)


def test_a_loss_and_its_count_may_lie_in_buffers() -> None:
    total, count = torch.zeros(()), torch.zeros(())

    def in_place(output: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        each = F.cross_entropy(output, y, reduction="none")[y > 0]
        total.copy_(each.detach().sum())
        return each.sum() if each.requires_grad else total, count.fill_(each.numel())

    def plain(output: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        each = F.cross_entropy(output, y, reduction="none")[y > 0]
        return each.sum(), each.numel()

    def on_rank() -> None:
        found = []
        for loss_fn in (in_place, plain):
            torch.manual_seed(0)
            trainer = trainer_of(Net, loss_fn, pp=2, num_microbatches=4)
            losses = [trainer.step(*batch(step)) for step in range(2)]
            found.append([*losses, trainer.evaluate([batch(0), batch(1)])])
        assert found[0] == found[1]

    run_ranks(on_rank, 2)


class Transposed(Net):
    """Activations as a vision transformer's patches come: (B, C, T) seen as (B, T, C)."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)))
        self.patch = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x[:, :, None].expand(-1, -1, 5)).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        return self.outlet(x.mean(1))


def test_dropout_draws_alike_whatever_lies_how_in_memory() -> None:
    def on_rank() -> None:
        losses = []
        for plan in ({"schedule": "1f1b"}, {"schedule": "zbv"}, {"split": ["blocks.1"]}):
            torch.manual_seed(1)
            trainer = trainer_of(Transposed, pp=2, num_microbatches=4, **plan)
            torch.manual_seed(2)
            losses.append([trainer.step(*batch(step)) for step in range(3)])
        assert losses[0] == losses[1] == losses[2]

    run_ranks(on_rank, 2)
