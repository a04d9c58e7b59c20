"""What cannot be carried over to a newcomer is lost on all ranks alike, with what to type; the rest is healed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from lives import Life, die, run_lives
from torch import nn

import nbtrain as nt
from nbtrain.errors import SessionError
from nbtrain.parallel.heal import _AGAIN, heal


def trainer_of(model: nn.Module, spec: str, **options: Any) -> nt.Trainer:
    settings = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1), "loss_fn": nn.functional.mse_loss}
    return nt.Trainer(model, nt.Plan.parse(spec), **{**settings, **options})


def batch(size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    return torch.randn(size, 8, generator=generator), torch.randn(size, 3, generator=generator)


def after_death(
    make: Callable[[], dict[str, Any]],
    check: Callable[[dict[str, Any], dict[str, Any]], Any],
    dying: tuple[int, ...] = (1,),
    world_size: int = 2,
    theirs: Callable[[], dict[str, Any]] = dict,
) -> list[Any]:
    """What ``check(namespace, report)`` returns on each rank, when those ``dying`` have died behind ``make``.

    ``theirs`` makes the namespace of a newcomer.
    """

    def live_on(life: Life) -> Any:
        namespace = make()
        torch.distributed.barrier()
        if life.rank in dying:
            die()
        return go_on(life, namespace)

    def go_on(life: Life, namespace: dict[str, Any]) -> Any:
        life.rejoin(1, dying)
        return check(namespace, heal(namespace, dying))

    results = run_lives(live_on, lambda life: go_on(life, theirs()), world_size, dying)
    return [result for rank, result in enumerate(results) if rank not in dying]


def test_shards_without_a_copy_are_lost_and_the_rest_is_healed() -> None:
    def make() -> dict[str, Any]:
        model = models.MLP()
        sharded, whole = trainer_of(model, "zero=3"), trainer_of(models.MLP(), "zero=0")
        sharded.step(*batch())
        return {"model": model, "sharded": sharded, "optimizer": sharded.optimizer, "whole": whole, "x": 1}

    def check(namespace: dict[str, Any], report: dict[str, Any]) -> None:
        assert report["healed"] == ["whole"]
        assert list(report["lost"]) == ["model", "sharded", "optimizer"]
        assert "redundancy=True" in report["lost"]["sharded"]
        assert report["missing"] == ["x"]
        namespace["whole"].step(*batch())
        sharded = namespace["sharded"]
        if torch.distributed.get_rank() == 1:  # new: it has a word that says so
            with pytest.raises(SessionError, match="sharded is lost: its shards were on no other rank"):
                sharded.step(*batch())
        else:
            words = r"the trainer ended with rank 1: .*redundancy=True\) .*; make the model and the trainer again"
            for call in (lambda: sharded.step(*batch()), lambda: sharded.evaluate([batch()]), sharded.state_dict):
                with pytest.raises(SessionError, match=words):
                    call()

    after_death(make, check)


def test_two_neighbours_that_die_at_once_lose_a_shard() -> None:
    def make() -> dict[str, Any]:
        return {"trainer": trainer_of(models.MLP(), "zero=3", redundancy=True)}

    def check(namespace: dict[str, Any], report: dict[str, Any]) -> None:
        reason = "ranks 1 and 2 are both new, and 2 alone had a copy of 1's shards"
        assert report["lost"] == {"trainer": f"{reason}; {_AGAIN}"}

    after_death(make, check, dying=(1, 2), world_size=4)


def test_two_that_are_no_neighbours_lose_nothing() -> None:
    def make() -> dict[str, Any]:
        return {"trainer": trainer_of(models.MLP(), "zero=3", redundancy=True)}

    def check(namespace: dict[str, Any], report: dict[str, Any]) -> float:
        assert report["lost"] == {}
        return namespace["trainer"].step(*batch()).item()

    results = after_death(make, check, dying=(1, 3), world_size=4)
    assert len(set(results)) == 1


def test_a_loss_function_that_cannot_be_sent_costs_its_trainer_alone() -> None:
    def make() -> dict[str, Any]:
        lock = threading.Lock()

        def guarded(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            with lock:
                return F.mse_loss(output, target)

        model = models.MLP()
        return {"model": model, "trainer": trainer_of(model, "zero=0", loss_fn=guarded)}

    def check(namespace: dict[str, Any], report: dict[str, Any]) -> float:
        assert report["healed"] == ["model"]
        assert "lock" in report["lost"]["trainer"]
        if torch.distributed.get_rank() != 1:
            assert namespace["trainer"].state_dict().keys() == namespace["model"].state_dict().keys()
            with pytest.raises(SessionError, match="the model is whole: make the trainer again"):
                namespace["trainer"].step(*batch())
        return trainer_of(namespace["model"], "zero=0").step(*batch()).item()

    results = after_death(make, check)
    assert results[0] == results[1]


def test_a_model_that_cannot_be_copied_trains_and_is_lost() -> None:
    class Locked(models.MLP):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    def make() -> dict[str, Any]:
        trainer = trainer_of(Locked(), "zero=0")
        trainer.step(*batch())
        return {"trainer": trainer}

    def check(namespace: dict[str, Any], report: dict[str, Any]) -> str:
        return report["lost"]["trainer"]

    reason = "Locked cannot be copied: TypeError: cannot pickle '_thread.lock' object"
    assert set(after_death(make, check)) == {f"{reason}; {_AGAIN}"}


def test_weights_that_nobody_has_a_copy_of_yet_are_lost() -> None:
    def make() -> dict[str, Any]:
        trainer = trainer_of(models.MLP(), "zero=3", redundancy=True)
        trainer.load_state_dict({name: value * 2 for name, value in trainer.state_dict().items()})
        return {"trainer": trainer}

    def check(namespace: dict[str, Any], report: dict[str, Any]) -> str:
        return report["lost"]["trainer"]

    assert all("outside of steps" in reason for reason in after_death(make, check))


def test_what_has_no_name_is_lost_and_says_so() -> None:
    def make() -> dict[str, Any]:
        return {"trainers": [trainer_of(models.MLP(), "zero=0")]}

    def check(namespace: dict[str, Any], report: dict[str, Any]) -> None:
        assert report == {"healed": [], "lost": {}, "missing": ["trainers"], "reset": []}
        for trainer in namespace.get("trainers", ()):
            with pytest.raises(SessionError, match="no name of the notebook holds it"):
                trainer.step(*batch())

    after_death(make, check)


def test_a_name_that_not_all_ranks_have_is_lost() -> None:
    def make() -> dict[str, Any]:
        trainer = trainer_of(models.MLP(), "zero=0")
        return {"trainer": trainer} if torch.distributed.get_rank() != 2 else {}

    def check(namespace: dict[str, Any], report: dict[str, Any]) -> dict[str, str]:
        return report["lost"]

    assert (
        after_death(make, check, world_size=3)
        == [{"trainer": f"not every rank has it under the same names; {_AGAIN}"}] * 3
    )


def test_models_without_a_trainer_and_trainers_that_know_each_other_are_healed() -> None:
    def make() -> dict[str, Any]:
        torch.manual_seed(1)
        critic = nt.parallelize(nn.Linear(3, 1), nt.Plan(zero=0))
        alone = nt.parallelize(models.MLP(), nt.Plan(zero=0))
        raw = models.MLP()
        maker = trainer_of(raw, "zero=0", loss_fn=lambda output, target: critic(output).square().mean())
        maker.step(*batch())
        names = {"raw": raw, "layer": raw.layers[0], "weight": raw.layers[0].weight}
        return {"critic": critic, "alone": alone, "maker": maker, **names, "optimizer": maker.optimizer}

    def check(namespace: dict[str, Any], report: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        assert report["healed"] == ["critic", "alone", "maker", "raw", "layer", "weight", "optimizer"]
        maker, raw = namespace["maker"], namespace["raw"]
        assert maker.model.module is raw
        assert raw.layers[0] is namespace["layer"]
        assert namespace["layer"].weight is namespace["weight"]
        losses = [maker.step(*batch()).item(), namespace["alone"](batch()[0]).sum().item()]
        return losses[0], maker.state_dict()

    results = after_death(make, check, world_size=3)
    assert len({loss for loss, _ in results}) == 1
    for _, state in results:
        torch.testing.assert_close(state, results[0][1], rtol=0, atol=0)


def test_definitions_of_cells_are_the_newcomers_own_or_sent() -> None:
    cell = """
