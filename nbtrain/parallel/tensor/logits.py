"""`CutLogits`: logits that look whole to a loss function, and of which a rank has its part of the vocabulary.

A model's code and a user's loss function run unchanged: shapes are the whole's, reshapes of other dims and what treats
each element by itself work on the part, and ``F.cross_entropy`` is computed by `token_losses`. Whatever else needs the
vocabulary whole gathers it, right but large, and says so once.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from nbtrain.errors import ModelError
from nbtrain.parallel.tensor.collectives import all_gathered, own_part
from nbtrain.parallel.tensor.loss import token_losses
from nbtrain.parallel.tensor.peers import Peers


def as_logits(part: Tensor, peers: Peers) -> Tensor:
    """``part`` (..., V/t) as the whole (..., V); differentiable."""
    return _cut(part, peers, part.dim() - 1)


def local_part(logits: Tensor) -> Tensor:
    """This rank's part of `CutLogits`; another tensor itself."""
    if not isinstance(logits, CutLogits):
        return logits
    with torch._C.DisableTorchFunctionSubclass():
        return logits.as_subclass(Tensor)


class CutLogits(Tensor):
    """Whole logits to the eye; the elements are those of a rank's part along one dim."""

    _peers: Peers
    _dim: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        function: Any = inspect.unwrap(func)  # a loss may be watched
        rule: Any = _RULES.get(function, _gather)
        return rule(function, args, kwargs)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's has one keyword, for itself
        return f"CutLogits(shape={tuple(self.shape)}, dtype={self.dtype}, cut over {self._peers.degree} ranks)"


def _cut(part: Tensor, peers: Peers, dim: int) -> CutLogits:
    with torch._C.DisableTorchFunctionSubclass():
        logits = part.as_subclass(CutLogits)
    logits._peers, logits._dim = peers, dim
    return logits


Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _gather(func: Any, args: Any, kwargs: Any) -> Any:
    """Gives ``func`` whole logits."""
    name = getattr(func, "__name__", repr(func))
    _refuse_change(name, kwargs)
    if name not in _quiet:
        _quiet.add(name)
        warnings.warn(
            f"{name} needs whole logits, and loss_parallel=True keeps them cut along the vocabulary: they are gathered "
            "for it; use F.cross_entropy, or type loss_parallel=False",
            stacklevel=4,
        )
    args, kwargs = tree_map_only(CutLogits, whole_logits, (args, kwargs))
    return func(*args, **kwargs)


_quiet: set[str] = set()


def _refuse_change(name: str, kwargs: Any) -> None:
    """What is gathered is a copy: to change it would change nothing."""
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or name in _CHANGING or kwargs.get("out") is not None:
        cure = name.rstrip("_") if in_place else "something that makes a new tensor, or loss_parallel=False"
        raise ModelError(
            f"{name if kwargs.get('out') is None else 'out='} would change cut logits in place; type {cure}"
        )


_IN_PLACE = ("add", "sub", "mul", "div", "truediv", "and", "or", "xor", "pow")
_CHANGING = {"__setitem__", "__set__", *(f"__i{name}__" for name in _IN_PLACE)}


