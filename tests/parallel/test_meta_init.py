"""Models that are built without memory: the same weights under every plan, and no rank holds more than its part."""

import copy
import gc
import random
import weakref
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import models
import numpy as np
import pytest
import torch
from parity import rank, whole
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity

import nbtrain as nt
from nbtrain.errors import ModelError, UsageError
from nbtrain.parallel.deferred import Deferred
from nbtrain.parallel.layout import layout_of
from nbtrain.parallel.materialise import materialise_shards
from nbtrain.parallel.tape import slot_of

State = dict[str, torch.Tensor]


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with nt.meta_init(seed):
        return make()


def one_device(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    return nt.parallelize(build(make, seed), nt.Plan())


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def assert_equal(expected: State, got: State) -> None:
    assert list(expected) == list(got)
    for name, value in expected.items():
        assert torch.equal(value, got[name]), name


# --- the same weights everywhere ---


@pytest.mark.parametrize("name", ["conv", "gpt"])
def test_every_plan_starts_from_one_devices_weights(name: str) -> None:
    """Bitwise, whatever the ranks' own random state is; and they train."""
    case = models.CASES[name]
    expected = one_device(case.make, seed=3).state_dict()

    def on_rank() -> None:
        for spec in ("zero=0", "zero=2,precision=bf16", "zero=3,dp_replicate=2"):
            net = build(case.make, seed=3)
            assert all(parameter.is_meta for parameter in net.parameters())
            trainer = nt.Trainer(net, nt.Plan.parse(spec), optimizer=sgd, loss_fn=case.loss_fn)
            assert_equal(expected, trainer.state_dict())
            batch = case.batch(torch.Generator().manual_seed(rank()), 2)
            trainer.step(**batch) if isinstance(batch, dict) else trainer.step(*batch)
            trained = trainer.state_dict()
            # a bias in front of a batch normalisation has a gradient that is 0 but for rounding
            weights = [key for key, _ in net.named_parameters() if not key.endswith("bias")]
            assert all(not torch.equal(expected[key], trained[key]) for key in weights)

    run_ranks(on_rank, 4)


def test_uneven_shards_are_those_of_one_device() -> None:
    expected = one_device(models.MLP).state_dict()

    def on_rank() -> None:
        trainer = nt.Trainer(build(models.MLP), nt.Plan(zero=3), optimizer=sgd, loss_fn=nn.functional.mse_loss)
        assert_equal(expected, trainer.state_dict())

    run_ranks(on_rank, 3)


def test_torch_gives_every_shard_the_same_numbers() -> None:
    """Shared/FACTS, silent wrong results, 6: what a model on the meta device is usually initialised by."""

    def on_rank() -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        with torch.device("meta"):
            plain = nn.Linear(4, 8, bias=False)
        fully_shard(plain, mesh=init_device_mesh("cpu", (2,)))
        plain.to_empty(device="cpu")
        with pytest.warns(UserWarning, match="random operators may not have complete support"):
            plain.reset_parameters()
        ours = nt.parallelize(build(lambda: nn.Linear(4, 8, bias=False)), nt.Plan(zero=3))
        return shard_of(plain), shard_of(ours)

    (torchs_first, our_first), (torchs_second, our_second) = run_ranks(on_rank, 2)
    assert torchs_first == torchs_second
    assert not set(our_first) & set(our_second)


def shard_of(net: nn.Module) -> list[float]:
    weight: Any = net.weight
    return weight.to_local().flatten().tolist()  # type: ignore[no-any-return]


def test_weights_depend_on_seed_and_name_alone() -> None:
    def nested() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))

    def other() -> nn.Module:
        """Other layers are made before, after and in between."""
        extra = nn.Linear(7, 7)
        second = nn.Linear(5, 3)
        return nn.Sequential(nn.Linear(3, 5), second, extra)

    first, again, seeded = one_device(nested).state_dict(), one_device(other).state_dict(), one_device(nested, 1)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert not torch.equal(value, seeded.state_dict()[name])
    assert not torch.equal(first["0.weight"].flatten(), first["1.weight"].flatten())


def test_random_numbers_outside_are_not_touched() -> None:
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    one_device(models.GPT)
    assert torch.equal(torch.randn(3), expected)


