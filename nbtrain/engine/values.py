"""Values on their way to the notebook's kernel, which has no torch."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from nbtrain.events import Unportable

# Modules whose objects the kernel may be unable to rebuild: torch is not imported there, and a class that was defined
# in a cell lives on the ranks only.
_FOREIGN = ("torch", "__main__", "nbtrain.parallel", "nbtrain.engine", "nbtrain.telemetry", "transformers")
_WITHOUT_TORCH = ("nbtrain.parallel.report",)


def portable(value: Any) -> Any:
    """``value`` with tensors as NumPy arrays, 0-d ones as numbers, in nested containers too.

    bfloat16 becomes float32, which holds it exactly. A ``DTensor`` gives this rank's shard. What the kernel could not
    unpickle without torch becomes an `Unportable`, which keeps its type and repr.
    """
    try:
        converted = _convert(value)
    except Exception:  # cyclic, nested too deeply, or of a kind of tensor that NumPy does not know
        return _unportable(value)
    return converted if _travels(converted) else _unportable(value)


def _convert(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _array(value)
    if isinstance(value, (torch.Size, torch.dtype, torch.device)):
        return tuple(value) if isinstance(value, torch.Size) else str(value)
    if isinstance(value, Mapping):
        return {_convert(key): _convert(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = [_convert(item) for item in value]
        return type(value)(*fields) if not _is_foreign(type(value).__module__) else tuple(fields)
    if isinstance(value, (list, tuple, set, frozenset)) and type(value).__module__ == "builtins":
        return type(value)(_convert(item) for item in value)
    return value if _travels_alone(value) else _unportable(value)


def _array(tensor: torch.Tensor) -> Any:
    plain = tensor.detach()
    if isinstance(plain, DTensor):
        plain = plain.to_local()
    plain = plain.cpu().resolve_conj().resolve_neg()
    if plain.is_sparse or plain.layout != torch.strided:
        plain = plain.to_dense()
    if plain.dtype in (torch.bfloat16, *_float8_types()):
        plain = plain.float()
    array: np.ndarray[Any, Any] = plain.numpy()
    return array.item() if array.ndim == 0 else array.copy()


def _float8_types() -> tuple[torch.dtype, ...]:
    return tuple(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))


def _travels_alone(value: Any) -> bool:
    """Quick answers first: most values are plain numbers, strings and arrays."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.ndarray, np.generic)):
        return not (isinstance(value, np.ndarray) and value.dtype.hasobject)
    return _travels(value)


def _travels(value: Any) -> bool:
    """Whether a process without torch could unpickle ``value``."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return True
    try:
        data = pickle.dumps(value, protocol=5)
        reader = _ModuleReader(io.BytesIO(data))
        reader.load()
    except Exception:  # an object may raise anything from its __reduce__ or its constructor
        return False
    return not any(_is_foreign(name) for name in reader.modules)


def _is_foreign(module: str) -> bool:
    return module not in _WITHOUT_TORCH and any(module == name or module.startswith(f"{name}.") for name in _FOREIGN)


class _ModuleReader(pickle.Unpickler):
    """Unpickles this process's own bytes and notes which modules that needed."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.modules.add(module)
        return super().find_class(module, name)


def _unportable(value: Any) -> Unportable:
    return Unportable(f"{type(value).__module__}.{type(value).__qualname__}", _repr(value))


def _repr(value: Any) -> str:
    try:
        return repr(value)[:2000]
    except Exception as problem:
        return f"<its repr raised {type(problem).__name__}>"