def whole_logits(logits: Tensor) -> Tensor:
    """Gathered: (..., V) on every rank. Collective; differentiable, where all peers compute the same with it."""
    if not isinstance(logits, CutLogits):
        return logits
    whole: Tensor = _Whole.apply(local_part(logits), logits._peers, logits._dim)  # type: ignore[no-untyped-call]
    return whole


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, peers: Peers, dim: int) -> Tensor:
        ctx.peers, ctx.dim = peers, dim
        return all_gathered(part, peers, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return own_part(gradient, ctx.peers, ctx.dim), None, None


def _itself(func: Any, args: Any, kwargs: Any) -> Any:
    """What does not look at sizes, and hooks: of this very tensor, which a loss is computed from."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _locally(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map_only(CutLogits, local_part, (args, kwargs))
    return func(*args, **kwargs)


def _shape(logits: CutLogits) -> torch.Size:
    part, dim = local_part(logits), logits._dim
    return torch.Size((*part.shape[:dim], part.shape[dim] * logits._peers.degree, *part.shape[dim + 1 :]))


def _size(func: Any, args: Any, kwargs: Any) -> Any:
    shape = _shape(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return shape if dim is None else shape[dim]


def _numel(func: Any, args: Any, kwargs: Any) -> int:
    return _shape(args[0]).numel()


def _length(func: Any, args: Any, kwargs: Any) -> int:
    return _shape(args[0])[0]


def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """With numbers, or tensors of one element: on the part."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    cut = [value for value in tensors if isinstance(value, CutLogits)]
    if len(cut) > 1 or any(value.numel() != 1 for value in tensors if not isinstance(value, CutLogits)):
        return _gather(func, args, kwargs)
    return _cut(_locally(func, args, kwargs), cut[0]._peers, cut[0]._dim)


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """Where the vocabulary stays a dim of its own, the last."""
    logits, *sizes = args
    sizes = list(sizes or kwargs.get("shape", kwargs.get("size", ())))
    shape = _shape(logits)
    if sizes and isinstance(sizes[0], torch.dtype):
        return _gather(func, args, kwargs)
    sizes = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Iterable) else sizes
    if -1 in sizes:
        known = torch.Size(size for size in sizes if size != -1).numel()
        sizes[sizes.index(-1)] = shape.numel() // known if known else 0
    if logits._dim != len(shape) - 1 or not sizes or sizes[-1] != shape[-1]:
        return _gather(func, args, kwargs)
    part = local_part(logits)
    return _cut(func(part, (*sizes[:-1], part.shape[-1])), logits._peers, len(sizes) - 1)


def _flatten(func: Any, args: Any, kwargs: Any) -> Any:
    """Of dims before or behind the vocabulary."""
    logits, ndim = args[0], len(_shape(args[0]))
    start = (kwargs["start_dim"] if "start_dim" in kwargs else args[1] if len(args) > 1 else 0) % ndim
    end = (kwargs["end_dim"] if "end_dim" in kwargs else args[2] if len(args) > 2 else -1) % ndim
    if start <= logits._dim <= end and start != end:
        return _gather(func, args, kwargs)
    dim = logits._dim - (end - start) if logits._dim > end else logits._dim
    return _cut(local_part(logits).flatten(start, end), logits._peers, dim)


def _transpose(func: Any, args: Any, kwargs: Any) -> Any:
    logits = args[0]
    dims = [dim % len(_shape(logits)) for dim in (*args[1:], *kwargs.values())]
    if len(dims) != 2:
        return _gather(func, args, kwargs)
    at = dims[1 - dims.index(logits._dim)] if logits._dim in dims else logits._dim
    return _cut(local_part(logits).transpose(*dims), logits._peers, at)


def _permute(func: Any, args: Any, kwargs: Any) -> Any:
    logits, *dims = args
    dims = dims or list(kwargs.values())
    dims = list(dims[0]) if isinstance(dims[0], Iterable) else dims
    dims = [dim % len(_shape(logits)) for dim in dims]
    return _cut(local_part(logits).permute(dims), logits._peers, dims.index(logits._dim))


def _index(func: Any, args: Any, kwargs: Any) -> Any:
    """Anything but a choice among the vocabulary, which stays the last dim."""
    logits, index = args
    index = index if isinstance(index, tuple) else (index,)
    if logits._dim != len(_shape(logits)) - 1 or _chooses_last(index, len(_shape(logits))):
        return _gather(func, args, kwargs)
    found = local_part(logits)[index]
    return _cut(found, logits._peers, found.dim() - 1)


def _chooses_last(index: tuple[Any, ...], ndim: int) -> bool:
    """Whether something else than ``:`` stands for the last of ``ndim`` dims."""
    behind = [place + 1 for place, item in enumerate(index) if item is Ellipsis]
    items = [item for item in index[behind[0] if behind else 0 :] if item is not None]
    taken = sum(item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1 for item in items)
    reached = taken > 0 if behind else taken >= ndim
    return reached and not (isinstance(items[-1], slice) and items[-1] == slice(None))


