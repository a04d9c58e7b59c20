"""Torch functions by what they do to the features in a tensor: one list for the trace and for `Marks`.

What is in no list mixes everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Func = Callable[..., Any]


def functions(names: str) -> list[Func]:
    """The functions of these names in torch, torch.nn.functional and on tensors."""
    owners = (torch, F, torch.special, Tensor)
    return [getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)]


def name_of(func: Func) -> str:
    name = getattr(func, "__name__", None) or repr(func)
    return str(getattr(func, "__self__", None) or name) if name == "__get__" else str(name)


def in_place(func: Func) -> bool:
    name = name_of(func)
    return name in _AUGMENTED or (name.endswith("_") and not name.endswith("__"))


_AUGMENTED = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}

_UNARY = (
    "abs absolute neg negative exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal square sin cos tan asin acos "
    "atan sinh cosh tanh sigmoid erf erfc erfinv floor ceil round trunc frac sign sgn isnan isinf isfinite logical_not "
    "bitwise_not clamp clamp_min clamp_max clip nan_to_num relu relu6 leaky_relu elu selu celu gelu silu mish softplus "
    "hardtanh hardsigmoid hardswish hardshrink softshrink tanhshrink softsign logsigmoid threshold tanh logit sinc "
    "fill_ zero_ masked_fill detach clone contiguous to float double half bfloat16 type type_as int long bool cpu cuda "
    "zeros_like ones_like full_like empty_like triu tril requires_grad_ expit ndtr positive alias real pin_memory"
)
_BINARY = (
    "add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow atan2 maximum minimum "
    "fmax fmin where lerp addcmul addcdiv eq ne lt le gt ge greater less equal_ logical_and logical_or logical_xor "
    "bitwise_and bitwise_or bitwise_xor copysign hypot xlogy prelu_ heaviside float_power logaddexp copy_ not_equal "
    "greater_equal less_equal"
)
_OPERATORS = (
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv div rdiv idiv floordiv rfloordiv ifloordiv "
    "mod rmod imod pow rpow ipow neg pos abs eq ne lt le gt ge and rand iand or ror ior xor rxor ixor invert"
)
_BOTH = f"{_UNARY} {_BINARY}".split()
ELEMENTWISE = [
    *functions(" ".join(_BOTH)),
    *functions(" ".join(f"{name}_" for name in _BOTH)),
    *functions(" ".join(f"__{name}__" for name in _OPERATORS.split())),
    Tensor.data.__get__,  # type: ignore[attr-defined]
]
RANDOM = functions(
    "dropout dropout_ alpha_dropout alpha_dropout_ feature_alpha_dropout feature_dropout rrelu rrelu_ bernoulli "
    "bernoulli_ rand_like randn_like uniform_ normal_ exponential_ native_dropout"
)


def draws(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it draws random numbers, or would in training."""
    if func not in _RANDOM:
        return False
    return bool(kwargs.get("p", args[1] if len(args) > 1 else 0.5))


_RANDOM = set(RANDOM)
NEW = functions("new_zeros new_ones new_full new_empty new_tensor")

VIEW = functions("view reshape")
LIKE = functions("view_as reshape_as")
EXPAND = functions("expand broadcast_to")
EXPAND_AS = functions("expand_as")
FLATTEN, UNFLATTEN = functions("flatten"), functions("unflatten")
REPEAT, REPEAT_INTERLEAVE = functions("repeat tile"), functions("repeat_interleave")
SPLIT, CHUNK = functions("split split_with_sizes"), functions("chunk tensor_split")
NARROW, INDEX = functions("narrow"), [Tensor.__getitem__]
CAT, STACK = functions("cat concat concatenate"), functions("stack")
PERMUTE = [
    *functions("transpose t permute movedim moveaxis swapaxes swapdims adjoint unsqueeze squeeze unbind select"),
    *(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")),
]
GATHER = functions("index_select flip roll")
SIZED = {*VIEW, *LIKE, *EXPAND, *EXPAND_AS, *UNFLATTEN, *SPLIT, *NARROW, *INDEX, *functions("tensor_split tile")}
MOVES = [
    *SIZED, *FLATTEN, *REPEAT, *REPEAT_INTERLEAVE, *CHUNK, *CAT, *STACK, *PERMUTE, *GATHER,
]  # fmt: skip
"""They move elements, and compute nothing."""

_DIM = (1, ("dim", "axis"), None)
_LAST = (1, ("dim", "axis"), -1)
ALONG: dict[Func, tuple[int, tuple[str, ...], Any]] = {
    **dict.fromkeys(
        functions(
            "sum mean prod amax amin max min argmax argmin all any logsumexp std var var_mean std_mean count_nonzero "
            "nansum nanmean"
        ),
        _DIM,
    ),
    **dict.fromkeys(
        functions("softmax log_softmax softmin cumsum cumprod logcumsumexp sort argsort median cummax cummin"), _LAST
    ),
    **dict.fromkeys(functions("norm"), (2, ("dim",), None)),
    **dict.fromkeys(functions("normalize"), (2, ("dim",), 1)),
}
"""They mix along a dim: the number of that argument, its names, and its default."""

READS = set(
    functions("item tolist numpy __bool__ __int__ __float__ __index__ equal allclose __array__ __setitem__ is_nonzero")
)
"""They give no tensor but look at values, or write them elsewhere."""

GLU = functions("glu")
NORMS = functions("layer_norm rms_norm")
MATMUL = functions("matmul bmm mm baddbmm __matmul__ __rmatmul__")
ADDED = set(functions("baddbmm"))
EINSUM = functions("einsum")
ATTENTION = functions("scaled_dot_product_attention")