# --- what constructors do ---


class Odd(nn.Module):
    """What models in the wild do to their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(30, 40) * 0.02)
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(50, 20)))
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(50, 20), std=0.02, a=-0.02, b=0.02))
        self.legacy = nn.Parameter(torch.Tensor(4, 4))  # built on the CPU whatever the default device is
        nn.init.xavier_uniform_(self.legacy)
        self.embedding = nn.Embedding(10, 4, padding_idx=0)
        self.eye = nn.Parameter(nn.init.eye_(torch.empty(3, 3)))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.picked = nn.Parameter(torch.arange(4.0)[torch.tensor([True, False, True, False])])
        self.lower = nn.Linear(3, 3).half()
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).view(1, 1, 5, 5), persistent=False)
        self.register_buffer("frequency", 1.0 / (10_000 ** (torch.arange(0, 8, 2).float() / 8)))
        self.register_buffer("data", torch.tensor([1.0, 2.0]))
        self.register_buffer("numpy", torch.from_numpy(np.arange(3.0)) * torch.ones(3))
        self.register_buffer("same", torch.arange(6, device=self.scaled.device).to("cpu")[None, 1:4])
        self.rates = [value.item() for value in torch.linspace(0, 0.1, 3)]
        self.rates_too = torch.linspace(0, 0.1, 3).tolist()
        self.array = torch.arange(3).numpy()
        if self.embedding.weight.is_meta:  # as libraries ask before they initialise
            raise AssertionError("it looks real")


def test_constructors_are_replayed() -> None:
    net, plain = one_device(Odd), Odd()
    for name, value in plain.named_buffers():
        assert torch.equal(net.get_buffer(name), value), name
    for name, parameter in plain.named_parameters():
        got = net.get_parameter(name)
        assert (got.shape, got.stride(), got.dtype) == (parameter.shape, parameter.stride(), parameter.dtype), name
    assert net.rates == net.rates_too == plain.rates
    assert net.array.tolist() == [0, 1, 2]
    assert abs(net.scaled.std() - 0.02) < 0.002
    torch.testing.assert_close(net.orthogonal.T @ net.orthogonal, torch.eye(20), atol=1e-5, rtol=0)
    assert net.truncated.abs().max() <= 0.02
    assert 0.009 < net.truncated.std() < 0.0125  # of a normal cut at one sigma: 0.54 sigma
    assert torch.equal(net.embedding.weight[0], torch.zeros(4))
    assert net.embedding.weight[1:].std() > 0.5
    assert torch.equal(net.eye, torch.eye(3))
    assert net.picked.tolist() == [0, 2]
    assert 0 < net.legacy.abs().max() <= (6 / 8) ** 0.5


@pytest.mark.parametrize("make", [models.llama, models.gpt2, models.GPT], ids=["llama", "gpt2", "gpt"])
def test_the_distribution_is_the_models_own(make: Callable[[], nn.Module]) -> None:
    net, plain = one_device(make), make()
    for name, parameter in plain.named_parameters():
        got = net.get_parameter(name)
        if parameter.std() == 0:
            assert torch.equal(got, parameter), name
        elif parameter.numel() > 100:
            assert 0.8 < got.std() / parameter.std() < 1.25, name


def test_copies_and_ties() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2)  # copies of a layer that is no part of the model
            self.average = nn.Linear(8, 8)  # comes before what it is a copy of
            self.net = nn.Linear(8, 8)
            with torch.no_grad():
                self.average.weight.copy_(self.net.weight)
                self.net.weight.mul_(2)
            self.twin = copy.deepcopy(self.net)
            self.tied = nn.Linear(8, 8)
            self.tied.weight = self.net.weight

    net = one_device(Net)
    assert torch.equal(net.layers.layers[0].linear1.weight, net.layers.layers[1].linear1.weight)
    assert torch.equal(2 * net.average.weight, net.net.weight)
    assert torch.equal(net.twin.weight, net.net.weight)
    assert net.twin.weight is not net.net.weight
    assert net.tied.weight is net.net.weight
    assert torch.equal(net.net.bias, one_device(lambda: nn.ModuleDict({"net": nn.Linear(8, 8)}))["net"].bias)


def test_memory_that_a_constructor_leaves_uninitialised_is_0() -> None:
    assert torch.equal(one_device(lambda: nn.ParameterList([nn.Parameter(torch.empty(9))]))[0], torch.zeros(9))


def test_a_model_that_is_moved_from_one_model_to_another() -> None:
    with nt.meta_init(1):
        trunk = nn.Linear(2, 2)
    with nt.meta_init(2):
        net = nn.Sequential(trunk, nn.Linear(2, 2), copy.deepcopy(trunk))
    net = nt.parallelize(net, nt.Plan())
    assert torch.equal(net[0].weight, one_device(lambda: nn.Sequential(nn.Linear(2, 2)), 1)[0].weight)
    assert torch.equal(net[1].weight, one_device(lambda: nn.Sequential(nn.Identity(), nn.Linear(2, 2)), 2)[1].weight)
    assert torch.equal(net[2].weight, net[0].weight)


def test_real_modules_inside_keep_their_weights() -> None:
    """A trunk that was trained elsewhere; rank 0's counts, as without `meta_init`."""

    def on_rank() -> None:
        for spec in ("zero=0", "zero=3"):
            torch.manual_seed(rank())
            trunk = nn.Linear(4, 4)
            with nt.meta_init():
                net = nn.Sequential(trunk, nn.Linear(4, 3))
            trainer = nt.Trainer(net, nt.Plan.parse(spec), optimizer=sgd, loss_fn=nn.functional.mse_loss)
            torch.manual_seed(0)
            assert torch.equal(trainer.state_dict()["0.weight"], nn.Linear(4, 4).weight)
            trainer.step(torch.ones(2, 4), torch.ones(2, 3))

    run_ranks(on_rank, 2)


