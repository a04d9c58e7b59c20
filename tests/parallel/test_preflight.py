"""Every kind of parameter: under each plan the numbers of one device, or a finding with its cure."""

from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.utils import parametrizations

import nbtrain as nt
from nbtrain.errors import ModelError
from nbtrain.parallel.preflight import check_model

PLANS = ("zero=0", "zero=2", "zero=3", "zero=3,precision=bf16")
SHARDED = PLANS[1:]
Change = Callable[["Net"], None]


class Net(nn.Module):
    """A trunk of two blocks and a head, changed by a case."""

    def __init__(self, change: Change | None = None) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
        self.head = nn.Linear(8, 3)
        if change is not None:
            change(self)

    @property
    def first(self) -> nn.Linear:
        return self.blocks[0][0]  # type: ignore[no-any-return, index]

    def forward(self, x_B8: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x_B8))


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, sparse=True)

    def forward(self, x_B8: torch.Tensor) -> torch.Tensor:
        return super().forward(self.table((x_B8[:, 0].abs() * 5).long().clamp(max=9)))


class Complex(nn.Module):
    """Nothing but complex parameters, or one among others."""

    def __init__(self, real_too: bool) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(8, 3, dtype=torch.cfloat))
        self.head = nn.Linear(3, 3) if real_too else nn.Identity()

    def forward(self, x_B8: torch.Tensor) -> torch.Tensor:
        return self.head((x_B8.to(torch.cfloat) @ self.spectrum).abs())


class Masked(Net):
    """Has a parameter of integers or booleans, larger than bf16 can count."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.keys = nn.Parameter((torch.arange(8) * 1001).to(dtype), requires_grad=False)

    def forward(self, x_B8: torch.Tensor) -> torch.Tensor:
        return super().forward(x_B8 * (self.keys.long() % 7))


class Pieces(Net):
    """Two parameters beside each other in one storage."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        whole = torch.randn(16, 16).narrow(1 - dim, 0, 8)
        self.a, self.b = (nn.Parameter(part) for part in whole.split(8, dim))

    def forward(self, x_B8: torch.Tensor) -> torch.Tensor:
        return super().forward(x_B8 @ self.a + torch.tanh(x_B8 @ self.b))


def transpose(net: Net) -> None:
    net.first.weight = nn.Parameter(torch.randn(8, 8).t())


def alias(net: Net) -> None:
    net.blocks[1][0].weight = nn.Parameter(net.first.weight.data)


def tie(net: Net) -> None:
    net.blocks[1][0].weight = net.first.weight


def watch_head(net: Net) -> None:
    net.register_buffer("watched", net.head.weight.detach()[1:])


def expand(net: Net) -> None:
    net.head.bias = nn.Parameter(torch.zeros(1).expand(3))


def expand_buffer(net: Net) -> None:
    net.register_buffer("mask", torch.ones(1).expand(5))


def freeze_some(net: Net) -> None:
    net.first.weight.requires_grad_(False)
    net.blocks[1].requires_grad_(False)


def freeze_in_half(net: Net) -> None:
    net.first.register_parameter("scale", nn.Parameter(torch.ones(3).half(), requires_grad=False))


def add_empty(net: Net) -> None:
    net.head.register_parameter("none", nn.Parameter(torch.zeros(0)))


def add_frozen_empty(net: Net) -> None:
    net.head.register_parameter("none", nn.Parameter(torch.zeros(0), requires_grad=False))


def add_double_buffer(net: Net) -> None:
    net.register_buffer("count", torch.zeros(3, dtype=torch.float64))


