"""Objects that go to another rank without what that rank has already: modules, parameters, definitions of its own.

An optimizer, a scheduler or a loss function is full of links to the model. In a parcel these are addresses, which the
receiver looks up in its own tables: so the links are whole again, on its own parameters.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import types
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

Address = tuple[Any, ...]
_NAMESPACE = ("namespace",)
_NO_GROUP = ("no group",)  # a layer that was copied from a laid-out model; it is given one when it is laid out


class Packer(cloudpickle.Pickler):  # type: ignore[misc]  # it ships no types
    """Pickles for a rank whose namespace has the names ``theirs``.

    Args:
        file: To write to.
        addresses: Of the objects that the receiver has, by id.
        namespace: The notebook's names here: functions of cells live in it, and in the receiver's there.
        theirs: Names that the receiver has.
        definitions: Those of ``theirs`` that are classes and functions: its own are used.
    """

    def __init__(
        self,
        file: io.BytesIO,
        addresses: dict[int, Address],
        namespace: dict[str, Any],
        theirs: Collection[str],
        definitions: Collection[str],
    ) -> None:
        super().__init__(file)
        self._addresses = {**addresses, id(namespace): _NAMESPACE}
        self._namespace, self._theirs, self._definitions = namespace, theirs, definitions
        self.globals_ref[id(namespace)] = namespace

    def persistent_id(self, thing: Any) -> Address | None:
        if (address := self._addresses.get(id(thing))) is not None:
            return address
        if isinstance(thing, (type, types.FunctionType)) and thing.__module__ == "__main__":
            name = thing.__qualname__
            return ("own", name) if name in self._definitions and self._namespace.get(name) is thing else None
        if isinstance(thing, dist.ProcessGroup):
            return _NO_GROUP
        if isinstance(thing, (DTensor, DeviceMesh)):
            raise pickle.PicklingError(f"it holds a {type(thing).__name__} of this rank")
        return None

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, Optimizer):  # its state is sent by itself: each rank has its own
            return copyreg.__newobj__, (type(thing),), _without_state(thing)  # type: ignore[attr-defined]
        if type(thing) is torch.Tensor and thing.is_cuda:
            return _on_own_device, (thing.detach().cpu(),)
        return super().reducer_override(thing)

    def _dynamic_function_reduce(self, function: types.FunctionType) -> Any:
        """Names that the receiver has are the receiver's, ``rank`` among them."""
        make, args, (state, slots), *rest = super()._dynamic_function_reduce(function)
        if function.__globals__ is self._namespace:
            used = slots["__globals__"]
            slots["__globals__"] = {name: value for name, value in used.items() if name not in self._theirs}
        return make, args, (state, slots), *rest


class Unpacker(pickle.Unpickler):
    """Reads what `Packer` wrote.

    Args:
        data: From the other rank.
        find: This rank's object at an address.
        namespace: This rank's names.
    """

    def __init__(self, data: bytes, find: Callable[[Address], Any], namespace: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._find, self._namespace = find, namespace

    def persistent_load(self, address: Address) -> Any:
        if address == _NAMESPACE:
            return self._namespace
        if address == _NO_GROUP:
            return None
        return self._namespace[address[1]] if address[0] == "own" else self._find(address)


def definitions(namespace: dict[str, Any]) -> set[str]:
    """Names of the classes and functions that cells have defined."""
    return {name for name, value in namespace.items() if isinstance(value, (type, types.FunctionType))}


def _without_state(optimizer: Optimizer) -> dict[str, Any]:
    # all attributes, unlike torch's __getstate__: an optimizer of one's own may have more
    kept = {name: value for name, value in vars(optimizer).items() if name not in ("step", "state")}
    return {**kept, "state": defaultdict(dict)}


def _on_own_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cuda()
