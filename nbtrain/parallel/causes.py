"""What most likely made a plan differ from one device, read off which comparisons differ and by what."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from nbtrain.parallel.report import Row
from nbtrain.plan import Plan

Traits = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Evidence:
    """The first step and kind that differ.

    Attributes:
        wrong: Its rows that differ.
        right: Its others.
        plan: Resolved.
        world_size: Ranks.
        traits: What each parameter is.
        draws: Whether the model draws random numbers in its forward.
        updated: Buffers that forward updates and that differ behind it.
    """

    wrong: list[Row]
    right: list[Row]
    plan: Plan
    world_size: int
    traits: Traits
    draws: bool
    updated: list[str]

    @property
    def kind(self) -> str:
        return self.wrong[0].kind

    @property
    def step(self) -> int:
        return self.wrong[0].step

    @property
    def factor(self) -> float | None:
        """The one number that all which differ are off by."""
        factors = [row.factor for row in self.wrong if row.factor is not None]
        if len(factors) < len(self.wrong) or any(not math.isclose(each, factors[0], rel_tol=1e-2) for each in factors):
            return None
        return factors[0]

    @property
    def common(self) -> list[str]:
        """What all parameters that differ are. Empty where all differ."""
        if not self.right:
            return []
        shared = set.intersection(*(set(self.traits.get(row.name, ())) for row in self.wrong))
        return [trait for trait in self.traits.get(self.wrong[0].name, ()) if trait in shared]


def likely_cause(
    rows: tuple[Row, ...],
    plan: Plan,
    world_size: int,
    traits: Traits,
    *,
    draws: bool = False,
    updated: Collection[str] = (),
) -> str:
    """In words; "" where nothing differs."""
    first = next((row for row in rows if not row.ok), None)
    if first is None:
        return ""
    together = [row for row in rows if (row.step, row.kind) == (first.step, first.kind)]
    wrong, right = [row for row in together if not row.ok], [row for row in together if row.ok]
    buffers = [row.name for row in rows if (row.step, row.kind, row.ok) == (first.step, "buffer", False)]
    evidence = Evidence(wrong, right, plan, world_size, traits, draws, [name for name in buffers if name in updated])
    return next(cause for rule in _RULES if (cause := rule(evidence)))


def _missing(evidence: Evidence) -> str:
    if evidence.kind != "gradient" or not evidence.wrong[0].note.endswith("has none"):
        return ""
    return (
        "what forward uses differs: a parameter that gets no gradient on one side is left alone by the optimizer there"
    )


def _not_finite(evidence: Evidence) -> str:
    if not any(row.note.endswith("not finite") for row in evidence.wrong):
        return ""
    return "numbers that are not finite: try precision=fp32, a smaller learning rate, or look at the batch"


def _some_ranks(evidence: Evidence) -> str:
    odd = sorted({rank for row in evidence.wrong for rank in row.ranks})
    if not odd or len(odd) == evidence.world_size:
        return ""
    who = f"only rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} differ{'s' * (len(odd) == 1)}"
    why = {
        "weights": "weights were not broadcast, or not those of all modules",
        "loss": "the loss was not reduced over all ranks",
        "gradient": "gradients were not reduced over all ranks",
        "parameter": "ranks took different steps from the same gradients",
        "buffer": "a buffer is updated from a rank's own samples",
    }
    return f"{who}: {why[evidence.kind]}"


def _random(evidence: Evidence) -> str:
    if not evidence.draws:
        return ""
    return "the model draws random numbers in its forward, which differ between layouts; turn that off to compare"


def _updated(evidence: Evidence) -> str:
    if not evidence.updated or evidence.kind == "weights":
        return ""
    names = ", ".join(f"'{name}'" for name in evidence.updated[:3])
    return (
        f"buffers that forward updates from a rank's own samples: {names}. Take what they keep over all ranks' samples "
        "(torch.distributed.all_reduce in forward), or update them outside of training steps"
    )


def _weights(evidence: Evidence) -> str:
    if evidence.kind != "weights":
        return ""
    return (
        "the plan starts from other weights: make_model gives others each time it is called (NumPy's or Python's "
        "random numbers?), or laying out changes or does not broadcast some"
    )


def _loss(evidence: Evidence) -> str:
    if evidence.kind != "loss":
        return ""
    if evidence.step > 1:
        return "weights are the same and the loss is not: something else than parameters carries over between steps"
    scaled = f" The loss is {evidence.factor:.4g} times that of one device." if evidence.factor else ""
    return (
        "forward, or how losses of ranks are averaged: the weights are the same and the first loss is not. loss_fn "
        f"must be a mean over samples, or return (sum, count).{scaled}"
    )


def _all_by_one_factor(evidence: Evidence) -> str:
    if evidence.kind != "gradient" or evidence.right or evidence.factor is None:
        return ""
    return (
        f"all gradients are {evidence.factor:.4g} times those of one device{_known_factor(evidence.factor, evidence)}"
    )


def _known_factor(factor: float, evidence: Evidence) -> str:
    plan = evidence.plan
    degrees = {"data-parallel": plan.dp, "tensor-parallel": plan.tp, "all": evidence.world_size}
    for name, degree in degrees.items():
        if degree > 1 and math.isclose(factor, degree, rel_tol=1e-2):
            return f": they are summed over the {degree} {name} ranks where their mean is right"
        if degree > 1 and math.isclose(factor, 1 / degree, rel_tol=1e-2):
            return f": they are averaged over the {degree} {name} ranks twice, or where their sum is right"
    return ": a loss or gradient is scaled in one place only"


_MEANINGS = {
    "tied": "tied weights: only some of the places where they are used count",
    "norm": "parameters of norms: their gradients are a rank's own part and must be summed over ranks",
    "bias": "biases: their gradients are a rank's own part and must be summed, or are summed too often",
    "fused qkv": "fused QKV layers: they are cut without regard to heads",
}


def _one_sort(evidence: Evidence) -> str:
    trait = next((trait for trait in evidence.common if trait in _MEANINGS), None)
    if trait is None or evidence.kind != "gradient":
        return ""
    others = any(trait in evidence.traits.get(row.name, ()) for row in evidence.right)
    return f"only {_MEANINGS[trait]}{f' (here {_spelled(evidence)} alone)' if others else ''}"


def _one_place(evidence: Evidence) -> str:
    if evidence.kind != "gradient" or not evidence.right:
        return ""
    scaled = ""
    if (factor := evidence.factor) is not None:
        scaled = f". They are {factor:.4g} times those of one device{_known_factor(factor, evidence)}"
    if len(evidence.wrong) == 1 or any(trait.startswith("in ") for trait in evidence.common):
        return f"only the gradients of {_spelled(evidence)} differ: look at its forward and at hooks on it{scaled}"
    return ""


def _gradient(evidence: Evidence) -> str:
    if evidence.kind != "gradient":
        return ""
    return "backward, or the reduction of gradients: the loss is the same and gradients are not"


def _parameter(evidence: Evidence) -> str:
    if evidence.kind != "parameter":
        return ""
    return (
        "the optimizer: loss and gradients are the same and its step is not. Does it hold these parameters, with the "
        "same options? Adam divides a gradient that is 0 but for rounding by itself: verify with SGD, the default"
    )


def _buffer(evidence: Evidence) -> str:
    return "statistics that are taken from a rank's own samples, or are updated once more or less than on one device"


def _spelled(evidence: Evidence) -> str:
    inside = [trait.removeprefix("in ") for trait in evidence.common if trait.startswith("in ")]
    if len(evidence.wrong) > 1 and inside:
        return f"'{inside[0]}'"
    names = [f"'{row.name}'" for row in evidence.wrong]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


_RULES: list[Callable[[Evidence], str]] = [
    _missing,
    _not_finite,
    _some_ranks,
    _weights,
    _random,
    _updated,
    _loss,
    _all_by_one_factor,
    _one_sort,
    _one_place,
    _gradient,
    _parameter,
    _buffer,
]