def test_a_part_of_a_parameter_is_cut_from_the_whole() -> None:
    """As tensor parallelism does: the model is cut on meta, then each rank makes its part."""
    whole_weight = one_device(lambda: nn.Linear(3, 8)).weight
    net = build(lambda: nn.Linear(3, 8))
    deferred = Deferred(net)
    net.weight = nn.Parameter(net.weight.detach()[4:])
    materialise_shards(
        net, deferred, torch.device("cpu"), part=lambda name, tensor: tensor[4:] if name == "weight" else tensor
    )
    assert torch.equal(net.weight, whole_weight[4:])
    assert not net.bias.is_meta


def test_tensor_parallel_and_fsdp_shards_are_those_of_one_device() -> None:
    """Laid out on meta by torch in two dimensions; each rank makes its part of a part."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))

    expected = one_device(make).state_dict()

    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = build(make)
        deferred = Deferred(net)
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()}, src_data_rank=None)
        fully_shard(net, mesh=mesh["dp"])
        materialise_shards(net, deferred, torch.device("cpu"))
        for name, parameter in net.named_parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.to_local().numel() <= expected[name].numel() / 2
            assert torch.equal(parameter.full_tensor(), expected[name]), name

    run_ranks(on_rank, 4)


def test_lazy_modules_are_told_as_ever() -> None:
    with pytest.raises(ModelError, match="'weight', 'bias' are not initialised yet; run the model once"):
        nt.parallelize(build(lambda: nn.LazyLinear(3)), nt.Plan())


# --- what is refused ---


def reads_random_numbers() -> nn.Module:
    net = nn.Linear(2, 2)
    net.scale = net.weight.max().item()
    return net


REAL = torch.zeros(2, 2)


def writes_to_a_real_tensor() -> nn.Module:
    REAL.copy_(nn.Linear(2, 2).weight.detach())
    return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            reads_random_numbers,
            r"'net.scale = net.weight.max\(\).item\(\)' .*test_meta_init.py, line .* drawn at random",
        ),
        (lambda: nn.Linear(2, 2).weight.tolist(), "build the model without nt.meta_init"),
        (lambda: torch.equal(torch.randn(2), torch.randn(2)), "build the model without nt.meta_init"),
        (writes_to_a_real_tensor, "to a real tensor"),
    ],
)
def test_a_constructor_that_needs_numbers_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(make)
    nn.init.trunc_normal_(weight := torch.zeros(30))
    assert weight.std() > 0, "torch is as it was"


def test_what_was_not_recorded_is_refused() -> None:
    net = build(models.MLP)
    nn.init.zeros_(net.layers[0].weight)
    with pytest.raises(ModelError, match=r"'layers.0.weight' is changed after nt.meta_init\(\) had ended"):
        nt.parallelize(net, nt.Plan())
    with torch.device("meta"):
        plain = models.MLP()
    for unknown in (plain, copy.deepcopy(build(models.MLP)), build(models.MLP).half()):
        with pytest.raises(ModelError, match=r"on the meta device, and nothing is known.*with nt.meta_init\(\):"):
            nt.parallelize(unknown, nt.Plan())
    with nt.meta_init(), pytest.raises(UsageError, match="already active"), nt.meta_init():
        pass
    with pytest.raises(UsageError, match="seed='a' must be an integer"), nt.meta_init("a"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(
    ("make", "seed"),
    [
        (models.MLP, rank),
        (lambda: nn.Linear(2, 2).requires_grad_().apply(scaled_by_python), lambda: 0),
        (lambda: nn.ParameterList([nn.Parameter(torch.tensor(np.random.rand(2)))]), lambda: 0),
    ],
    ids=["seed", "python", "numpy"],
)
def test_ranks_that_would_start_apart_are_told(make: Callable[[], nn.Module], seed: Callable[[], int]) -> None:
    def on_rank() -> None:
        random.seed(rank())
        np.random.seed(rank())
        net = build(make, seed())
        with pytest.raises(ModelError, match="rank 1 initialises the model otherwise than rank 0"):
            nt.parallelize(net, nt.Plan(zero=3))

    run_ranks(on_rank, 2)


def scaled_by_python(module: nn.Module) -> None:
    nn.init.normal_(module.weight, std=random.random())


# --- what is kept, and for how long ---


def test_nothing_is_kept_but_the_parameters() -> None:
    """The record goes with the meta tensors; an optimizer that was built on them gets their successors."""

    def on_rank() -> None:
        net = build(models.GPT)
        early = sgd(net.parameters())
        slots = [weakref.ref(slot_of(parameter)) for parameter in net.parameters()]
        marked = net.tokens.weight
        marked.mark = "kept"
        trainer = nt.Trainer(net, nt.Plan(zero=3), optimizer=early)
        del marked
        gc.collect()
        assert not any(reference() for reference in slots)
        assert isinstance(net.tokens.weight, DTensor)
        assert net.tokens.weight is net.head.weight
        ids = torch.zeros(2, 4, dtype=torch.long)
        before = whole(net.tokens.weight.detach()).clone()
        trainer.step(ids, ids)
        assert not torch.equal(whole(net.tokens.weight.detach()), before)

    run_ranks(on_rank, 2)


def test_a_rank_that_takes_anothers_place_gets_the_buffers_that_no_state_has() -> None:
    def on_rank() -> None:
        for spec in ("zero=0", "zero=3"):
            layout = layout_of(nt.parallelize(build(lambda: Odd().float()), nt.Plan.parse(spec)))
            assert layout is not None
            assert layout.blueprint is not None, spec
            assert layout.blueprint.module is not None, layout.blueprint.problem
            assert torch.equal(layout.blueprint.module.get_buffer("mask"), Odd().mask)

    run_ranks(on_rank, 2)


def test_a_rank_never_holds_more_than_its_shards_and_a_parameter() -> None:
    """As torch's allocator counts: 120 MiB in 10 matrices of 12 MiB, so 30 MiB of shards on each of 4 ranks.

    Beside them there is one whole matrix, and this rank's slice of it.
    """

    def on_rank(build: Callable[[Callable[[], nn.Module]], nn.Module]) -> tuple[float, float]:
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
            net = build(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(1024, 3072), nn.Tanh()) for _ in range(10))))
            nt.parallelize(net, nt.Plan(zero=3))
        changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = list(accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))
        return max(held) / 2**20, held[-1] / 2**20

    for peak, kept in run_ranks(on_rank, 4, build):
        assert 30 <= kept < 30.5
        assert 42 < peak < 30 + 12 + 3 + 1
    [(peak, _)] = run_ranks(on_rank, 1, lambda make: make())
    assert peak > 120, "a model that is built whole"
