"""What a parameter is, by the structure around it; and dropout, wherever it hides."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from nbtrain.parallel.blocks import repeated_blocks


def traits_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Of each parameter: "tied", "norm", "bias", "fused qkv", and "in NAME" where it is in a repeated block."""
    found: dict[str, list[str]] = {name: [] for name, _ in model.named_parameters()}
    blocks = repeated_blocks(model)
    uses: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), []).append(name)
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        found[name] += ["tied"] * (len(uses[id(parameter)]) > 1)
        found[name] += ["norm"] * _is_norm(owner)
        found[name] += ["bias"] * name.endswith("bias")
        found[name] += ["fused qkv"] * _is_fused_qkv(owner, parameter)
        found[name] += [f"in {block}" for block in blocks if name.startswith(f"{block}.")]
    return {name: tuple(traits) for name, traits in found.items()}


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)) or type(module).__name__.endswith(
        "Norm"
    )


def _is_fused_qkv(owner: nn.Module, parameter: nn.Parameter) -> bool:
    """A square layer three times over; ``nn.MultiheadAttention`` holds one too."""
    inputs = getattr(owner, "in_features", getattr(owner, "nx", getattr(owner, "embed_dim", 0)))
    sizes = set(parameter.shape)
    return bool(inputs) and 3 * inputs in sizes and sizes <= {inputs, 3 * inputs}


def without_dropout(model: nn.Module) -> list[str]:
    """Sets all rates of dropout to 0; the names of the modules that had others."""
    quiet = []
    for name, module in model.named_modules():
        holders = [module, vars(module).get("config")]
        changed = [_set_rates(holder) for holder in holders if holder is not None]
        if any(changed):
            quiet.append(name)
    return quiet


def _set_rates(holder: Any) -> bool:
    rates = [key for key, value in vars(holder).items() if isinstance(value, float) and value and _is_rate(holder, key)]
    for key in rates:
        setattr(holder, key, 0.0)
    return bool(rates)


def _is_rate(holder: Any, key: str) -> bool:
    return "drop" in key or (key == "p" and isinstance(holder, _DropoutNd))


DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_DROPPING = {function: inspect.signature(function) for function in DROPOUTS}


class DroppingNothing(TorchFunctionMode):
    """Inside, functions drop nothing.

    Attributes:
        found: Which of them would have, as "F.NAME".
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPPING:
            call = _DROPPING[func].bind(*args, **kwargs)
            call.apply_defaults()
            if call.arguments["training"] and call.arguments["p"]:
                self.found.add(f"F.{func.__name__}")
                call.arguments["p"] = 0.0
            return func(*call.args, **call.kwargs)
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            self.found.add("F.scaled_dot_product_attention")
            kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)
