"""A tiny batch that a model's forward takes, found by trying."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn

from nbtrain.parallel.blueprint import Notes
from nbtrain.parallel.cell import unheard

Probe = tuple[tuple[Any, ...], dict[str, Any]]

SAMPLES, LENGTH, TRIES = 2, 8, 60
IMAGES = (32, 28, 64, 16, 8, 224)


def as_call(probe: Any, device: torch.device) -> Probe:
    """``probe`` as arguments of a forward."""

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    if isinstance(probe, Mapping):
        return (), {name: there(value) for name, value in probe.items()}
    return tuple(map(there, probe if isinstance(probe, tuple | list) else (probe,))), {}


def probe_inputs(model: nn.Module, device: torch.device) -> Probe | None:
    """Arguments for one forward: ids, floats or images.

    Samples 2 and sequences of 8 where the model takes them.

    Returns:
        Positional and keyword arguments; None where none of the tries gives an output.
    """
    with probing(model):
        for probe in islice(_candidates(model, device), TRIES):
            if _works(model, probe):
                return probe
    return None


@contextmanager
def probing(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, unheard, without fast paths and caches; its modes, buffers and random state come back."""
    modes = {module: module.training for module in model.modules()}
    notes = Notes(model.modules())
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    config = getattr(model, "config", None)
    cache = getattr(config, "use_cache", None)
    fast = torch.backends.mha.get_fastpath_enabled()
    devices = dict.fromkeys(parameter.device for parameter in model.parameters() if parameter.is_cuda)
    meta = any(parameter.is_meta for parameter in model.parameters())
    with torch.random.fork_rng(list(devices)), torch.device("meta") if meta else nullcontext(), unheard():
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            model.eval()
            if cache:
                config.use_cache = False  # type: ignore[union-attr]
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            if cache:
                config.use_cache = cache  # type: ignore[union-attr]
            for module, mode in modes.items():
                module.training = mode
            notes.restore()
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in buffers and buffers[name].shape == buffer.shape:
                        buffer.copy_(buffers[name])


def _works(model: nn.Module, probe: Probe) -> bool:
    args, kwargs = probe
    with torch.no_grad():
        try:
            return model(*args, **kwargs) is not None
        except Exception:  # not what it takes
            return False


def _candidates(model: nn.Module, device: torch.device) -> Iterator[Probe]:
    names = _parameters(model)
    ids, floats, images = _ids(model, device), _floats(model, device), _images(model, device)
    if hasattr(model, "config") and ids:
        yield (), {"input_ids": ids[0]}
        yield (), {"input_ids": ids[0], "decoder_input_ids": ids[0]}
    if hasattr(model, "config") and images:
        yield from (((), {"pixel_values": image}) for image in images)
    given = getattr(model, "dummy_inputs", None)
    if isinstance(given, dict):
        yield (), {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    kinds = _ordered(names, ids, floats, images)
    for count in dict.fromkeys((len(names), 1, 2)):
        if count == 1 or count == len(names):
            yield from (
                (choice, {}) for choice in product(*kinds[:count] if kinds[:count] else [[*ids, *images, *floats]])
            )
        else:
            yield from (((value, value), {}) for value in [*ids, *floats])


def _ordered(names: list[str], ids: list[Tensor], floats: list[Tensor], images: list[Tensor]) -> list[list[Tensor]]:
    """For each parameter what it may be, the likely first."""
    kinds = []
    for name in names:
        lowered = name.lower()
        if "image" in lowered or "img" in lowered or "pixel" in lowered:
            kinds.append([*images, *ids, *floats])
        elif "id" in lowered or "tok" in lowered:
            kinds.append([*ids, *images, *floats])
        else:
            kinds.append([*images, *ids, *floats] if images else [*ids, *floats])
    return kinds


def _parameters(model: nn.Module) -> list[str]:
    """Required positional parameters of forward."""
    found = inspect.signature(model.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in found if each.kind in positional and each.default is each.empty]


def _ids(model: nn.Module, device: torch.device) -> list[Tensor]:
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    if not sizes:
        return []
    length = min(LENGTH, *sizes) if min(sizes) > 1 else LENGTH
    generator = torch.Generator("cpu").manual_seed(0)
    small = torch.randint(min(sizes), (SAMPLES, LENGTH), generator=generator, device="cpu")
    large = torch.randint(max(sizes), (SAMPLES, LENGTH), generator=generator, device="cpu")
    return [each.to(device) for each in dict.fromkeys((small, large, small[:, :length], small[:, 0]))]


def _floats(model: nn.Module, device: torch.device) -> list[Tensor]:
    widths: dict[int, None] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            widths[module.in_features] = None
        elif isinstance(module, nn.MultiheadAttention):
            widths[module.embed_dim] = None
        elif isinstance(module, nn.Embedding):
            widths[module.embedding_dim] = None
        elif isinstance(module, nn.LayerNorm):
            widths[module.normalized_shape[-1]] = None
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = [shape for width in widths for shape in ((SAMPLES, LENGTH, width), (SAMPLES, width))]
    dtype = _dtype(model)
    return [torch.randn(shape, generator=generator, device="cpu").to(device, dtype) for shape in shapes[:12]]


def _images(model: nn.Module, device: torch.device) -> list[Tensor]:
    first = next((each for each in model.modules() if isinstance(each, nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)
    if first is None:
        return []
    num_dims = len(first.kernel_size)
    generator = torch.Generator("cpu").manual_seed(0)
    sizes = [size for size in dict.fromkeys((*_sizes(model), *IMAGES)) if num_dims < 3 or size < 64]
    shapes = [(SAMPLES, first.in_channels, *(size,) * num_dims) for size in sizes]
    return [torch.randn(shape, generator=generator, device="cpu").to(device, _dtype(model)) for shape in shapes]


def _sizes(model: nn.Module) -> list[int]:
    """Attributes that tell an image's size."""
    found = []
    for owner in (model, getattr(model, "config", None), *model.modules()):
        for name in ("image_size", "img_size", "input_size", "resolution"):
            value = getattr(owner, name, None)
            value = value[0] if isinstance(value, tuple | list) and value else value
            found += [value] if isinstance(value, int) and value > 0 else []
    return found


def _dtype(model: nn.Module) -> torch.dtype:
    return next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