def _cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    call = _CALL.bind(*args, **kwargs)
    call.apply_defaults()
    logits, given = call.arguments["input"], call.arguments
    if not isinstance(logits, CutLogits) or not _is_known(logits, given):
        return _gather(func, args, kwargs)
    losses, weights = _weighted_losses(logits, given)
    # as autocast has it
    dtype = torch.float32 if torch.is_autocast_enabled(logits.device.type) else logits.dtype
    if given["reduction"] == "none":
        return losses.view(given["target"].shape).to(dtype)
    total = losses.sum()
    return (total / weights.sum() if given["reduction"] == "mean" else total).to(dtype)


_CALL = inspect.signature(inspect.unwrap(F.cross_entropy))


def _is_known(logits: CutLogits, given: dict[str, Any]) -> bool:
    """Classes along the cut dim, one target for each of the others; no probabilities, no options of long ago."""
    shape, target = _shape(logits), given["target"]
    return (
        logits._dim == (1 if len(shape) > 1 else 0)
        and not target.is_floating_point()
        and target.shape == (*shape[: logits._dim], *shape[logits._dim + 1 :])
        and given["size_average"] is given["reduce"] is None
        and not (given["weight"] is not None and given["label_smoothing"])
    )


def _weighted_losses(logits: CutLogits, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """For each token, flat and in fp32: its loss, and what it counts in a mean."""
    target_N = given["target"].reshape(-1)
    part_Nv = local_part(logits).movedim(logits._dim, -1).reshape(len(target_N), -1)
    counted_N = target_N != given["ignore_index"]
    target_N = target_N.where(counted_N, 0)
    losses_N = token_losses(part_Nv, target_N, logits._peers, given["label_smoothing"])
    weights_N = counted_N.float()
    if given["weight"] is not None:
        weights_N = weights_N * given["weight"].float()[target_N]
    return (losses_N * weights_N).where(counted_N, 0), weights_N


def _functions(names: str) -> list[Any]:
    """The functions of these names in torch and on tensors, and what reads the attributes of these names."""
    found = [getattr(owner, name) for name in names.split() for owner in (torch, Tensor) if hasattr(owner, name)]
    return [each.__get__ if inspect.isgetsetdescriptor(each) else each for each in found]


_LOOKS = (
    "dtype device layout requires_grad grad_fn is_leaf is_cuda is_cpu is_meta is_sparse is_quantized is_nested ndim "
    "itemsize grad retains_grad dim ndimension is_floating_point is_complex is_contiguous register_hook get_device "
    "element_size is_inference is_signed requires_grad_ retain_grad"
)
_EACH = (
    "contiguous clone detach to float half bfloat16 double neg __neg__ mul multiply __mul__ __rmul__ div divide "
    "__truediv__ true_divide add __add__ __radd__ sub __sub__ tanh sigmoid exp clamp clamp_min clamp_max nan_to_num abs"
)
_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_functions(_LOOKS), _itself),
    **dict.fromkeys(_functions(_EACH), _elementwise),
    **dict.fromkeys(_functions("shape size"), _size),
    **dict.fromkeys(_functions("numel nelement"), _numel),
    **dict.fromkeys(_functions("__len__"), _length),
    **dict.fromkeys(_functions("view reshape"), _view),
    **dict.fromkeys(_functions("flatten"), _flatten),
    **dict.fromkeys(_functions("transpose swapaxes swapdims"), _transpose),
    **dict.fromkeys(_functions("permute"), _permute),
    Tensor.__getitem__: _index,
    cast(Any, Tensor._base).__get__: lambda func, args, kwargs: None,  # nothing changes them in place
    Tensor.__format__: lambda func, args, kwargs: repr(args[0]),  # on one rank too
    inspect.unwrap(F.cross_entropy): _cross_entropy,
}
