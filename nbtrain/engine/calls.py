"""What the notebook calls on a rank by name: each function gets the rank's namespace first and returns plain data.

The notebook's side names these as strings (`nbtrain.cluster.session`), so that it need not import torch; a test
resolves every name.
"""

from __future__ import annotations

from typing import Any

import torch
from IPython.core.getipython import get_ipython

from nbtrain.engine import groups, guard, replay
from nbtrain.engine.values import portable
from nbtrain.errors import UsageError, nearest
from nbtrain.parallel import cell
from nbtrain.parallel.mesh import build_mesh
from nbtrain.plan import Plan

_SHELL_NAMES = {"In", "Out", "get_ipython", "exit", "quit", "open"}


def join(ns: dict[str, Any], **options: Any) -> dict[str, Any]:
    """See `nbtrain.engine.groups.join`."""
    return groups.join(ns, **options)


def num_formed(ns: dict[str, Any]) -> int:
    """See `nbtrain.engine.groups.num_formed`."""
    return groups.num_formed()


def rejoin(ns: dict[str, Any], *args: Any, **options: Any) -> None:
    """See `nbtrain.engine.groups.rejoin`."""
    groups.rejoin(ns, *args, **options)


def prepare(ns: dict[str, Any], **options: Any) -> None:
    """See `nbtrain.engine.groups.prepare`."""
    groups.prepare(ns, **options)


def describe(ns: dict[str, Any]) -> dict[str, Any]:
    """See `nbtrain.engine.groups.describe`."""
    return groups.describe(ns)


def recipe(ns: dict[str, Any]) -> bytes:
    """See `nbtrain.engine.groups.recipe`."""
    return groups.recipe()


def define(ns: dict[str, Any], cells: list[tuple[str, str, int]]) -> list[str]:
    """Run definitions of earlier cells: (source, label, offset) each. What failed, a line each."""
    return [line for cell_ in cells for line in replay.run(ns, *cell_)]


def heal(ns: dict[str, Any], newcomers: tuple[int, ...]) -> dict[str, Any]:
    """See `nbtrain.parallel.heal.heal`."""
    from nbtrain.parallel.heal import heal

    return heal(ns, newcomers)


def set_guard(ns: dict[str, Any], mode: str) -> None:
    """See `nbtrain.engine.guard.set_mode`."""
    guard.set_mode(mode)


def push(ns: dict[str, Any], name: str, value: Any) -> None:
    """Bind ``name`` in the rank's namespace."""
    ns[name] = value


def pull(ns: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The values of ``names`` as data that a process without torch can hold.

    Raises:
        UsageError: a name that the rank does not have.
    """
    missing = [name for name in names if name not in ns]
    if missing:
        visible = [name for name in ns if not name.startswith("_") and name not in _SHELL_NAMES]
        raise UsageError(f"no {missing[0]!r} on the rank; {nearest(missing[0], visible)}")
    return {name: portable(ns[name]) for name in names}


def take_result(ns: dict[str, Any], number: int) -> Any:
    """The value of the last expression of cell ``number``; it is let go, so that a result holds no memory.

    Raises:
        UsageError: it was taken, or so many cells ran since that it was let go.
    """
    kept = get_ipython().kernel.kept
    if number not in kept:
        raise UsageError("the value of this cell is no longer there; bind it to a name in the cell and pull that")
    return portable(kept.pop(number))


def bind_plan(ns: dict[str, Any], plan: dict[str, Any]) -> None:
    """Bind ``plan`` and its mesh."""
    ns["plan"] = Plan.from_dict(plan)
    cell.tell_plan(ns["plan"])
    ns["mesh"] = build_mesh(ns["plan"], groups.device_type())


def parallelize_names(ns: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Replace each named module by its parallel form and say what this rank holds of it.

    Raises:
        UsageError: a name that is not bound, or not to a module.
    """
    from nbtrain.parallel.holdings import holdings
    from nbtrain.parallel.parallelize import parallelize

    for name in names:
        if not isinstance(ns.get(name), torch.nn.Module):
            modules = [key for key, value in ns.items() if isinstance(value, torch.nn.Module)]
            given = f"a {type(ns[name]).__name__}, not a module" if name in ns else "not defined"
            raise UsageError(f"--parallelize {name}: it is {given}; {nearest(name, modules or ['a name of a module'])}")
    for name in names:
        ns[name] = parallelize(ns[name])
    return {name: holdings(ns[name]) for name in names}
