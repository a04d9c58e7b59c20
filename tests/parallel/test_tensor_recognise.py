"""Plans that are found by following features, each against the whole model: loss and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import MLP, Branches, ConvNet, gpt2, llama
from tensor_models import MODELS, Alibi, D, Escaping, Fused, Gated, Separate, V, language
from tensor_parts import in_parts
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from nbtrain.parallel.tensor.cuts import Cut, TensorPlan
from nbtrain.parallel.tensor.probe import Probe, probe_inputs
from nbtrain.parallel.tensor.recognise import findings, recognise


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Each part is a thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def bert() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": V, "hidden_size": D, "intermediate_size": 48, "max_position_embeddings": 32}
    return BertForMaskedLM(BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=4))


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=V, d_model=D, d_kv=8, d_ff=48, num_layers=1, num_decoder_layers=1, num_heads=4)
    )


def seen(model: nn.Module) -> Probe:
    probe = probe_inputs(model, torch.device("cpu"))
    assert probe is not None
    return probe


def recognised(model: nn.Module, degree: int = 2) -> TensorPlan:
    return recognise(model, degree, seen(model))


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
        # sums of up to 4 parts in another order
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


def cut(plan: TensorPlan, inside: str) -> dict[str, tuple[int, ...]]:
    """Segments of the cut weights of a module."""
    return {
        name.removeprefix(f"{inside}."): layer.cuts["weight"].segments
        for name, layer in plan.layers.items()
        if name.startswith(inside)
    }


FUSED = {"attention.c_attn": (D, D, D), "attention.c_proj": (D,)}
SEPARATE = {f"attention.{name}": (D,) for name in "qkvo"}
GROUPED = SEPARATE | {"attention.k": (D // 2,), "attention.v": (D // 2,)}
GATED = {"mlp.gate": (48,), "mlp.up": (48,), "mlp.down": (48,)}
HALVES = {"mlp.gate_up": (48, 48), "mlp.down": (48,)}
LORA = {
    **{f"mlp.{name}.base": (48,) for name in ("gate", "up", "down")},
    **{name: (48,) for name in ("mlp.gate.b", "mlp.up.b", "mlp.down.a")},
}
EXPECTED = {
    **{name: FUSED | GATED for name in ("Fused", "Permuted", "MinusOne", "Sliced", "Merged", "Einsum")},
    "HeadMajor": FUSED | GATED | {"attention.c_attn": (3 * D,)},
    **{name: SEPARATE | GATED for name in ("Separate", "Alibi", "Relative")},
    "MultiQuery": GATED,  # all heads meet the one head of keys
    "Repeated": GATED | GROUPED | {"attention.q": (D // 2, D // 2), "attention.o": (D // 2, D // 2)},
    "GroupedQuery": GROUPED | GATED,
    "Expanded": GROUPED | GATED,
    "GatedFused": FUSED | HALVES,
    "GatedHalves": FUSED | HALVES,
    "Glu": FUSED | {"mlp.up": (48, 48), "mlp.down": (48,)},
    "Lora": FUSED | LORA,
    "PostNorm": {"qkv": (D, D, D), "out": (D,), "fc1": (48,), "fc2": (48,)},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_parts_compute_what_the_whole_does(name: str) -> None:
    model = MODELS[name]()
    probe = seen(model)
    plan = recognise(model, 2, probe)
    assert cut(plan, "blocks.0") == cut(plan, "blocks.1") == EXPECTED[name]
    assert plan.layers["tokens"].style == "vocab"
    assert plan.layers["head"].style == "colwise_gather_output"
    holds(model, plan, probe)


@pytest.mark.parametrize(("name", "num_layers"), [("Translator", 14), ("ViT", 9)])
def test_models_that_are_no_decoders(name: str, num_layers: int) -> None:
    model = MODELS[name]()
    probe = seen(model)
    plan = recognise(model, 4, probe)
    assert len(plan.layers) == num_layers
    holds(model, plan, probe)


@pytest.mark.parametrize(("make", "num_regions"), [(llama, 4), (gpt2, 4), (bert, 2), (t5, 5)])
def test_hugging_face_models(make: Callable[[], nn.Module], num_regions: int) -> None:
    model = make()
    probe = seen(model)
    plan = recognise(model, 2, probe)
    assert len(plan.regions) == num_regions
    holds(model, plan, probe)


def test_regions_and_what_enters_them() -> None:
    plan = recognised(MODELS["Fused"]())
    attention, mlp = plan.regions["blocks.0.attention"], plan.regions["blocks.0.mlp"]
    assert (attention.written, attention.inputs, attention.layers) == (True, (0,), ("c_attn", "c_proj"))
    assert (mlp.written, mlp.inputs, mlp.layers) == (False, (0,), ("gate", "up", "down"))


def test_an_input_that_the_region_uses_otherwise_is_not_entered() -> None:
    region = recognised(MODELS["PostNorm"]()).regions["blocks.0"]
    assert (region.written, region.inputs, region.layers) == (True, (), ("qkv", "out", "fc1", "fc2"))


def test_whole_parameters_that_act_on_parts() -> None:
    plan = recognised(MODELS["Separate"]())
    assert plan.partial[:3] == tuple(
        f"blocks.0.attention.{name}" for name in ("q_norm.weight", "q_norm.bias", "k_norm.weight")
    )
    assert recognised(MODELS["Glu"]()).partial == ("blocks.0.mlp.scale", "blocks.1.mlp.scale")
    plan = replace(plan, partial=())
    model = MODELS["Separate"]()
    with pytest.raises(AssertionError, match="norm"):
        holds(model, plan, seen(model))


def test_segments_matter() -> None:
    """Of a fused weight in one piece a rank would have queries and half of the keys."""
    model = MODELS["Fused"]()
    plan = recognised(model)
    layer = plan.layers["blocks.0.attention.c_attn"]
    whole = replace(layer, cuts={"weight": Cut(0, (3 * D,)), "bias": Cut(0, (3 * D,))})
    with pytest.raises(Exception, match="split"):
        holds(model, replace(plan, layers={**plan.layers, "blocks.0.attention.c_attn": whole}), seen(model))


def test_what_is_not_understood_stays_whole() -> None:
    plan = recognised(language(Fused, Escaping)())
    assert cut(plan, "blocks.0") == FUSED
    assert "layer_norm in 'blocks.0.mlp.norm' mixes its output features" in plan.whole["blocks.0.mlp.up"]
    assert plan.whole["blocks.0.norm1"] == "a norm"
    assert recognised(MODELS["ViT"]()).whole["head"] == "its output is the model's"
    convolutions = recognised(ConvNet())
    assert convolutions.layers == {}
    assert convolutions.whole["stem.0"] == "a convolution"


class Folding(Fused):
    """It derives the number of samples from a part's shape: no code can tell what it means."""

    def heads(self, qkv: Tensor, B: int, T: int, C: int) -> Any:
        q, k, v = qkv.view(B, T, 3, self.n_head, 8).permute(2, 0, 3, 1, 4).reshape(3, B * self.n_head, T, 8)
        return (each.view(len(each) // self.n_head, self.n_head, T, 8) for each in (q, k, v))


def test_code_that_does_not_run_on_a_part_stays_whole() -> None:
    plan = recognised(language(Folding)())
    assert cut(plan, "blocks.0") == cut(plan, "blocks.1") == GATED
    assert "does not run on a part" in plan.whole["blocks.1.attention.c_attn"]


class SharedWeight(nn.Module):
    """A layer that is called twice, and one whose weight another expression takes."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.other = Gated(), Gated()

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp(self.mlp(x))
        return self.other(x) * self.other.up.weight.square().mean()


def test_a_module_called_twice_and_a_weight_used_elsewhere() -> None:
    model = SharedWeight()
    probe = seen(model)
    plan = recognise(model, 2, probe)
    assert set(plan.layers) == {"mlp.gate", "mlp.up", "mlp.down"}
    assert plan.whole["other.up"] == "its weight is used outside of its forward"
    holds(model, plan, probe)


def test_torch_transformer_layers() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 4, 48, batch_first=True), 2)
    plan = recognised(model)
    attention = plan.layers["layers.0.self_attn"]
    assert attention.style == "attention"
    assert attention.cuts["in_proj_weight"] == Cut(0, (D, D, D))
    assert attention.cuts["out_proj.weight"] == Cut(1, (D,))
    assert cut(replace(plan, layers={n: e for n, e in plan.layers.items() if "attn" not in n}), "layers.1") == {
        "linear1": (48,),
        "linear2": (48,),
    }


@pytest.mark.parametrize(
    ("make", "degree", "finding"),
    [
        (MLP, 2, "tp=2 does not divide the hidden size 33 of 'layers'; choose tp from 1, 3, 11, 33"),
        (language(Fused), 3, "tp=3 does not divide n_head=4 of 'blocks.0.attention'; choose tp from 1, 2, 4"),
        (
            language(lambda: Separate(2)),
            4,
            "tp=4 does not divide kv_heads=2 of 'blocks.0.attention'; choose tp from 1, 2",
        ),
        (
            lambda: nn.TransformerEncoderLayer(D, 4, 48, batch_first=True),
            8,
            "tp=8 does not divide num_heads=4 of 'self_attn'; choose tp from 1, 2, 4",
        ),
    ],
)
def test_findings(make: Callable[[], nn.Module], degree: int, finding: str) -> None:
    model = make()
    assert finding in findings(model, degree, seen(model))


def test_the_same_on_every_rank() -> None:
    torch.manual_seed(1)
    first = recognised(MODELS["Alibi"]())
    assert recognised(MODELS["Alibi"]()) == first
    assert isinstance(Alibi().slopes, Tensor)


def test_probing_leaves_no_trace() -> None:
    model = ConvNet().train()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    state = torch.random.get_rng_state()
    recognised(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(module.training and not module._forward_hooks for module in model.modules())


def test_no_probe() -> None:
    class Odd(nn.Module):
        def forward(self, x: Any) -> Any:
            return x["no such"]

    assert probe_inputs(Odd(), torch.device("cpu")) is None


def test_a_branch_that_the_probe_did_not_take() -> None:
    plan = recognised(Branches())
    assert plan.layers == {}
    assert plan.whole["b"] == "the probe did not call it"
    assert plan.whole["out"] == "beside it, the probe did not call 'b'"


def test_a_model_without_memory() -> None:
    with torch.device("meta"):
        model = MODELS["GroupedQuery"]()
    probe = probe_inputs(model, torch.device("meta"))
    assert probe is not None
    assert cut(recognise(model, 2, probe), "blocks.1") == EXPECTED["GroupedQuery"]
