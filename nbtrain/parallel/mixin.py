"""Changing what a module's forward does without wrapping the module.

A mixin goes in front of the module's class: names, ``isinstance``, the state dict and the module's own methods stay,
and hooks of FSDP and DDP run outside of what it does. Several mixins nest: the last one is the outermost.
"""

from __future__ import annotations

import copyreg
from typing import Any, cast

from torch import nn

from nbtrain.errors import ModelError


class Mixin:
    """Base of the mixins. A copy of a module, pickled or deep, is a plain one again: it is not laid out."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        function, arguments, *rest = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        if function is copyreg.__newobj__:  # type: ignore[attr-defined]  # not in the stubs
            # not by its name: pickle compares its argument with the object's class
            function, arguments = _new, (own_class(arguments[0]), *arguments[1:])
        return function, arguments, *rest


def _new(cls: Any, *arguments: Any) -> Any:
    return cls.__new__(cls, *arguments)


def mix(module: nn.Module, mixin: type[Mixin], **attributes: Any) -> None:
    """Puts ``mixin`` in front of the class of ``module``, with class attributes.

    Args:
        module: Changed in place.
        mixin: Its forward calls ``super().forward``.
        **attributes: Comparable: modules of one class get one class.

    Raises:
        ModelError: The module's forward was replaced on the instance, and a class would not be asked.
    """
    if "forward" in vars(module):
        raise ModelError(
            f"the forward of {type(module).__name__} was set on the instance, and nothing can go around it; define it "
            "in the class, or, if torch.compile made it, give the model itself with compile=True"
        )
    module.__class__ = _mixed(type(module), mixin, attributes)


def unmix(module: nn.Module) -> None:
    """Takes all mixins away from ``module`` and the modules inside: it may be a copy of one that was laid out."""
    for part in module.modules():
        if isinstance(part, Mixin):
            part.__class__ = own_class(type(part))


def own_class(cls: type) -> Any:
    """``cls`` without mixins."""
    while "_mixed_from" in vars(cls):
        cls = cls.__bases__[1]
    return cls


def _mixed(cls: type, mixin: type[Mixin], attributes: dict[str, Any]) -> Any:
    # asked from the class itself, which holds its subclasses weakly: a notebook defines its classes again and again
    subclasses: list[type] = cls.__subclasses__()
    for known in subclasses:
        if vars(known).get("_mixed_from") == (mixin, attributes):
            return known
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_mixed_from": (mixin, attributes)}
    return type(cls.__name__, (mixin, cls), {**attributes, **names})