class Layer(nn.Linear):
    pass

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer(8, 3)

    def forward(self, x):
        return self.layer(x) * factor * (rank >= 0)

def loss_fn(output, target):
    return F.mse_loss(output, target) + helper() * rank * 0

def helper():
    return factor - factor

factor = 2.0
"""

    def session() -> dict[str, Any]:
        return {
            "__name__": "__main__",
            "rank": torch.distributed.get_rank() if torch.distributed.is_initialized() else 1,
        }

    def make() -> dict[str, Any]:
        namespace = session()
        exec("import torch.nn as nn, torch.nn.functional as F\n" + cell, namespace)
        namespace["trainer"] = trainer_of(namespace["Model"](), "zero=0", loss_fn=namespace["loss_fn"])
        namespace["data"] = [1]
        return namespace

    def replayed() -> dict[str, Any]:
        namespace = session()
        exec("import torch.nn as nn, torch.nn.functional as F\n" + cell, namespace)
        del namespace["factor"]
        return namespace

    def check(namespace: dict[str, Any], report: dict[str, Any]) -> tuple[bool, bool, float, list[str]]:
        trainer = namespace["trainer"]
        model = trainer.model.module
        assert namespace["rank"] == torch.distributed.get_rank()
        assert type(model).forward.__globals__ is namespace
        assert type(model.layer).__mro__[1] is nn.Linear
        own = type(model) is namespace.get("Model"), trainer._stepper.loss_fn is namespace.get("loss_fn")
        namespace.setdefault("factor", 2.0)
        return *own, trainer.step(*batch()).item(), report["missing"]

    for theirs, is_own, missing in ((session, False, ["data"]), (replayed, True, ["factor", "data"])):
        old, new = after_death(make, check, theirs=theirs)
        assert old[:2] == (True, True)
        assert new[:2] == (is_own, is_own)
        assert old[2] == new[2]
        assert old[3] == new[3] == missing


def test_a_trainer_that_has_not_stepped_is_healed_without_a_warning_of_its_scheduler() -> None:
    def make() -> dict[str, Any]:
        scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)  # noqa: E731
        return {"trainer": trainer_of(models.MLP(), "zero=3", redundancy=True, scheduler=scheduler)}

    def check(namespace: dict[str, Any], report: dict[str, Any]) -> list[float]:
        trainer = namespace["trainer"]
        for _ in range(2):
            trainer.step(*batch())
        return trainer.optimizer.param_groups[0]["lr"]

    assert after_death(make, check) == [pytest.approx(0.001)] * 2


def test_loaders_go_on_where_they_were_with_the_newcomers_share() -> None:
    def make() -> dict[str, Any]:
        dataset = torch.utils.data.TensorDataset(torch.arange(24))
        loader = nt.loader(
            dataset, nt.Plan(), batch_size=6, collate_fn=lambda items: [item.item() for (item,) in items]
        )
        for _ in range(2):
            list(loader)
        next(iter(loader))
        return {"dataset": dataset, "loader": loader}

    def check(namespace: dict[str, Any], report: dict[str, Any]) -> list[int]:
        assert report == {"healed": ["dataset", "loader"], "lost": {}, "missing": [], "reset": []}
        loader = namespace["loader"]
        assert loader.dataset is namespace["dataset"]
        loader.load_state_dict(loader.state_dict())
        assert loader.state_dict() == {"epoch": 2, "batches": 1}
        return [sample for batch in loader for sample in batch]

    shares = after_death(make, check, world_size=3)
    assert len({sample for share in shares for sample in share}) == 18
    assert [len(share) for share in shares] == [6, 6, 6]


def test_a_large_dataset_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbtrain.parallel.heirs.SENT_BYTES", 1000)

    def make() -> dict[str, Any]:
        dataset = torch.utils.data.TensorDataset(torch.arange(2400))
        return {"dataset": dataset, "loader": nt.loader(dataset, nt.Plan(), batch_size=6)}

    def check(namespace: dict[str, Any], report: dict[str, Any]) -> list[str]:
        assert report["missing"] == []
        return [report["lost"]["loader"], report["lost"]["dataset"]]

    assert after_death(make, check) == [["it takes more than 1000 B; make it again on all ranks"] * 2] * 2


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_library_models_are_healed(name: str) -> None:
    def make() -> dict[str, Any]:
        torch.manual_seed(2)
        options = {"loss_fn": None, "redundancy": True}
        return {"trainer": trainer_of(models.CASES[name].make(), "zero=3", **options)}

    def check(namespace: dict[str, Any], report: dict[str, Any]) -> list[float]:
        assert report["lost"] == {}
        batch = models.CASES[name].batch(torch.Generator().manual_seed(0), 2)
        return [namespace["trainer"].step(**batch).item() for _ in range(3)]

    results = after_death(make, check)
    assert results[0] == results[1]
    assert results[0][2] < results[0][0]
