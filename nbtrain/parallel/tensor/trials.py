"""Proof of a tensor-parallel plan before training: a cut layer against the whole one, on a tiny batch.

One of each kind of layer is tried: a copy of it is cut, as the plan says, and run by all peers on the inputs that a
probe batch gave it in the whole model. Outputs and every gradient must be those of the whole layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from nbtrain.errors import ModelError, NbtrainError
from nbtrain.parallel.tensor.apply import lay_out
from nbtrain.parallel.tensor.chance import WithoutChance, undropped
from nbtrain.parallel.tensor.cuts import Layer, Region, TensorPlan
from nbtrain.parallel.tensor.parts import take_part
from nbtrain.parallel.tensor.probe import Probe, probing
from nbtrain.parallel.tensor.sequence import sequence_partial
from nbtrain.parallel.tensor.state import cuts_by_name

TOLERANCE = 1e-4
"""Of the largest element: fp32 sums of a few thousand terms in another order differ by less."""


@dataclass(frozen=True)
class Trial:
    """A kind of layer, and where it stands.

    Attributes:
        name: Of the one that is tried.
        plan: Of that one alone, under the name "it".
        all: Names of all modules of this kind.
    """

    name: str
    plan: TensorPlan
    all: tuple[str, ...]


@dataclass(frozen=True)
class Attempt:
    """What is needed to try one.

    Attributes:
        trial: Which.
        whole: A copy of the module, made before the probe went through the model: modules may keep what they compute.
        call: Its arguments in a forward on the probe.
    """

    trial: Trial
    whole: nn.Module
    call: Probe


def trials(model: nn.Module, plan: TensorPlan) -> list[Trial]:
    """One for each kind of region, and for each kind of cut layer outside of regions.

    With sequence parallelism code between blocks may mix positions too: the whole model is tried, where it has weights.
    """
    if plan.trunk and not any(parameter.is_meta for parameter in model.parameters()):
        return [Trial("", _alone(plan, ""), ("",))]
    modules = dict(model.named_modules())
    kinds: dict[Any, list[str]] = {}
    for name in _tops(plan):
        alone = _alone(plan, name)
        kinds.setdefault((type(modules[name]), _signature(alone)), []).append(name)
    return [Trial(names[0], _alone(plan, names[0]), tuple(names)) for names in kinds.values()]


def attempts(model: nn.Module, twin: nn.Module, plan: TensorPlan, probe: Probe) -> list[Attempt]:
    """Of what the probe reaches.

    Args:
        model: Whole, or on the meta device.
        twin: What runs in its place.
        plan: What is to be proved.
        probe: Arguments of the model's forward.

    Raises:
        ModelError: A module cannot be copied.
    """
    tried = trials(model, plan)
    copies = {trial.name: _copy(model, trial.name) for trial in tried}
    calls = _calls(twin, [trial.name for trial in tried], probe)
    return [Attempt(trial, copies[trial.name], calls[trial.name]) for trial in tried if trial.name in calls]


def refuted(tried: Iterable[Attempt], group: dist.ProcessGroup) -> dict[str, str]:
    """Names of the regions and layers that do not compute what they should, and why. Collective over peers.

    Args:
        tried: With the same weights and arguments on every peer; weights on the meta device are made up.
        group: The peers.
    """
    wrong: dict[str, str] = {}
    for attempt in tried:
        if problem := _problem(attempt, group):
            wrong |= dict.fromkeys(attempt.trial.all, problem)
    return wrong


def without(plan: TensorPlan, wrong: Mapping[str, str]) -> TensorPlan:
    """``plan`` without what was refuted: these layers stay whole."""
    gone = [name for name in plan.layers if _inside(name, wrong)]
    return replace(
        plan,
        layers={name: layer for name, layer in plan.layers.items() if name not in gone},
        regions={name: region for name, region in plan.regions.items() if name not in wrong},
        partial=tuple(name for name in plan.partial if not _inside(name, wrong)),
        whole={**plan.whole, **{name: _why(name, wrong) for name in gone}},
    )


def _tops(plan: TensorPlan) -> list[str]:
    """Blocks of the trunk with sequence parallelism; regions that are in none, and cut layers that are in neither."""
    tops = dict.fromkeys(plan.trunk)
    tops |= dict.fromkeys(name for name in plan.regions if not _inside(name, tops))
    return [*tops, *(name for name in plan.layers if not _inside(name, tops))]


def _inside(name: str, tops: Mapping[str, Any]) -> bool:
    return any(name == top or name.startswith(f"{top}.") or not top for top in tops)


def _why(name: str, wrong: Mapping[str, str]) -> str:
    return next(why for top, why in wrong.items() if _inside(name, {top: why}))


def _alone(plan: TensorPlan, name: str) -> TensorPlan:
    """What ``plan`` says of one module and what is inside, as if it were all: under the name "it"."""

    def inner(full: str) -> str:
        return f"it.{full.removeprefix(name).removeprefix('.')}".removesuffix(".")

    at = {name: True}
    layers: dict[str, Layer] = {inner(n): layer for n, layer in plan.layers.items() if _inside(n, at)}
    regions: dict[str, Region] = {inner(n): region for n, region in plan.regions.items() if _inside(n, at)}
    partial = tuple(inner(n) for n in plan.partial if _inside(n, at))
    trunk = tuple(inner(n) for n in plan.trunk if _inside(n, at))
    return TensorPlan(plan.degree, layers, regions, partial, trunk=trunk)


def _signature(plan: TensorPlan) -> str:
    layers = [(name, layer.style, sorted(layer.cuts.items())) for name, layer in plan.layers.items()]
    return repr((layers, list(plan.regions.items()), plan.partial, plan.trunk))


def _calls(model: nn.Module, names: list[str], probe: Probe) -> dict[str, Probe]:
    """The arguments of each module's first call in a forward of ``model`` on ``probe``."""
    calls: dict[str, Probe] = {}
    handles = []
    for name, module in model.named_modules():
        if name in names:

            def keep(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                calls.setdefault(name, tree_map(_copied, (args, kwargs)))

            handles.append(module.register_forward_pre_hook(keep, with_kwargs=True, prepend=True))
    try:
        with probing(model), torch.enable_grad():  # which inputs have a gradient is a part of the call
            model(*probe[0], **probe[1])
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _copy(model: nn.Module, name: str) -> nn.Module:
    try:
        return copy.deepcopy(model.get_submodule(name))
    except Exception as problem:  # a model's own code runs here
        what = f"'{name}'" if name else type(model).__name__
        raise ModelError(
            f"{what} cannot be copied, which trying it on a tiny batch needs ({type(problem).__name__}: {problem}); "
            "type tp=1, or leave it whole: tp_plan={'NAME': 'replicate'}"
        ) from problem


def _problem(attempt: Attempt, group: dist.ProcessGroup) -> str:
    """Why the cut layer is wrong; "" where it is right. In training and in evaluation, without dropout.

    The same on all peers, which go on together: what one of them alone finds, all hear.
    """
    whole, trial = attempt.whole, attempt.trial
    call = _made_up(whole, attempt.call)
    undropped(whole)
    cut = nn.ModuleDict({"it": copy.deepcopy(whole)})
    try:
        lay_out(cut, trial.plan, group, rank=dist.get_rank(group))
    except Exception as problem:
        return _impossible(trial, problem)
    for training in (True, False):
        if found := _first(_tried(whole.train(training), cut.train(training), call, trial), group):
            return found
        if found := _first(_difference(whole, cut, trial.plan, group), group):
            return found
    return ""


def _tried(whole: nn.Module, cut: nn.Module, call: Probe, trial: Trial) -> str:
    """Runs both, forward and backward; how outputs differ."""
    expected = _run(whole, call)
    try:
        got = _run(cut.get_submodule("it"), call)
    except Exception as problem:  # the user's code runs here, on parts
        return _impossible(trial, problem)
    for what, right, found in _pairs(expected, got):
        if error := _error(right, found):
            return f"its {what} would be off by {error:.2g}"
    return ""


def _impossible(trial: Trial, problem: Exception) -> str:
    told = str(problem).replace("'it'", f"'{trial.name}'").replace("'it.", f"'{trial.name}.".replace("'.", "'"))
    kind = "" if isinstance(problem, NbtrainError) else f"{type(problem).__name__}: "
    return f"its code cannot run on a part ({kind}{told.splitlines()[0] if told else ''})"


def _difference(whole: nn.Module, cut: nn.Module, plan: TensorPlan, group: dist.ProcessGroup) -> str:
    """How the gradients of parameters differ. Collective."""
    cuts, partial = cuts_by_name(cut, plan), {*plan.partial, *sequence_partial(cut, plan)}
    gradients = {name: parameter.grad for name, parameter in cut.get_submodule("it").named_parameters()}
    for name, gradient in gradients.items():
        if f"it.{name}" in partial and gradient is not None:
            dist.all_reduce(gradient, group=group)
    for name, parameter in whole.named_parameters():
        ours, theirs = parameter.grad, gradients[name]
        if ours is None and theirs is None:
            continue  # frozen, or not used
        if ours is None or theirs is None:
            return f"'{name}' would have {'a' if ours is None else 'no'} gradient"
        if (one := cuts.get(f"it.{name}")) is not None:
            ours = take_part(ours, one, dist.get_rank(group), group.size())
        if error := _error(ours, theirs):
            return f"the gradient of its '{name}' would be off by {error:.2g}"
    return ""


def _run(module: nn.Module, call: Probe) -> list[tuple[str, torch.Tensor]]:
    """Outputs and gradients of the inputs, of a sum of the outputs with fixed weights."""
    leaves, tree = tree_flatten(call)
    inputs = [_copied(leaf) for leaf in leaves]
    args, kwargs = tree.unflatten(inputs) if hasattr(tree, "unflatten") else call
    module.zero_grad()
    with torch.enable_grad(), WithoutChance():
        outputs = [leaf for leaf in tree_flatten(module(*args, **kwargs))[0] if _is_float(leaf) and leaf.requires_grad]
        generator = torch.Generator().manual_seed(0)
        total = sum((output * _weights(output, generator)).sum() for output in outputs)
        if isinstance(total, torch.Tensor):
            total.backward()  # type: ignore[no-untyped-call]
    gradients = [leaf.grad for leaf in inputs if _is_float(leaf) and leaf.grad is not None]
    return [("output", output.detach()) for output in outputs] + [("input's gradient", grad) for grad in gradients]


def _weights(output: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(output.shape, generator=generator).to(output)


def _pairs(expected: list[Any], got: list[Any]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    if len(expected) != len(got):
        empty = torch.zeros(())
        yield "number of outputs", empty, empty + abs(len(expected) - len(got))
        return
    for (what, ours), (_, theirs) in zip(expected, got, strict=True):
        yield what, ours, theirs


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, or 0.0 where it is rounding."""
    if ours.shape != theirs.shape:
        return float("inf")
    error = (ours.double() - theirs.double()).abs().max().item() if ours.numel() else 0.0
    scale = max(1.0, ours.abs().max().item() if ours.numel() else 0.0)
    tolerance = TOLERANCE if ours.dtype in (torch.float32, torch.float64) else 5e-2
    return 0.0 if error <= tolerance * scale else error


def _first(problem: str, group: dist.ProcessGroup) -> str:
    """The first problem of any peer. Collective."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, problem, group=group)
    return next(filter(None, everyone), "")


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    try:
        return copy.deepcopy(value)  # a cache of keys and values, which the forward fills
    except Exception:  # what cannot be copied is shared, as it would be by two calls
        return value


def _made_up(module: nn.Module, call: Probe) -> Probe:
    """Gives what is on the meta device values, and returns ``call`` with other numbers: those that a twin without
    weights computed are all alike. Small numbers, the same on every peer."""
    generator = torch.Generator().manual_seed(2)
    tensors = [leaf for leaf in tree_flatten(call)[0] if isinstance(leaf, torch.Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")

    def drawn(tensor: torch.Tensor, scale: float) -> torch.Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) if tensor.is_meta else tensor
        values = (torch.randn(tensor.shape, generator=generator) * scale).to(device, tensor.dtype)
        return values.requires_grad_(tensor.requires_grad)

    made: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for slots in (part._parameters, part._buffers):
            for name, old in slots.items():
                if old is not None and old.is_meta:
                    if id(old) not in made:
                        new = drawn(old, 0.1).detach()
                        made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                    slots[name] = made[id(old)]  # type: ignore[assignment]
    if not made:
        return call
    args, kwargs = tree_map(lambda leaf: drawn(leaf, 1.0) if isinstance(leaf, torch.Tensor) else leaf, call)
    return args, kwargs
