"""Plans that a person or the model states, and what is told of them."""

from __future__ import annotations

import pytest
import torch
from models import llama
from tensor_models import MODELS, D, Escaping, Fused, Gated, V, language
from torch import nn

from nbtrain.errors import ModelError, PlanError
from nbtrain.parallel.tensor.cuts import Cut, Region
from nbtrain.parallel.tensor.describe import describe
from nbtrain.parallel.tensor.patterns import own_plan
from nbtrain.parallel.tensor.probe import Probe, probe_inputs
from nbtrain.parallel.tensor.recognise import recognise
from nbtrain.parallel.tensor.stated import from_patterns

ATTENTION = {"blocks.*.attention.c_attn": "colwise", "blocks.*.attention.c_proj": "rowwise"}
MLP = {"blocks.*.mlp.gate": "column", "blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return MODELS["Fused"]()


@pytest.fixture(scope="module")
def probe(model: nn.Module) -> Probe:
    found = probe_inputs(model, torch.device("cpu"))
    assert found is not None
    return found


def test_only_what_is_named_is_cut_with_the_segments_of_the_trace(model: nn.Module, probe: Probe) -> None:
    plan = from_patterns(model, 2, ATTENTION, probe)
    assert len(plan.layers) == 4
    assert plan.layers["blocks.1.attention.c_attn"].cuts["weight"] == Cut(0, (D, D, D))
    assert plan.regions["blocks.0.attention"] == Region(True, (0,), ("c_attn", "c_proj"))


def test_all_of_it_stated_is_what_is_recognised(model: nn.Module, probe: Probe) -> None:
    heads = {"tokens": "embedding_rowwise", "head": "colwise_rep"}
    assert from_patterns(model, 2, ATTENTION | MLP | heads, probe).layers == recognise(model, 2, probe).layers


def test_without_a_probe_as_stated(model: nn.Module) -> None:
    plan = from_patterns(model, 2, MLP, None)
    assert plan.layers["blocks.0.mlp.up"].cuts == {"weight": Cut(0, (48,)), "bias": Cut(0, (48,))}
    assert plan.regions["blocks.0.mlp"] == Region(True, (), ("gate", "up", "down"))


def test_what_is_to_be_left_whole(model: nn.Module, probe: Probe) -> None:
    plan = from_patterns(model, 2, {"blocks.0.attention": "replicate"}, probe)
    assert plan.whole["blocks.0.attention.c_attn"] == "tp_plan says so"
    assert "blocks.1.attention.c_attn" in plan.layers


@pytest.mark.parametrize(
    ("patterns", "degree", "error", "message"),
    [
        (
            {"blocks.*.mlp.gat": "colwise"},
            2,
            PlanError,
            r"'blocks.\*.mlp.gat' matches no module .*'blocks.\*.mlp.gate'",
        ),
        ({"blocks.*.mlp.up": "colwice"}, 2, PlanError, "style 'colwice'; did you mean 'colwise'"),
        ({"blocks.*.norm1": "colwise"}, 2, ModelError, "'blocks.0.norm1' is a LayerNorm, which cannot be 'colwise'"),
        ({"blocks.*.mlp": "rowwise"}, 2, ModelError, "is a Gated, which cannot be 'rowwise'"),
        (MLP | {"blocks.*.mlp.gate": "replicate"}, 2, PlanError, "needs 'blocks.0.mlp.gate': 'colwise' as well"),
        ({"blocks.*.mlp.up": "colwise"}, 2, PlanError, "'blocks.0.mlp.down': 'rowwise' as well"),
        ({"head": "colwise"}, 2, ModelError, "say 'colwise_gather_output'"),
        ({"head": "rowwise"}, 2, ModelError, "no colwise layer gives it"),
        (ATTENTION, 3, PlanError, "tp=3 does not divide n_head=4 of 'blocks.0.attention'"),
        ({"tokens": "vocab"}, 3, PlanError, f"tp=3 does not divide num_embeddings={V}"),
    ],
)
def test_what_cannot_be(
    model: nn.Module, probe: Probe, patterns: dict[str, str], degree: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        from_patterns(model, degree, patterns, probe)


def test_features_that_are_mixed_cannot_be_cut() -> None:
    model = language(Fused, Escaping)()
    probe = probe_inputs(model, torch.device("cpu"))
    with pytest.raises(ModelError, match=r"'blocks.0.mlp.up' cannot be colwise: its features are mixed"):
        from_patterns(model, 2, {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}, probe)


def test_a_models_own_plan_is_one() -> None:
    model = llama()
    own = own_plan(model)
    assert own is not None
    assert own["model.layers.*.self_attn.q_proj"] == "colwise"
    assert own_plan(Gated()) is None
    plan = from_patterns(model, 2, own, probe_inputs(model, torch.device("cpu")))
    assert plan.layers["model.layers.1.self_attn.k_proj"].cuts["weight"] == Cut(0, (8,))
    assert plan.layers["lm_head"].style == "colwise_gather_output"


def test_description(model: nn.Module, probe: Probe) -> None:
    lines = describe(recognise(model, 2, probe), model).splitlines()
    assert lines[0] == "tensor parallelism over 2 ranks: 96% of the parameters are cut"
    folded = {tuple(line.split(None, 2)) for line in lines}
    assert ("blocks.0-1.attention.c_attn", "colwise", "96 = 32 + 32 + 32 outputs") in folded
    assert ("blocks.0-1.mlp.down", "rowwise", "48 inputs") in folded
    assert ("blocks.0-1.norm1", "a", "norm") in folded
