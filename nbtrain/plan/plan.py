"""`Plan`: the whole layout of a training job in one frozen value."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Self

from nbtrain.errors import PlanError
from nbtrain.plan import pipeline, support, text
from nbtrain.plan.degrees import AXES, fill
from nbtrain.plan.describe import describe
from nbtrain.plan.fields import CHECKS


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Plan:
    """How a model is replicated, sharded and split over ranks.

    Degrees multiply to the world size; one of the data-parallel ones may be -1, for all ranks that are left.
    A value is checked when the plan is made. Fields of an axis of degree 1 have no effect.

    Args:
        dp_replicate: Data-parallel replicas (torchtitan's meaning).
        dp_shard: Data-parallel ranks that share one copy of the model states; replicas too with ``zero=0``.
        tp: Tensor-parallel degree.
        pp: Pipeline-parallel degree.
        zero: What ``dp_shard`` ranks shard (ZeRO, arXiv 1910.02054, section 5): 0 nothing (DDP), 1 optimizer
            state (the weight update's sharding of arXiv 2004.13336), 2 also gradients, 3 also parameters (FSDP).
        schedule: Pipeline schedule.
        num_microbatches: Microbatches a step; None lets the pipeline choose. "1f1b" needs pp or more, "dualpipev" 2 pp;
            the interleaved ones want equal rounds of at least pp, which multiples of pp give.
        num_virtual_stages: Pipeline stages a rank; None takes the schedule's own number: 1 for "gpipe" and "1f1b",
            2 for "zbv" and "dualpipev"; the others take 2 or more.
        sequence_parallel: Shard norms and dropout along the sequence between tensor-parallel layers.
        loss_parallel: Compute the loss on logits that are sharded by vocabulary.
        tp_plan: ``"auto"`` or ``{name pattern: style}``.
        split: ``"auto"`` or the names of the modules that begin a stage.
        precision: Of compute: "fp32", "bf16", "fp16" (with a loss scale); weights and reductions are fp32 in all.
        recompute: What blocks compute again in backward: "none"; "full", everything; "selective", all but matrix
            products and attention; n, everything in every n-th block.
        offload: None or any of "params", "optimizer", "activations"; ``"params+optimizer"`` is understood.
        algorithm: Data-parallel communication; other than "allreduce" needs ``zero=0``.
        bucket_mb: Gradient bucket of DDP in MiB; None takes torch's.
        hierarchical: Reduce inside hosts first, then across.

    Raises:
        PlanError: A value is not allowed, or a keyword is no field; it says what is.
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    tp: int = 1
    pp: int = 1
    zero: int = 3
    schedule: str = "1f1b"
    num_microbatches: int | None = None
    num_virtual_stages: int | None = None
    sequence_parallel: bool = False
    loss_parallel: bool = False
    tp_plan: str | Mapping[str, str] = "auto"
    split: str | Iterable[str] = "auto"
    precision: str = "fp32"
    recompute: str | int = "none"
    offload: str | Iterable[str] | None = None
    algorithm: str = "allreduce"
    bucket_mb: float | None = None
    hierarchical: bool = False

    def __new__(cls, *words: Any, **fields: Any) -> Self:
        # before the generated __init__, which would only say "unexpected keyword argument"
        if words:
            text_of = f"; for a text type nt.Plan.parse({words[0]!r})" if isinstance(words[0], str) else ""
            raise PlanError(f"a plan takes its fields by name, e.g. nt.Plan(zero=3, tp=2){text_of}")
        text.require_fields(fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        _require_one_free_degree(self)
        _require_replicas_for_algorithm(self)
        _require_a_pipeline_that_runs(self)

    @classmethod
    def parse(cls, spec: str) -> Plan:
        """The plan that ``"zero=3,tp=2,recompute=full"`` describes. An empty text gives the default plan.

        A plan's repr and str are understood too.

        Raises:
            PlanError: A field is unknown (with the nearest one), repeated, or its value is not allowed.
        """
        return cls(**text.parse_spec(spec))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` described; fields that are missing take their defaults."""
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON-friendly values."""
        return {name: _plain(getattr(self, name)) for name in CHECKS}

    def resolve(self, world_size: int) -> Plan:
        """The same plan with concrete degrees.

        Raises:
            PlanError: The degrees do not multiply to ``world_size``; it lists those that would.
        """
        return Plan(**{**self.to_dict(), **fill(self.degrees, world_size)})

    @property
    def degrees(self) -> dict[str, int]:
        """The degree of each mesh axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def dp(self) -> int:
        """The number of data-parallel ranks, each with its share of the batch; the plan must be resolved."""
        if -1 in (self.dp_replicate, self.dp_shard):
            raise PlanError(f"the data-parallel degree of {self!r} is open; type plan.resolve(world_size)")
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """The number of ranks; the plan must be resolved."""
        return self.dp * self.tp * self.pp

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters live as FSDP shards between steps: ``zero`` 2 and 3."""
        return self.zero >= 2

    def require_supported(self) -> None:
        """Raises `NotImplementedError` that names the first field whose value this release cannot run."""
        support.require_supported(self)

    def describe(
        self, world_size: int | None = None, num_parameters: int | None = None, root_parameters: int = 0
    ) -> str:
        """What is sharded, replicated and moved, per rank and step, as text.

        Args:
            world_size: Resolves the plan first; without it open degrees stay symbols.
            num_parameters: Of the unsharded model; with it the text gives bytes held (fp32 Adam) and sent.
            root_parameters: Of those, FSDP's root unit's, which ``zero=3`` gathers once a step and not twice.
        """
        return describe(self if world_size is None else self.resolve(world_size), num_parameters, root_parameters)

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in {"zero": self.zero, **self._changes()}.items())

    def __repr__(self) -> str:
        shown = {"zero": self.zero, **self._changes()}  # the default is no secret
        return f"Plan({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(repr(self.to_dict()))

    def __reduce__(self) -> tuple[Any, tuple[dict[str, Any]]]:
        # a read-only mapping (tp_plan) cannot be pickled
        return Plan.from_dict, (self.to_dict(),)

    def _changes(self) -> dict[str, Any]:
        """The fields that differ from their defaults, in the form that reads best."""
        return {
            field.name: text.spell(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _require_one_free_degree(plan: Plan) -> None:
    if plan.dp_replicate == plan.dp_shard == -1:
        raise PlanError(
            "dp_replicate=-1 and dp_shard=-1 cannot both take the ranks that are left; type dp_replicate=-1,dp_shard=1"
        )


def _require_replicas_for_algorithm(plan: Plan) -> None:
    if plan.algorithm != "allreduce" and plan.zero != 0:
        raise PlanError(
            f"algorithm={plan.algorithm!r} works on replicas and zero={plan.zero} shards them; "
            f"type zero=0,algorithm={plan.algorithm}"
        )


def _require_a_pipeline_that_runs(plan: Plan) -> None:
    if plan.pp == 1:
        return
    pipeline.virtual_stages(plan.schedule, plan.num_virtual_stages)
    if plan.num_microbatches is not None:
        pipeline.require_microbatches(plan.schedule, plan.pp, plan.num_microbatches)
