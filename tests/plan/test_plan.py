"""`Plan`: what is allowed, what the errors say, and that text, dict and pickle bring the same plan back."""

import copy
import math
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.errors import PlanError
from nbtrain.plan import Plan
from nbtrain.plan.fields import ALGORITHMS, CHECKS, OFFLOADS, SCHEDULES
from nbtrain.plan.pipeline import virtual_stages

degree = st.integers(1, 8)
name = st.from_regex(r"[a-z][a-z0-9_.]{0,8}", fullmatch=True)


@st.composite
def plans(draw: st.DrawFn, tp_plan: bool = True) -> Plan:
    algorithm = draw(st.sampled_from(ALGORITHMS))
    schedule = draw(st.sampled_from(SCHEDULES))
    pp = draw(degree)
    return Plan(
        dp_replicate=draw(degree),
        dp_shard=draw(degree | st.just(-1)),
        tp=draw(degree),
        pp=pp,
        zero=0 if algorithm != "allreduce" else draw(st.integers(0, 3)),
        schedule=schedule,
        num_microbatches=draw(st.none() | st.integers(2, 8).map(lambda rounds: rounds * pp)),
        num_virtual_stages=draw(st.none() | st.just(virtual_stages(schedule))),
        sequence_parallel=draw(st.booleans()),
        loss_parallel=draw(st.booleans()),
        tp_plan=draw(st.dictionaries(name, name) | st.just("auto")) if tp_plan else "auto",
        split=draw(st.just("auto") | st.lists(name, min_size=1, max_size=3, unique=True)),
        precision=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        recompute=draw(st.sampled_from(["none", "full", "selective", 1, 2])),
        offload=draw(st.none() | st.sets(st.sampled_from(OFFLOADS), min_size=1)),
        algorithm=algorithm,
        bucket_mb=draw(st.none() | st.floats(0.1, 100)),
        hierarchical=draw(st.booleans()),
    )


@given(plans())
def test_repr_evaluates_to_the_same_plan(plan: Plan) -> None:
    assert eval(repr(plan), {"Plan": Plan}) == plan


@given(plans(tp_plan=False))
def test_text_parses_to_the_same_plan(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan
    assert Plan.parse(repr(plan)) == plan


@given(plans())
def test_dict_pickle_and_copy_give_the_same_plan(plan: Plan) -> None:
    twins = [Plan.from_dict(plan.to_dict()), pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)]
    assert all(twin == plan and hash(twin) == hash(plan) for twin in twins)


@given(plans(), st.integers(1, 64))
def test_resolved_degrees_multiply_to_the_world_size(plan: Plan, world_size: int) -> None:
    resolved = (
        plan.resolve(world_size * math.prod(degree for degree in plan.degrees.values() if degree != -1))
        if plan.dp_shard == -1
        else plan.resolve(plan.world_size)
    )
    assert math.prod(resolved.degrees.values()) == resolved.world_size
    assert resolved.resolve(resolved.world_size) == resolved


@given(st.dictionaries(st.sampled_from(["dp_replicate", "dp_shard", "tp", "pp"]), degree), st.integers(1, 64))
def test_every_degree_that_an_error_lists_fits(degrees: dict[str, int], world_size: int) -> None:
    try:
        Plan(**degrees).resolve(world_size)
        return
    except PlanError as error:
        message = str(error)
    _, listed, cure = message.partition("one of these fits: ")
    for change in cure.split("; ") if listed else []:
        axis, _, values = change.replace("=", " from ").partition(" from ")
        for value in values.split(", "):
            Plan(**{**degrees, axis: int(value)}).resolve(world_size)


@given(plans(), st.integers(1, 10**12))
def test_describe_never_fails(plan: Plan, num_parameters: int) -> None:
    assert repr(plan) in plan.describe(num_parameters=num_parameters)


def test_zero_and_what_differs_from_the_defaults_is_shown() -> None:
    assert repr(Plan()) == "Plan(zero=3)"
    assert repr(Plan(zero=0, offload=["optimizer", "params"])) == "Plan(zero=0, offload='params+optimizer')"


def test_a_pipelines_rank_has_no_whole_copy() -> None:
    assert "not divided further: its stages' layers on each rank" in Plan(pp=2).describe(world_size=2)
    assert "replicated: its part of its stages' layers" in Plan(pp=2, tp=2, zero=0).describe(world_size=8)


def test_precision_recomputation_and_offload_are_described() -> None:
    text = Plan(precision="fp16", recompute=2, offload="params+activations").describe(world_size=2)
    assert "fp16 compute under a loss scale" in text
    assert "one block in 2 keeps its inputs only, and computes the rest again in backward" in text
    assert "to host memory: parameters, gradients and optimizer state, for good; what blocks keep from" in text
    assert "each block keeps its inputs, matrix products and attention" in Plan(recompute="selective").describe()
    assert all(word not in Plan().describe() for word in ("precision", "recompute", "offload"))


def test_what_has_no_effect_is_told() -> None:
    plan = Plan(schedule="zbv", num_microbatches=8, sequence_parallel=True)
    assert "without effect   schedule='zbv', num_microbatches=8: pp is 1" in plan.describe()
    assert "without effect   sequence_parallel=True: tp is 1" in plan.describe()
    assert "without effect" not in Plan(schedule="zbv", pp=2, tp=2, sequence_parallel=True).describe()
    assert "without effect" not in Plan(zero=1).describe()


def test_parameters_that_are_not_sharded_cannot_be_offloaded() -> None:
    Plan(zero=2, offload="params").require_supported()
    with pytest.raises(PlanError, match=r"zero=0 shards no parameters; type zero=3 or zero=2"):
        Plan(zero=0, offload="params").require_supported()


