"""Norms over all ranks against torch's own on the whole batch."""

import copy
from typing import Any

import pytest
import torch
from parity import rank
from ranks import run_ranks
from torch import nn

from nbtrain.parallel.batchnorm import GlobalBatchNorm, normalise_globally
from nbtrain.parallel.instancenorm import track_globally


def pair(make: Any) -> tuple[nn.Module, nn.Module]:
    """torch's layer, and its twin over all ranks."""
    plain = make()
    for tensor in (*plain.parameters(), *plain.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 1.5)
    twin = nn.Sequential(make())
    twin[0].load_state_dict(plain.state_dict())
    normalise_globally(twin, torch.distributed.group.WORLD)
    assert type(twin[0]) is GlobalBatchNorm
    return plain, twin[0]


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.BatchNorm1d(5), (5,)),
        (lambda: nn.BatchNorm1d(5), (5, 3)),
        (lambda: nn.BatchNorm2d(5, momentum=None), (5, 3, 2)),
        (lambda: nn.BatchNorm3d(5, affine=False), (5, 1, 2, 2)),
        (lambda: nn.BatchNorm2d(5, track_running_stats=False), (5, 3, 2)),
    ],
)
def test_statistics_and_gradients_are_those_of_the_whole_batch(make: Any, shape: tuple[int, ...]) -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        plain, twin = pair(make)
        for training in (True, True, False):
            plain.train(training)
            twin.train(training)
            whole = torch.randn(7, *shape) * 3 + 10
            weights = torch.randn(7, *shape)
            share = whole.split((4, 3))[rank()].clone().requires_grad_()
            whole.requires_grad_()
            expected, output = plain(whole), twin(share)
            (expected * weights).sum().backward()
            (output * weights.split((4, 3))[rank()]).sum().backward()
            torch.testing.assert_close(output, expected.split((4, 3))[rank()], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(share.grad, whole.grad.split((4, 3))[rank()], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dict(twin.state_dict()), dict(plain.state_dict()))

    run_ranks(on_rank, 2)


def test_running_statistics_count_all_samples() -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        plain, twin = pair(lambda: nn.BatchNorm1d(3))
        for _ in range(3):
            whole = torch.randn(5, 3) * 2 + 100
            plain(whole)
            twin(whole.split((5, 0))[rank()])  # one rank has no sample at all
        torch.testing.assert_close(dict(twin.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-5)

    run_ranks(on_rank, 2)


def test_values_far_from_zero_keep_their_variance() -> None:
    def on_rank() -> None:
        _, twin = pair(lambda: nn.BatchNorm1d(1, affine=False))
        x = torch.tensor([[10_000.0], [10_001.0]])
        # E[x^2] - E[x]^2 would be 0 in fp32
        torch.testing.assert_close(twin(x), torch.tensor([[-1.0], [1.0]]), rtol=1e-4, atol=1e-4)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.InstanceNorm1d, (5,)), (nn.InstanceNorm2d, (5, 3)), (nn.InstanceNorm3d, (5, 3, 2))]
)
def test_running_statistics_of_instances_count_all_samples(kind: Any, shape: tuple[int, ...]) -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        plain = kind(4, track_running_stats=True)
        net = nn.Sequential(kind(4, track_running_stats=True), kind(4))
        track_globally(net, torch.distributed.group.WORLD)
        assert type(net[1]) is kind
        twin = net[0]
        for _ in range(2):
            whole = torch.randn(5, 4, *shape) * 2 + 3
            expected, output = plain(whole), twin(whole.split((4, 1))[rank()])
            torch.testing.assert_close(output, expected.split((4, 1))[rank()])
        copied = copy.deepcopy(twin)
        twin.counts = rank() == 0  # the other one stands in for nothing
        plain(whole[:4])
        twin(whole.split((4, 1))[rank()])
        torch.testing.assert_close(dict(twin.state_dict()), dict(plain.state_dict()))
        twin.counts = False
        twin(whole)
        torch.testing.assert_close(dict(twin.state_dict()), dict(plain.state_dict()))
        twin.eval()
        torch.testing.assert_close(twin(whole), plain.eval()(whole))
        assert copied.group is twin.group

    run_ranks(on_rank, 2)


def test_subclasses_are_left_alone() -> None:
    class Own(nn.BatchNorm1d):
        pass

    net = nn.Sequential(Own(2))
    normalise_globally(net, None)  # type: ignore[arg-type]
    assert type(net[0]) is Own
