"""A plan tried on the probe batch, part by part, before anything is cut.

What a column layer gives is narrowed to a part, and the region's own code runs on it up to the row layer, whose input
must be that part of what it is in the whole model. The row then gives what it gives in the whole model, so that no part
waits for another: one process, no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from nbtrain.parallel.tensor.cuts import Cut, TensorPlan
from nbtrain.parallel.tensor.marks import Mark, Marks, mark
from nbtrain.parallel.tensor.names import tensors
from nbtrain.parallel.tensor.probe import Probe, probing

TOLERANCE = 1e-3
"""Of the largest number, in fp32; half-precision types round to 3 digits."""


class Refused(Exception):
    """A region's code does not compute on a part what it computes on the whole.

    Attributes:
        region: Its name.
    """

    def __init__(self, region: str, why: str) -> None:
        super().__init__(why)
        self.region = region


def prove(model: nn.Module, plan: TensorPlan, probe: Probe) -> None:
    """Runs the first and the last part of each region.

    Raises:
        Refused: The first region that does not work.
    """
    with probing(model), torch.no_grad():
        seen: dict[str, list[Tensor]] = {}
        with _watched(model, plan, seen):
            _run(model, probe)
        for part in dict.fromkeys((0, plan.degree - 1)):
            with _replayed(model, plan, part, {name: iter(inputs) for name, inputs in seen.items()}):
                _run(model, probe)


def _run(model: nn.Module, probe: Probe) -> None:
    torch.manual_seed(0)
    model(*probe[0], **probe[1])


def _names(plan: TensorPlan, style: str) -> Iterator[str]:
    inside = {f"{name}.{own}" if name else own for name, region in plan.regions.items() for own in region.layers}
    return (name for name, layer in plan.layers.items() if layer.style == style and name in inside)


@contextmanager
def _watched(model: nn.Module, plan: TensorPlan, seen: dict[str, list[Tensor]]) -> Iterator[None]:
    """Keeps the rows' inputs."""
    with ExitStack() as stack:
        for name in _names(plan, "rowwise"):
            keep = _keep(seen.setdefault(name, []))
            stack.callback(model.get_submodule(name).register_forward_pre_hook(keep, with_kwargs=True).remove)
        yield


def _keep(into: list[Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        into.append(next(iter(tensors((args, kwargs)))))

    return hook


@contextmanager
def _replayed(model: nn.Module, plan: TensorPlan, part: int, seen: dict[str, Iterator[Tensor]]) -> Iterator[None]:
    """The model as a part of it."""
    with ExitStack() as stack:
        for name in _names(plan, "colwise"):
            cut = plan.layers[name].cuts["weight"]
            hook = _narrow(cut, plan.degree, part)
            stack.callback(model.get_submodule(name).register_forward_hook(hook, prepend=True).remove)
        for name in _names(plan, "rowwise"):
            check = _check(name, plan.layers[name].cuts["weight"], plan.degree, part, seen[name])
            stack.callback(model.get_submodule(name).register_forward_pre_hook(check, with_kwargs=True).remove)
        for name, region in plan.regions.items():
            marks = Marks(plan.degree, part=part, enter=_same) if region.written else None
            stack.enter_context(_wrapped(model.get_submodule(name), name, marks))
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _part(tensor: Tensor, cut: Cut, degree: int, part: int) -> Tensor:
    """Of the last dim."""
    return torch.cat([each.chunk(degree, -1)[part] for each in torch.split(tensor, list(cut.segments), -1)], -1)


def _narrow(cut: Cut, degree: int, part: int) -> Callable[..., Tensor]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return mark(_part(output, cut, degree, part), Mark(output.ndim - 1, cut.segments))

    return hook


def _check(name: str, cut: Cut, degree: int, part: int, seen: Iterator[Tensor]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunction():
            given = next(iter(tensors((args, kwargs))))
            whole = next(seen)
            if not _close(given, _part(whole, cut, degree, part)):
                raise _Different(f"what comes to {name!r} is not a part of what should come")
            return ((whole, *args[1:]), kwargs) if args else (args, dict.fromkeys(kwargs, whole))

    return hook


class _Different(Exception):
    pass


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if found.is_meta:
        return True
    found, expected = found.nan_to_num(), expected.nan_to_num()
    error, scale = (found - expected).abs().max(), expected.abs().max()
    return bool(error <= (TOLERANCE if found.dtype.itemsize > 2 else 30 * TOLERANCE) * scale + 1e-6)


@contextmanager
def _wrapped(module: nn.Module, name: str, marks: Marks | None) -> Iterator[None]:
    """Its forward tells the region's name when it fails."""
    own, had = module.forward, "forward" in vars(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            with marks or nullcontext():
                return own(*args, **kwargs)
        except Refused:
            raise
        except Exception as error:
            raise Refused(name, str(error).partition("\n")[0]) from error

    module.forward = forward
    try:
        yield
    finally:
        if had:
            module.forward = own
        else:
            del module.forward
