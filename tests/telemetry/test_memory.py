"""Bytes as measured."""

import torch
from torch import nn

from nbtrain.telemetry.memory import model_bytes, tensor_bytes


def test_a_tensor_that_is_listed_twice_counts_once() -> None:
    tensor = torch.zeros(3, dtype=torch.float64)
    assert tensor_bytes([tensor, tensor, torch.zeros(2, dtype=torch.bfloat16)]) == 24 + 4


def test_a_model_and_its_optimizer() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(net.parameters())
    assert model_bytes(net) == {"parameters": 112, "gradients": 0, "optimizer": 0, "buffers": 40}
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    held = model_bytes(net, optimizer)
    assert (held["gradients"], held["optimizer"]) == (112, 2 * 112 + 4 * 4)
