"""What a plan says that a rank holds and sends, against what it held and sent."""

from __future__ import annotations

import json
import threading
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed import distributed_c10d as c10d

import nbtrain as nt
from nbtrain.engine.recorder import pending
from nbtrain.parallel import waits
from nbtrain.parallel.holdings import holdings
from nbtrain.parallel.shard import num_root_parameters
from nbtrain.plan.footprint import bytes_moved, format_bytes, model_states

ELEMENT_BYTES = {"Float": 4, "BFloat16": 2}
LAYOUTS = [
    ("zero=0", 2),
    ("zero=0,bucket_mb=0.02", 4),
    ("zero=1", 2),
    ("zero=1,bucket_mb=0.02", 4),
    ("zero=1,dp_replicate=2", 4),
    ("zero=2", 2),
    ("zero=3", 2),
    ("zero=3,precision=bf16", 2),
    ("zero=3,dp_replicate=2", 4),
]


@pytest.fixture(autouse=True)
def _recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "4000")  # torch reads it when the first group is made, in the ranks


def trainer_of(spec: str) -> nt.Trainer:
    torch.manual_seed(0)
    return nt.Trainer(
        models.GPT(vocab=64, width=32, depth=4, length=16),
        nt.Plan.parse(spec),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        loss_fn=models.token_mean,
    )


def step(trainer: nt.Trainer) -> None:
    ids = torch.randint(64, (2, 16))
    trainer.step(ids, ids)


def recorded() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))["entries"]
    return entries


def moved(entries: list[dict[str, Any]], sharding: dist.ProcessGroup | None) -> dict[str, float]:
    """Bytes that a rank sends by ring algorithms, by collective; the step's own small reduction is left out."""
    sizes = {name: group.size() for group, name in c10d._world.pg_names.items()}
    total = {"all-gather": 0.0, "reduce-scatter": 0.0, "all-reduce": 0.0}
    for entry in entries:
        if entry["input_dtypes"] == ["Double"]:
            continue
        group, op = entry["process_group"][0], entry["profiling_name"]
        if op == "gloo:all_gather":
            kind, passes, size = "all-gather", 1, entry["output_sizes"][0]
        elif sharding is not None and group == sharding.group_name:  # gloo's reduce-scatter shows as an all-reduce
            kind, passes, size = "reduce-scatter", 1, entry["input_sizes"][0]
        else:
            kind, passes, size = "all-reduce", 2, entry["input_sizes"][0]
        num_elements = torch.Size(size).numel()
        ring = (sizes[group] - 1) / sizes[group]
        total[kind] += passes * num_elements * ELEMENT_BYTES[entry["input_dtypes"][0]] * ring
    return total


class Messages:
    """Bytes that this rank sends in messages, which the flight recorder does not see."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._isend = dist.isend

    def __enter__(self) -> Messages:
        dist.isend = self._sent
        return self

    def __exit__(self, *error: object) -> None:
        dist.isend = self._isend

    def _sent(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.num_bytes += tensor.nbytes
        return self._isend(tensor, *args, **kwargs)


@pytest.mark.parametrize(("spec", "ranks"), LAYOUTS)
def test_bytes_sent_and_held_are_those_of_the_description(spec: str, ranks: int) -> None:
    def on_rank() -> None:
        trainer = trainer_of(spec)
        step(trainer)
        step(trainer)  # DDP orders its buckets anew in the second
        before = len(recorded())
        with Messages() as messages:
            step(trainer)
        shards = trainer.plan.zero >= 2
        sharding = trainer._stepper.layout.mesh["dp_shard"].get_group() if shards else None
        measured = moved(recorded()[before:], sharding)
        num_parameters, root = holdings(trainer)["num_parameters"], num_root_parameters(trainer.model)
        assert (root > 0) == shards
        predicted = bytes_moved(trainer.plan, num_parameters, root)
        if trainer.plan.zero == 1:  # on the CPU both are messages
            sent = predicted.pop("all-gather") + predicted.pop("reduce-scatter")
            assert messages.num_bytes == pytest.approx(sent, rel=0.03)
        for name, num_bytes in measured.items():
            assert num_bytes == pytest.approx(predicted.get(name, 0), rel=0.03), name
        total = format_bytes(sum(bytes_moved(trainer.plan, num_parameters, root).values()))
        assert f"a rank sends     {total} a step: " in trainer.describe()
        states = model_states(trainer.plan, num_parameters)
        held = trainer.memory()
        assert held["parameters"] == pytest.approx(states.parameters_bytes, rel=0.03)
        assert held["gradients"] == pytest.approx(states.gradients_bytes, rel=0.03)
        assert held["optimizer"] == pytest.approx(states.optimizer_bytes, rel=0.03)

    run_ranks(on_rank, ranks)


def test_what_moves_is_told_in_words() -> None:
    words = nt.Plan(zero=1, dp_replicate=2, tp=2).describe(8, 10**6)
    assert (
        "a reduce-scatter of the gradients (P elements), an all-reduce of its shards across replicas, an all" in words
    )
    assert "4 all-reduces a layer and microbatch" in words
    # 500,000 parameters of 4 bytes over 2 ranks, then 250,000 over 2 replicas
    share = "976.6 KiB in"
    assert f"sends     2.9 MiB a step: {share} all-gather, {share} reduce-scatter, {share} all-reduce" in words
    assert "4 all-gathers and 4 reduce-scatters" in nt.Plan(tp=2, sequence_parallel=True).describe()
    assert nt.Plan(zero=3).describe(1, 10).endswith("sends     nothing")


def test_a_rank_that_waits_for_messages_is_seen_waiting() -> None:
    def on_rank() -> None:
        trainer = trainer_of("zero=1")
        seen: list[list[dict[str, Any]]] = []
        shown = threading.Event()

        def look() -> None:
            while not (waits := pending()):
                pass
            seen.append(waits)
            shown.set()
            dist.barrier(group)

        group = dist.new_group([0, 1])
        if dist.get_rank() == 0:
            thread = threading.Thread(target=look)
            thread.start()
            step(trainer)
            thread.join()
            assert shown.is_set()
            wait = seen[0][-1]
            assert (wait["op"], wait["ranks"], wait["dtypes"]) == ("reduce_scatter", [0, 1], ["float32"])
            assert wait["waits_s"] >= 0
        else:
            dist.barrier(group)  # until the other has been seen
            step(trainer)
        assert waits.waiting() == []

    run_ranks(on_rank, 2)
