"""A model's layers that can be cut, and hooks that tell the trace what enters and leaves them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nbtrain.parallel.tensor.features import Features
from nbtrain.parallel.tensor.names import nodes_of, set_nodes, tensors
from nbtrain.parallel.tensor.trace import Trace

Frames = tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """A module that computes ``x @ W + b``.

    Attributes:
        out_dim: Of its weight: 0 in `nn.Linear`, 1 in Hugging Face's ``Conv1D``.
    """

    out_dim: int
    num_inputs: int
    num_outputs: int


def matrix_of(module: nn.Module) -> Matrix | None:
    """By its forward if it is `nn.Linear`'s, else by what it gives for a random input."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or weight.ndim != 2 or set(module._parameters) - {"weight", "bias"} or len(module._modules):
        return None
    if type(module).forward is nn.Linear.forward:
        return Matrix(0, weight.shape[1], weight.shape[0])
    if isinstance(module, nn.Embedding):
        return None
    for out_dim in (0, 1) if isinstance(module, nn.Linear) else (1,):
        fits = bias is None or bias.shape == (weight.shape[out_dim],)
        if fits and _multiplies(module, weight, bias, out_dim):
            return Matrix(out_dim, weight.shape[1 - out_dim], weight.shape[out_dim])
    return None


def _multiplies(module: nn.Module, weight: Tensor, bias: Tensor | None, out_dim: int) -> bool:
    """Whether it gives ``x @ W + b`` for a random ``x`` and random parameters."""
    generator = torch.Generator("cpu").manual_seed(0)
    given = {"weight": torch.randn(weight.shape, generator=generator, device="cpu")}
    if bias is not None:
        given["bias"] = torch.randn(bias.shape, generator=generator, device="cpu")
    matrix = given["weight"].t() if out_dim == 0 else given["weight"]
    x = torch.randn(2, 3, matrix.shape[0], generator=generator, device="cpu")
    with torch.no_grad():
        try:
            out = functional_call(module, given, (x,))
        except Exception:  # it takes something else
            return False
        expected = x @ matrix + given.get("bias", 0)
    return isinstance(out, Tensor) and out.shape == expected.shape and torch.allclose(out, expected, 1e-3, 1e-3)


@dataclass
class Call:
    """One call of a layer.

    Attributes:
        frames: Names of the running modules, outermost first, the layer itself last.
        arguments: For each frame, the argument of its forward that is this layer's input; None where none is.
        input: Id of the input.
        order: Counts calls.
    """

    frames: Frames
    arguments: tuple[int | str | None, ...]
    input: int
    order: int


@dataclass
class Layers:
    """What one trace saw of the layers.

    Attributes:
        matrices, embeddings, attentions: By module name; of modules with several names the first.
        inputs, outputs: Nodes of each matrix's features.
        calls: Of each layer.
        given: Ids of the tensors that each call of a module was given, by its name.
    """

    model: nn.Module
    features: Features = field(default_factory=Features)
    matrices: dict[str, Matrix] = field(default_factory=dict)
    embeddings: dict[str, nn.Embedding] = field(default_factory=dict)
    attentions: dict[str, nn.MultiheadAttention] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[str, list[Call]] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)
    random: list[Frames] = field(default_factory=list)

    def __post_init__(self) -> None:
        inside: tuple[str, ...] = ()
        for name, module in self.model.named_modules():
            if inside and name.startswith(inside):
                continue
            if _plain_attention(module):
                self.attentions[name] = module
                inside += (f"{name}.",)
            elif type(module).forward is nn.Embedding.forward and "weight" in module._parameters:
                self.embeddings[name] = module
            elif matrix := matrix_of(module):
                self.matrices[name] = matrix
        self._tie()

    def _tie(self) -> None:
        """Layers of one weight are cut alike; what a head shares with an embedding has whole inputs."""
        owner: dict[int, str] = {}
        embedded = {id(module.weight) for module in self.embeddings.values()}
        for name, matrix in self.matrices.items():
            weight = self.model.get_submodule(name)._parameters["weight"]
            first = owner.setdefault(id(weight), name)
            if first == name:
                self.inputs[name] = self.features.new(matrix.num_inputs)
                self.outputs[name] = self.features.new(matrix.num_outputs)
            else:
                self.inputs[name], self.outputs[name] = self.inputs[first], self.outputs[first]
            if id(weight) in embedded:
                self.features.join(self.inputs[name], torch.zeros((), dtype=torch.long, device="cpu"))

    @contextmanager
    def hooked(self, trace: Trace) -> Iterator[None]:
        """Inside, the model's calls are recorded."""
        self.stack.clear()
        watch = _Watch(self, trace)
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                enter = module.register_forward_pre_hook(watch.enter(name), with_kwargs=True)
                leave = module.register_forward_hook(watch.leave(name), prepend=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            yield


class _Watch:
    """The hooks."""

    def __init__(self, layers: Layers, trace: Trace) -> None:
        self.layers, self.trace, self.order = layers, trace, 0
        self.given: list[dict[int, int | str]] = []
        self.alive: list[Any] = []

    def enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with torch._C.DisableTorchFunction():
                self.layers.stack.append(name)
                keys: list[int | str] = [*range(len(args)), *kwargs]
                self.given.append(dict(zip(map(id, (*args, *kwargs.values())), keys, strict=True)))
                self.alive.append((args, kwargs))
                if self._opaque(name):
                    return self._enter_layer(name, args, kwargs)
                return None

        return hook

    def leave(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            with torch._C.DisableTorchFunction():
                self.layers.stack.pop()
                self.given.pop()
                if self._opaque(name):
                    self.trace.inside_layer = False
                    if name in self.layers.outputs:
                        set_nodes(output, self.layers.outputs[name])
                return None

        return hook

    def _opaque(self, name: str) -> bool:
        return name in self.layers.matrices or name in self.layers.attentions or name in self.layers.embeddings

    def _enter_layer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Joins what comes with the layer's input features; inside, nothing is traced."""
        given = list(tensors((args, kwargs)))
        self.trace.inside_layer = True
        arguments = tuple(frame.get(id(given[0])) for frame in self.given)
        call = Call(tuple(self.layers.stack), arguments, id(given[0]), self.order)
        self.layers.calls.setdefault(name, []).append(call)
        self.order += 1
        whole = torch.zeros((), dtype=torch.long, device="cpu")
        for value in given:
            nodes = nodes_of(value)
            if name in self.layers.inputs:
                self.layers.features.join(self.layers.inputs[name], whole if nodes is None else nodes)
            elif nodes is not None:
                self.trace.whole(nodes)
        return _aliases(args), {key: _aliases(value) for key, value in kwargs.items()}


def _aliases(value: Any) -> Any:
    """The same tensors without names."""
    if isinstance(value, Tensor):
        return value.view(value.shape) if nodes_of(value) is not None else value
    return tuple(map(_aliases, value)) if isinstance(value, tuple) else value


def _plain_attention(module: nn.Module) -> bool:
    return type(module).forward is nn.MultiheadAttention.forward