@pytest.mark.parametrize(
    ("wrong", "cure"),
    [
        (lambda: Plan(dp=2), "type dp_shard=2, or dp_replicate=2"),
        (lambda: Plan(tensor_parallel=2), "type tp=2"),
        (lambda: Plan(pp_size=2), "type pp=2"),
        (lambda: Plan.parse("stages=2"), "type pp=2"),
        (lambda: Plan(bf16=True), "type precision='bf16'"),
        (lambda: Plan("tp=2"), r"for a text type nt\.Plan\.parse\('tp=2'\)"),
        (lambda: Plan(2), "takes its fields by name"),
        (lambda: Plan.parse(None), "is no text of a plan"),
        (lambda: Plan.parse("zero=3;tp=2"), "separated by commas: 'zero=3,tp=2'"),
    ],
)
def test_what_people_type_elsewhere_is_told_what_to_type_here(wrong: Callable[[], Plan], cure: str) -> None:
    with pytest.raises(PlanError, match=cure):
        wrong()


def test_spaces_and_an_empty_text_are_understood() -> None:
    assert Plan.parse("  zero = 0 , tp=2 ") == Plan(zero=0, tp=2)
    assert Plan.parse("") == Plan()
    assert Plan.parse("sequence_parallel=true,bucket_mb=12.5,recompute=2") == Plan(
        sequence_parallel=True, bucket_mb=12.5, recompute=2
    )


def test_what_a_pipeline_of_one_rank_would_need_does_not_matter() -> None:
    assert Plan(schedule="dualpipev", num_microbatches=1, num_virtual_stages=5).resolve(2).pp == 1


def test_a_plan_is_frozen() -> None:
    plan = Plan(tp_plan={"a": "colwise"})
    with pytest.raises(AttributeError):
        plan.zero = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        plan.tp_plan["a"] = "rowwise"  # type: ignore[index]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("zeros=3", "did you mean 'zero'"),
        ("precison=bf16", "did you mean 'precision'"),
        ("qqq=1", "choose from dp_replicate"),
        ("zero=3,zero=2", "zero is given twice"),
        ("zero", "not of the form field=value"),
        ("zero=4", "0, 1, 2, 3"),
        ("tp=two", "not an integer"),
        ("tp=0", "at least 1"),
        ("dp_shard=0", "or -1"),
        ("dp_shard=-1,dp_replicate=-1", "type dp_replicate=-1,dp_shard=1"),
        ("schedule=1f1p", "did you mean '1f1b'"),
        ("recompute=ful", "did you mean 'full'"),
        ("recompute=0", "'selective'"),
        ("offload=optimiser", "did you mean 'optimizer'"),
        ("hierarchical=maybe", "true or false"),
        ("bucket_mb=-1", "positive"),
        ("tp_plan=mine", "type Plan(tp_plan="),
        ("algorithm=bytegrad", "type zero=0,algorithm=bytegrad"),
        ("pp=4,num_microbatches=2", "type num_microbatches=4"),
        ("pp=2,schedule=dualpipev,num_microbatches=2", "type num_microbatches=4"),
        ("pp=4,schedule=interleaved_1f1b,num_microbatches=9", "type num_microbatches=8 or num_microbatches=10"),
        ("pp=4,schedule=interleaved_zero_bubble,num_microbatches=14", "14 // 4 = 3 equal rounds"),
        ("pp=2,num_virtual_stages=2", "type num_virtual_stages=1 or leave it out; several stages a rank take e.g."),
        ("pp=2,schedule=zbv,num_virtual_stages=3", "type num_virtual_stages=2 or leave it out"),
        ("pp=2,schedule=looped_bfs,num_virtual_stages=1", "type num_virtual_stages=2, or schedule=1f1b"),
    ],
)
def test_an_error_says_what_to_type(spec: str, message: str) -> None:
    with pytest.raises(PlanError) as raised:
        Plan.parse(spec)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"zero": 3.0},
        {"zero": True},
        {"tp": True},
        {"tp": 2.0},
        {"dp_shard": "4"},
        {"hierarchical": 1},
        {"tp_plan": {"a": 1}},
        {"split": []},
        {"split": ["a", "a"]},
        {"offload": []},
        {"bucket_mb": float("nan")},
        {"num_microbatches": 0},
    ],
)
def test_values_of_another_kind_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        Plan(**fields)  # type: ignore[arg-type]


def test_an_unknown_keyword_names_the_nearest_field() -> None:
    with pytest.raises(PlanError, match="did you mean 'dp_shard'"):
        Plan(dp_shards=2)  # type: ignore[call-arg]


def test_a_mesh_that_does_not_fit_lists_those_that_do() -> None:
    with pytest.raises(PlanError, match=r"tp=3 does not divide the 4 ranks.*tp from 1, 2, 4"):
        Plan(tp=3).resolve(4)
    with pytest.raises(PlanError, match=r"dp_shard=3 is not the 4 ranks.*dp_shard=4"):
        Plan(dp_shard=3).resolve(4)


def test_replicas_are_counted_by_either_degree() -> None:
    assert Plan(zero=0).resolve(4).dp == Plan(zero=0, dp_replicate=4).resolve(4).dp == 4


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (Plan(zero=0, algorithm="qadam"), "algorithm='qadam'"),
        (Plan(hierarchical=True), "hierarchical=True"),
    ],
)
def test_what_this_release_lacks_is_named(plan: Plan, name: str) -> None:
    with pytest.raises(NotImplementedError) as raised:
        plan.require_supported()
    assert str(raised.value).startswith(name)


def test_every_field_is_checked_and_documented() -> None:
    assert list(CHECKS) == list(Plan().to_dict())
    assert all(f"{field}: " in (Plan.__doc__ or "") for field in CHECKS)


def test_the_plan_needs_no_torch() -> None:
    code = "import sys, nbtrain.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
