"""Plans that are found by following features, each against the whole model: loss and every gradient."""

from __future__ import annotations

import pytest
import torch
from tensor_models import MODELS
from tensor_parts import in_parts
from torch import Tensor, nn

from nbtrain.parallel.tensor.cuts import TensorPlan
from nbtrain.parallel.tensor.probe import Probe, probe_inputs
from nbtrain.parallel.tensor.recognise import recognise


def seen(model: nn.Module) -> Probe:
    probe = probe_inputs(model, torch.device("cpu"))
    assert probe is not None
    return probe


def holds(model: nn.Module, plan: TensorPlan, probe: Probe) -> None:
    """Each part computes what the whole does, up to the order of sums."""
    model.eval()

    def run(model: nn.Module) -> Tensor:
        out = model(*probe[0], **probe[1])
        out = out if isinstance(out, Tensor) else out[0]
        return (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()

    loss, grads = in_parts(model, plan, run)
    expected = run(model)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-4)
    whole = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert whole.keys() <= grads.keys()
    for name, grad in whole.items():
        torch.testing.assert_close(
            grads[name], grad, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", MODELS)
def test_parts_compute_what_the_whole_does(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    probe = seen(model)
    plan = recognise(model, 2, probe)
    holds(model, plan, probe)
