"""Offload: what lies elsewhere, and that no number changes. No GPU is needed: on the CPU nothing moves."""

from typing import Any

import models
import pytest
import torch
from parity import FP32, Run, check, rank, whole
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import nbtrain as nt
from nbtrain.errors import PlanError
from nbtrain.parallel import offload
from nbtrain.parallel.offload import Offloaded, SavedOnHost


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def results(spec: str) -> dict[str, Any]:
    torch.manual_seed(0)
    trainer = nt.Trainer(models.GPT(), nt.Plan.parse(spec), optimizer=adam, loss_fn=models.token_mean, grad_clip=1.0)
    ids = torch.randint(models.V, (4, models.T), generator=torch.Generator().manual_seed(rank()))
    losses = [trainer.step(ids, ids.flip(1)) for _ in range(3)]
    gradients = {f"gradient of {name}": whole(p.grad) for name, p in trainer.model.named_parameters()}
    return {"losses": torch.stack(losses), **gradients, **trainer.state_dict()}


@pytest.mark.parametrize(("spec", "ranks"), [("zero=0", 1), ("zero=0", 2), ("zero=2", 2), ("zero=3,precision=bf16", 2)])
def test_no_number_changes(spec: str, ranks: int) -> None:
    def on_rank() -> None:
        expected = results(spec)
        parts = ["optimizer", "activations", "activations,recompute=full", "activations,recompute=selective"]
        if ranks > 1 and "zero=0" not in spec:
            parts += ["params", "params+optimizer+activations"]
        for part in parts:
            torch.testing.assert_close(results(f"{spec},offload={part}"), expected, rtol=0, atol=0, msg=part)

    run_ranks(on_rank, ranks)


@pytest.mark.parametrize("spec", ["zero=2", "zero=3"])
def test_equals_one_device(spec: str) -> None:
    def on_rank() -> None:
        run = Run(steps=2, accumulate=2, grad_clip=0.5)
        for model in ("gpt_ragged",) if spec == "zero=2" else ("llama",):
            check(model, f"{spec},offload=params+optimizer+activations,recompute=full", run, FP32)

    run_ranks(on_rank, 2)


def test_activations_are_packed_and_parameters_are_not() -> None:
    """A block of known sizes: what its backward needs, but for weights, their views and buffers."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 16, bias=False)
            self.register_buffer("mask", torch.ones(4, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) * self.mask).exp() * self.layer.weight.sum(1)

    block, x = Block(), torch.randn(4, 8, requires_grad=True)
    saved = SavedOnHost(block)
    with saved:
        output = block(x)
    # x of the matrix product; what exp gave, once for itself and once for the last product; the sum of weights
    assert saved.packed_bytes == 4 * (4 * 8 + 4 * 16 + 4 * 16 + 16)
    assert saved.num_packed == 4
    output.sum().backward()
    expected = torch.autograd.grad(block(x).sum(), [x, block.layer.weight])
    torch.testing.assert_close([x.grad, block.layer.weight.grad], list(expected), rtol=0, atol=0)


def test_weights_that_autocast_has_cast_are_not_packed() -> None:
    layer, x = nn.Linear(32, 32, bias=False), torch.randn(4, 32)
    saved = SavedOnHost(layer)
    with saved, torch.autocast("cpu", torch.bfloat16):
        layer(x * 1.0)
    assert saved.packed_bytes == 2 * 4 * 32


def test_gathered_parameters_are_not_packed() -> None:
    """FSDP frees them behind each block; a copy of them would be a whole model in host memory."""

    def on_rank() -> None:
        seen: list[SavedOnHost] = []

        class Watched(nn.Sequential):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                seen.append(SavedOnHost(self))
                with seen[-1]:
                    return super().forward(x)

        blocks = [Watched(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(3)]
        net = nt.parallelize(nn.Sequential(*blocks), nt.Plan(zero=3))
        net(torch.randn(2, 64)).sum().backward()
        # the input and what tanh gave, not 64 x 64 weights
        assert [saved.packed_bytes for saved in seen] == [4 * 2 * 64 * 2] * 3

    run_ranks(on_rank, 2)


def test_a_change_in_place_of_what_was_saved_is_still_an_error() -> None:
    """torch does not compare versions of what hooks have packed: gradients would be wrong without a word."""
    layer = nn.Linear(8, 8)
    for change in ("output", "weight"):
        with SavedOnHost(layer):
            output = layer(torch.randn(2, 8)).exp()
            loss = layer(output).sum()
        with torch.no_grad():
            (output if change == "output" else layer.weight).add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*let the operation make a new"):
            loss.backward()


def test_each_block_is_offloaded_or_the_model_without_blocks() -> None:
    net = nt.parallelize(models.GPT(), nt.Plan(offload="activations"))
    assert [isinstance(block, Offloaded) for block in net.blocks] == [True] * 3
    assert not isinstance(net, Offloaded)
    assert isinstance(nt.parallelize(models.MLP(), nt.Plan(offload="activations")), Offloaded)


def test_parameters_are_fsdps_to_offload() -> None:
    def on_rank() -> None:
        net = nt.parallelize(models.GPT(), nt.Plan(zero=3, offload="params"))
        group = net.blocks[0]._get_fsdp_state()._fsdp_param_group  # type: ignore[attr-defined]
        assert isinstance(group.offload_policy, CPUOffloadPolicy)

    run_ranks(on_rank, 2)
    with pytest.raises(PlanError, match=r"zero=0 shards no parameters; type zero=3"):
        nt.parallelize(models.MLP(), nt.Plan(zero=0, offload="params+optimizer"))


def test_parameters_that_are_not_sharded_would_stay_on_the_gpu() -> None:
    plan = nt.Plan(zero=3, offload="params").resolve(1)
    offload.check_offload(plan, torch.device("cpu"))
    with pytest.raises(PlanError, match=r"dp_shard=1.*give it at least two ranks"):
        offload.check_offload(plan, torch.device("cuda"))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_stepping_some_parameters_at_a_time_is_stepping_all(make: Any) -> None:
    """As the optimizer is stepped on a GPU whose state comes in chunks."""
    torch.manual_seed(0)
    nets = [models.GPT(), models.GPT()]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = []
    for net in nets:
        decayed = [parameter for parameter in net.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in net.parameters() if parameter.ndim == 1]
        optimizers.append(make([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=1e-2))
    ids = torch.randint(models.V, (4, models.T))
    for _ in range(3):
        for net in nets:
            net.zero_grad()
            models.token_mean(net(ids), ids).backward()
        optimizers[0].step()
        held = list(nets[1].parameters())
        chunks = offload.chunks(held, 4096)
        assert len(chunks) > 4
        assert [parameter for chunk in chunks for parameter in chunk] == held
        for chunk in chunks:
            with offload.only(optimizers[1], chunk):
                optimizers[1].step()
    assert [len(group["params"]) for group in optimizers[1].param_groups] == [len(decayed), len(others)]
    torch.testing.assert_close(dict(nets[1].state_dict()), dict(nets[0].state_dict()), rtol=0, atol=0)