def changed(change: Change) -> Callable[[], nn.Module]:
    return lambda: Net(change)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "sparse": (Sparse, dict.fromkeys(SHARDED, "'table' is of sparse gradients.*sparse=False or type zero=0")),
    "complex": (
        lambda: Complex(False),
        {PLANS[3]: "'spectrum' is complex, which bf16 shards.*type zero=0 or precision"},
    ),
    "complex among real": (
        lambda: Complex(True),
        dict.fromkeys(SHARDED, r"several dtypes \(complex64, float32\).*type zero=0, or .*view_as_real"),
    ),
    "integer": (lambda: Masked(torch.int64), {}),
    "boolean": (lambda: Masked(torch.bool), {}),
    "transposed": (changed(transpose), {}),
    "rows of one tensor": (lambda: Pieces(0), {}),
    "columns of one tensor": (lambda: Pieces(1), {}),
    "tied": (changed(tie), {}),
    "alias": (
        changed(alias),
        dict.fromkeys(
            SHARDED, r"'blocks.0.0.weight' and 'blocks.1.0.weight' share memory .*tie them .*or type .clone\(\)"
        ),
    ),
    "buffer on a parameter": (
        changed(watch_head),
        dict.fromkeys(SHARDED, r"'head.weight' and 'watched' share memory .*type .clone\(\) on one, or compute"),
    ),
    "expanded": (changed(expand), dict.fromkeys(PLANS, r"'head.bias' is expanded.*type .clone\(\)")),
    "expanded buffer": (changed(expand_buffer), {}),
    "frozen among trained": (changed(freeze_some), {}),
    "frozen in half precision": (changed(freeze_in_half), {}),
    "empty": (changed(add_empty), dict.fromkeys(SHARDED, r"'head.none' is without elements.*requires_grad_\(False\)")),
    "frozen empty": (changed(add_frozen_empty), {}),
    "double buffer": (changed(add_double_buffer), {}),
    "weight norm": (changed(lambda net: parametrizations.weight_norm(net.first)), {}),
    "spectral norm": (
        changed(lambda net: parametrizations.spectral_norm(net.first)),
        {PLANS[3]: "parametrizations.weight' is orthogonal or of spectral norm 1"},
    ),
    "spectral norm by a hook": (
        changed(lambda net: nn.utils.spectral_norm(net.first)),
        {PLANS[3]: "'blocks.0.0' is orthogonal or of spectral norm 1"},
    ),
    "orthogonal": (
        changed(lambda net: parametrizations.orthogonal(net.first)),
        {PLANS[3]: "parametrizations.weight' is orthogonal.*type zero=0 or precision=fp32"},
    ),
}


def test_every_kind_of_parameter_is_right_or_a_finding() -> None:
    """One table: what each plan makes of each kind."""

    def on_rank() -> dict[tuple[str, str], str]:
        generator = torch.Generator().manual_seed(0)
        batch = torch.randn(6, 8, generator=generator), torch.randn(6, 3, generator=generator)
        return {(case, spec): outcome(make, spec, batch) for case, (make, _) in CASES.items() for spec in PLANS}

    outcomes, others = run_ranks(on_rank, 2, timeout=100)
    assert outcomes == others
    for (case, spec), got in outcomes.items():
        finding = CASES[case][1].get(spec)
        if finding is None:
            assert got == "right", f"{case} with {spec}: {got}"
        else:
            with pytest.raises(ModelError, match=f"(?s){finding}"):
                raise ModelError(got)


def outcome(make: Callable[[], nn.Module], spec: str, batch: tuple[torch.Tensor, ...]) -> str:
    """ "right", the report of what differs, or the finding."""
    try:
        report = nt.verify(make, nt.Plan.parse(spec), batch, steps=1, loss_fn=nn.functional.mse_loss)
    except ModelError as finding:
        return str(finding)
    return "right" if report.ok else str(report)


def test_all_findings_are_in_one_message() -> None:
    def spoil(net: Net) -> None:
        alias(net)
        add_empty(net)
        net.head.register_parameter("scale", nn.Parameter(torch.ones(())))
        net.half_head = nn.Linear(2, 2).half()
        net.table = nn.Embedding(2, 2, sparse=True)

    plan = nt.Plan(zero=3).resolve(2)
    with pytest.raises(ModelError) as caught:
        check_model(Net(spoil), plan)
    assert [line.split(" ")[0] for line in str(caught.value).splitlines()] == [
        "'blocks.0.0.weight'",
        "'head.scale'",
        "'head.none'",
        "'table'",
        "parameters",
    ]


def test_what_shares_memory_is_found_on_meta_for_any_plan() -> None:
    """Each is made for itself then."""
    with nt.meta_init():
        net = Net(alias)
    with pytest.raises(ModelError, match=r"'blocks\.0\.0\.weight' and 'blocks\.1\.0\.weight' share"):
        nt.parallelize(net, nt.Plan())


def test_a_model_that_is_sharded_already_is_refused() -> None:
    def on_rank() -> None:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        net = torch.distributed.tensor.distribute_module(nn.Linear(4, 4), mesh)
        with pytest.raises(ModelError, match="'weight', 'bias' are sharded already; give the model as it was before"):
            nt.parallelize(net, nt.Plan(zero=3))

    run_ranks(on_rank, 2)
