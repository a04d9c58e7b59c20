"""``torch.compile`` of each block: the same numbers, for every plan."""

import os
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
import torch._dynamo.backends.registry
import torch._functorch.aot_autograd
import torch.nn.functional as F
from parity import FP16, FP32, Run, check
from ranks import run_ranks
from torch import nn

import nbtrain as nt
from nbtrain.errors import ModelError, PlanError, UsageError
from nbtrain.parallel.compile import Compiled

# of torch.compile's own making: it looks at attributes of tensors whose getters warn
pytestmark = pytest.mark.filterwarnings("ignore")


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def test_equals_one_device() -> None:
    def on_rank() -> None:
        run = Run(steps=2, grad_clip=0.5, compile="aot_eager")
        check("gpt", "zero=0,recompute=full", run, FP32)
        check("conv", "zero=3,recompute=selective", replace(run, steps=1), FP32)
        # a model's own loss is computed while nbtrain watches its denominators
        half = replace(run, steps=1, loss_scale=2.0**10)
        check("gpt_own_loss", "zero=3,precision=fp16,recompute=2,offload=activations", half, FP16)

    run_ranks(on_rank, 2)


def test_blocks_of_stages_are_compiled() -> None:
    """Also by a schedule that takes the backward apart, which compiled code has one of."""

    def on_rank() -> None:
        run = Run(steps=2, batch=8, compile="aot_eager")
        check("gpt", "pp=2,schedule=zbv,num_microbatches=4", run, FP32)
        net = nt.parallelize(models.GPT(depth=4), nt.Plan(pp=2), compile="aot_eager")
        assert sum(isinstance(block, Compiled) for block in net.blocks) == 4
        with pytest.raises(ModelError, match="compiles each repeated block that one stage runs, and Sequential has no"):
            nt.parallelize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nt.Plan(pp=2), compile="aot_eager")

    run_ranks(on_rank, 2)


def test_each_block_is_compiled_and_runs_compiled_code() -> None:
    def on_rank() -> None:
        graphs: list[Any] = []

        def counting(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        torch._dynamo.register_backend(counting, name="counting")
        net = nt.parallelize(models.GPT(), nt.Plan(), compile="counting")
        assert [isinstance(block, Compiled) for block in net.blocks] == [True] * 3
        assert isinstance(net.blocks[0], models.Block)
        ids = torch.zeros(2, 4, dtype=torch.long)
        models.token_mean(net(ids), ids).backward()
        assert len(graphs) == 1  # one for all blocks
        plain = nt.parallelize(models.MLP(), nt.Plan(), compile="counting")
        plain(torch.ones(2, 8)).sum().backward()
        assert len(graphs) == 2  # a model without blocks is compiled as a whole

    run_ranks(on_rank, 1)


def test_what_cannot_be_compiled_is_said_before_anything_is_done() -> None:
    with pytest.raises(UsageError, match=r"compile='aot_eagr' is no backend.*aot_eager"):
        nt.parallelize(models.MLP(), nt.Plan(), compile="aot_eagr")
    with pytest.raises(UsageError, match="compile=3 must be True, False or the name"):
        nt.Trainer(models.MLP(), nt.Plan(), optimizer=sgd, loss_fn=F.mse_loss, compile=3)  # type: ignore[arg-type]
    net = nt.parallelize(models.MLP(), nt.Plan())
    with pytest.raises(PlanError, match="laid out with compile=False; build it again for 'aot_eager'"):
        nt.parallelize(net, nt.Plan(), compile="aot_eager")
    again = nt.parallelize(models.MLP(), nt.Plan(), compile="aot_eager")
    assert nt.Trainer(again, nt.Plan(), optimizer=sgd, loss_fn=F.mse_loss).model is again


@pytest.mark.slow  # 20 s until its files are there
def test_inductor_gives_the_same_numbers() -> None:
    class Small(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(2)))

    def on_rank() -> None:
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        x, y = torch.randn(4, 8), torch.randn(4, 8)
        results = []
        for compile in (True, False):
            torch.manual_seed(0)
            trainer = nt.Trainer(Small(), nt.Plan(recompute="full"), optimizer=sgd, loss_fn=F.mse_loss, compile=compile)
            losses = [trainer.step(x, y) for _ in range(3)]
            results.append({"losses": torch.stack(losses), **trainer.state_dict()})
        torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)

    run_ranks(on_rank, 1)
