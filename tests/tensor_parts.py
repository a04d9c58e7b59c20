"""Tensor parallelism by threads of one process: each runs its part, and they meet at each collective.

Plain Megatron layers, so that a plan is tried apart from the layers that train with it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nbtrain.parallel.tensor.cuts import Cut, TensorPlan
from nbtrain.parallel.tensor.marks import Mark, Marks, mark


class Parts:
    """What the threads of ``degree`` parts share."""

    def __init__(self, degree: int) -> None:
        self.degree, self.barrier, self.slots = degree, threading.Barrier(degree, timeout=60), [torch.empty(0)] * degree

    def all(self, part: int, value: Tensor) -> list[Tensor]:
        self.slots[part] = value.detach()
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


class Sum(torch.autograd.Function):
    """Sums forward (g) or backward (f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Parts, part: int, forward: bool) -> Tensor:
        ctx.given = parts, part, forward
        return sum(parts.all(part, x)) if forward else x.view_as(x)  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        parts, part, forward = ctx.given
        return grad if forward else sum(parts.all(part, grad)), None, None, None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Parts, part: int) -> Tensor:
        ctx.part, ctx.size = part, x.shape[-1]
        return torch.cat(parts.all(part, x), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.narrow(-1, ctx.part * ctx.size, ctx.size), None, None


def part_of(tensor: Tensor, cut: Cut, degree: int, part: int) -> Tensor:
    pieces = [segment.chunk(degree, cut.dim)[part] for segment in tensor.split(list(cut.segments), cut.dim)]
    return torch.cat(pieces, cut.dim)


def whole_of(found: list[Tensor], cut: Cut) -> Tensor:
    degree = len(found)
    split = [each.split([size // degree for size in cut.segments], cut.dim) for each in found]
    return torch.cat([piece for pieces in zip(*split, strict=True) for piece in pieces], cut.dim)


class _Layer:
    """One part's forwards."""

    def __init__(self, plan: TensorPlan, parts: Parts, part: int) -> None:
        self.plan, self.parts, self.part = plan, parts, part

    def enter(self, x: Tensor) -> Tensor:
        return Sum.apply(x, self.parts, self.part, False)

    def lay_out(self, model: nn.Module) -> None:
        entered = {
            f"{name}.{own}" if name else own
            for name, region in self.plan.regions.items()
            if region.inputs
            for own in region.layers
        }
        cut: dict[int, nn.Parameter] = {}
        for name, layer in self.plan.layers.items():
            module = model.get_submodule(name)
            for own, each in layer.cuts.items():
                given = module.get_parameter(own)
                if id(given) not in cut:
                    piece = part_of(given.detach(), each, self.parts.degree, self.part).clone()
                    cut[id(given)] = nn.Parameter(piece, requires_grad=given.requires_grad)
                module._parameters[own] = cut[id(given)]
            if layer.style == "replicate":
                continue
            forward = getattr(self, layer.style)
            module.forward = forward(module, layer.cuts["weight"], name in entered)  # type: ignore[method-assign]
        for name, region in self.plan.regions.items():
            module = model.get_submodule(name)
            module.forward = self.region(module, region.inputs, region.written)  # type: ignore[method-assign]

    def region(self, module: nn.Module, inputs: tuple[int | str, ...], written: bool) -> Callable[..., Any]:
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            once: dict[int, Tensor] = {}
            for value in (*args, *kwargs.values()):
                once[id(value)] = value
            for key in inputs:
                value = args[key] if isinstance(key, int) else kwargs[key]
                once[id(value)] = self.enter(value)
            args = tuple(once[id(value)] for value in args)
            kwargs = {key: once[id(value)] for key, value in kwargs.items()}
            if not written:
                return own(*args, **kwargs)
            with Marks(self.parts.degree, part=self.part, enter=self.enter):
                return own(*args, **kwargs)

        return forward

    def colwise(self, module: Any, cut: Cut, entered: bool) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():
                out = self.product(module, x if entered else self.enter(x), cut.dim == 1)
                return mark(out, Mark(out.ndim - 1, cut.segments))

        return forward

    def product(self, module: Any, x: Tensor, turned: bool, bias: bool = True) -> Tensor:
        weight = module.weight.T if turned else module.weight
        return F.linear(x, weight, module.bias if bias else None)

    def rowwise(self, module: Any, cut: Cut, entered: bool) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():
                out = Sum.apply(self.product(module, x, cut.dim == 0, False), self.parts, self.part, True)
                return out if module.bias is None else out + module.bias

        return forward

    def colwise_gather_output(self, module: Any, cut: Cut, entered: bool) -> Callable[[Tensor], Tensor]:
        return lambda x: Gather.apply(self.product(module, self.enter(x), cut.dim == 1), self.parts, self.part)

    def vocab(self, module: Any, cut: Cut, entered: bool) -> Callable[[Tensor], Tensor]:
        def forward(ids: Tensor) -> Tensor:
            rows = len(module.weight)
            local = ids - self.part * rows
            inside = (local >= 0) & (local < rows)
            padding = -1 if module.padding_idx is None else module.padding_idx - self.part * rows
            padding_idx = padding if 0 <= padding < rows else None
            found = F.embedding(local.clamp(0, rows - 1), module.weight, padding_idx) * inside.unsqueeze(-1)
            return Sum.apply(found, self.parts, self.part, True)

        return forward


def in_parts(
    model: nn.Module, plan: TensorPlan, run: Callable[[nn.Module], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """``run(model)``, a loss, by ``plan.degree`` threads: the loss, and the gradients of whole parameters.

    Raises:
        The first error of a part.
    """
    parts = Parts(plan.degree)
    models, losses, errors = [copy.deepcopy(model) for _ in range(plan.degree)], [torch.empty(0)] * plan.degree, []

    def work(part: int) -> None:
        try:
            _Layer(plan, parts, part).lay_out(models[part])
            losses[part] = run(models[part])
            losses[part].backward()
        except threading.BrokenBarrierError:
            pass
        except Exception as error:
            errors.append(error)
            parts.barrier.abort()

    threads = [threading.Thread(target=work, args=(part,)) for part in range(plan.degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    return losses[0].detach(), _gradients(models, plan)


def _gradients(models: list[nn.Module], plan: TensorPlan) -> dict[str, Tensor]:
    cuts = {f"{name}.{own}": cut for name, layer in plan.layers.items() for own, cut in layer.cuts.items()}
    found = {}
    for name, _ in models[0].named_parameters():
        grads = [model.get_parameter(name).grad for model in models]
        if any(grad is None for grad in grads):
            continue
        if name in cuts:
            found[name] = whole_of(grads, cuts[name])  # type: ignore[arg-type]
        elif name in plan.partial:
            found[name] = sum(grads)  # type: ignore[arg-type]
        else:
            assert all(torch.allclose(grad, grads[0], atol=1e-6) for grad in grads), f"{name} differs between parts"
            found[name] = grads[0]  # type: ignore[assignment]
    return found
