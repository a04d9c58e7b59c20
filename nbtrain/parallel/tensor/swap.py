"""Modules that compute something else from now on, and stay what they were: by class."""

from __future__ import annotations

from typing import Any

from torch import nn

from nbtrain.parallel.tensor.peers import TensorGrouped

_classes: dict[tuple[type, type], type[Any]] = {}


def cut_class(kind: type, own: type) -> type[Any]:
    """The subclass of ``own`` whose forward is that of ``kind``: one for each pair.

    Layers show what they are; a user's module keeps its name, which its code may ask for.
    """
    if (kind, own) not in _classes:
        name = f"{kind.__name__}{own.__name__}" if issubclass(kind, TensorGrouped) else own.__name__
        _classes[kind, own] = type(name, (kind, own), {"__module__": own.__module__})
    return _classes[kind, own]


def swap_class(module: nn.Module, kind: type, **attributes: Any) -> None:
    """Makes ``module`` one of ``kind`` too, once; and sets what ``kind`` needs to know."""
    if not isinstance(module, kind):
        module.__class__ = cut_class(kind, type(module))
    for name, value in attributes.items():
        setattr(module, name, value)
