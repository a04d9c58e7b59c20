"""Activation recomputation: blocks whose forward runs again in backward, so that it need not keep what it computed.

::

    full        keeps a block's inputs
    n           the same, of every n-th block
    selective   keeps also what matrix products, convolutions and attention gave, and repeats the cheap rest
                (Korthikanti et al., arXiv 2205.05198, section 5, repeat attention too; fused attention keeps no
                scores, so that there is little to save and much to compute)

It is torch's non-reentrant checkpoint inside the block's forward: hooks of FSDP are outside of it, and what it gathers
in backward is there when the block runs again. The second forward draws the same random numbers, and leaves no trace in
buffers and counters: batch statistics would be counted twice.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from nbtrain.errors import ModelError
from nbtrain.parallel.blocks import repeated_blocks
from nbtrain.parallel.counters import Counters
from nbtrain.parallel.mixin import Mixin, mix

_KEPT_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_grouped_mm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
KEPT = [getattr(torch.ops.aten, name).default for name in _KEPT_NAMES if hasattr(torch.ops.aten, name)]
"""What "selective" does not compute twice."""


class Recomputed(Mixin):
    """Mixed into the class of a block, which then keeps only its inputs, and with ``_selective`` what is dear."""

    _selective: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward  # type: ignore[misc]  # of the block's class
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        args, kwargs = _without_cache(args, kwargs)
        contexts = functools.partial(create_selective_checkpoint_contexts, KEPT) if self._selective else noop_context_fn
        if torch.compiler.is_compiling():  # the compiler takes care of buffers
            return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        # one by one: torch looks for changes in place, and for GPUs with random states, among the arguments only
        leaves, form = tree_flatten((args, kwargs))
        block: Any = self  # an nn.Module beside it

        def run_leaves(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(leaves, form)
            return run(*args, **kwargs)

        around = functools.partial(_around, _Buffers(block), Counters(block), contexts)
        return checkpoint(run_leaves, *leaves, use_reentrant=False, context_fn=around)


def recompute(model: nn.Module, which: str | int) -> None:
    """Makes blocks of ``model`` compute again in backward, from now on.

    Args:
        model: Changed in place, before FSDP shards it.
        which: ``recompute`` of a plan.

    Raises:
        ModelError: The model has no repeated blocks. To repeat the whole model would keep no less: all of it would be
            computed again before backward begins.
    """
    if which == "none":
        return
    blocks = list({id(block): block for block in repeated_blocks(model).values()}.values())
    if not blocks:
        raise ModelError(
            f"{type(model).__name__} has no repeated blocks to recompute: an nn.ModuleList or nn.Sequential of at least"
            " two modules of one class that have layers inside; put its layers in one, or type recompute=none"
        )
    for block in blocks[:: which if isinstance(which, int) else 1]:
        mix(block, Recomputed, _selective=which == "selective")


def _without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments without Hugging Face's key-value cache: it would get the same keys a second time."""
    if not any(map(_is_cache, (*args, *kwargs.values()))):
        return args, kwargs
    named = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    return tuple(None if _is_cache(value) else value for value in args), named


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _around(buffers: _Buffers, counters: Counters, contexts: Callable[[], tuple[Any, Any]]) -> tuple[_Nested, _Nested]:
    """What the first forward and the next ones run in. Buffers are copied outside of what watches operations."""
    first, again = contexts()
    return (
        _Nested(counters.noted, buffers.noted, lambda: first),
        _Nested(_explained, counters.untouched, buffers.untouched, lambda: again),
    )


class _Nested:
    """Contexts around each other, the first outermost; made anew every time."""

    def __init__(self, *contexts: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context())
            self._entered = stack.pop_all()

    def __exit__(self, *problem: Any) -> bool | None:
        return self._entered.__exit__(*problem)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as problem:
        if "selective activation checkpoint has been mutated" not in str(problem):
            raise
        raise ModelError(
            "a block changes in place what a matrix product, a convolution or attention gave (inplace=True, +=), which "
            "recompute=selective keeps; type recompute=full, or let the block make a new tensor"
        ) from problem


# for each module, the names of its buffers that a forward was seen to change
_changing: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


class _Buffers:
    """The buffers of one block, for one forward and what runs it again."""

    def __init__(self, block: nn.Module) -> None:
        self._modules = [module for module in block.modules() if module._buffers]
        self._before: dict[tuple[nn.Module, str], torch.Tensor] = {}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """For the first forward: finds what it changes."""
        held = [(module, name, buffer, buffer._version) for module, name, buffer in self._slots()]
        copies = {
            (module, name): buffer.clone()
            for module, name, buffer, _ in held
            if not isinstance(module, _NormBase) and name in _changing.get(module, {name})
        }
        yield
        changed = [(m, name) for m, name, buffer, version in held if _is_changed(m, name, buffer, version)]
        unforeseen = self._learn(changed, copies)
        # of statistics the values do not matter: in training they are only written
        norms = {(m, name): buffer for m, name, buffer, _ in held if isinstance(m, _NormBase) and m.training}
        self._before = norms | {slot: copies[slot] for slot in changed if slot in copies}
        if unforeseen:
            raise ModelError(
                f"a block changed its buffer '{unforeseen[0]}' for the first time in a later step, and its old value "
                "is needed to run the block again; call trainer.step again: from now on it is kept"
            )

    def _learn(self, changed: list[tuple[nn.Module, str]], copies: dict[Any, torch.Tensor]) -> list[str]:
        """Remembers which buffers change; names of those whose value before is not there."""
        for module in self._modules:
            _changing.setdefault(module, set()).update(name for m, name in changed if m is module)
        return [name for module, name in changed if not isinstance(module, _NormBase) and (module, name) not in copies]

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """For the next ones: they begin with what the first one did, and leave no trace."""
        # other tensors in their place, not their values put back: autograd has saved them, and would see the change
        now = {(module, name): module._buffers[name] for module, name in self._before}
        for (module, name), value in self._before.items():
            module._buffers[name] = value.clone()
        try:
            yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer

    def _slots(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        for module in self._modules:
            yield from ((module, name, buffer) for name, buffer in module._buffers.items() if buffer is not None)


def _is_changed(module: nn.Module, name: str, buffer: torch.Tensor, version: int) -> bool:
    return module._buffers.get(name) is not buffer or buffer._version != version
