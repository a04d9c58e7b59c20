"""The process groups of a rank: made when the session starts, and made again when they were cut or destroyed.

The rendezvous is torchrun's: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name the session's store. Each group formed
there gets a prefix of its own (a generation, and a count within it), so that no key of an earlier group is found again.

Groups that are formed again in the same order get the same names, and torch finds the groups of a mesh by their names:
so the groups that were formed on the session's default group are remembered, and live models work on the new ones.
"""

from __future__ import annotations

import datetime
import functools
import os
import pickle
import socket
import sys
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nbtrain.engine import guard, recorder, wires
from nbtrain.events import RankInfo
from nbtrain.parallel import live
from nbtrain.parallel import mesh as meshes
from nbtrain.parallel.mesh import build_mesh
from nbtrain.plan import Plan

# A collective that a peer never joins ends after this. A person may look around in a debugger for longer than torch's
# 30 minutes meanwhile; the session's interrupt is what frees a rank sooner.
TIMEOUT = datetime.timedelta(days=7)
_torch_init: Any = c10d.init_process_group
_torch_new_group: Any = getattr(c10d, "_new_group_with_tag", None)


class _Membership:
    """This rank's part in the session. One a process, as torch's default group is."""

    backend = ""
    device = torch.device("cpu")
    generation = ""
    num_formed = 0  # default groups that were formed in this generation
    default: Any = None  # the default group that the session formed
    formed: list[tuple[tuple[Any, ...], dict[str, Any]]] = []  # noqa: RUF012  # further groups, as they were asked for
    whole = False  # all groups stand; not so once a connection was cut
    freed = False  # the cell that runs was cut out of a collective


_member = _Membership()


def join(
    user_ns: dict[str, Any], *, backend: str, threads: int, seed: int, generation: str, path: list[str]
) -> dict[str, Any]:
    """Form the groups of ``generation`` and put the promised names into the rank's namespace.

    ``path`` is the notebook's ``sys.path``: what can be imported there can be imported here.

    Returns `RankInfo` as a dict.
    """
    prepare(user_ns, backend=backend, threads=threads, seed=seed, path=path)
    begin(generation)
    _form_default()
    _watch_torch()
    user_ns["mesh"] = build_mesh(Plan(zero=0), device_type())
    _member.whole = True
    return describe(user_ns)


def prepare(user_ns: dict[str, Any], *, backend: str, threads: int, seed: int, path: list[str]) -> None:
    """What a rank does before it has a group: its device, its random state, and the names that need no group."""
    sys.path.extend(entry for entry in path if entry not in sys.path)
    device = _take_device(threads)
    _member.device, _member.backend = device, _backends(backend, device)
    torch.manual_seed(seed + int(os.environ["RANK"]))  # a fork copies the random state: all ranks would draw alike
    _fill(user_ns, device)


def recipe() -> bytes:
    """What a rank that takes a dead one's place needs to form the groups that there are, and the meshes on them."""
    return pickle.dumps((_member.formed, meshes.constructions()))


def num_formed() -> int:
    """How many further groups were formed on the session's default group."""
    return len(_member.formed)


def rejoin(
    user_ns: dict[str, Any],
    generation: str,
    num_groups: int,
    newcomers: Collection[int] = (),
    recipe: bytes | None = None,
) -> None:
    """Form the groups again, the first ``num_groups`` further ones too, and let live models go on with them.

    ``num_groups`` is what all ranks have formed: an interrupt may have caught some of them in the middle.
    ``newcomers`` hold nothing yet. One of them gets the survivors' `recipe`.
    """
    constructions: list[Any] = []
    leave()
    begin(generation)
    if recipe is not None:
        _member.formed, constructions = pickle.loads(recipe)
    # Kept whatever happens: an interrupt in here is followed by another `rejoin`.
    del _member.formed[num_groups:]
    _form_default()
    for args, options in list(_member.formed):
        with wires.recorded():
            _torch_new_group(*args, **options)
    if recipe is not None:
        meshes.adopt(constructions)
        _watch_torch()
        user_ns["mesh"] = build_mesh(Plan(zero=0), device_type())
    live.rebind(newcomers)
    _member.whole = True


def leave() -> None:
    """Destroy the groups, dead or alive, and what an interrupt has left of one that was being formed."""
    _member.whole = False
    wires.cut()
    if dist.is_initialized():
        dist.destroy_process_group()
    world: Any = c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        table.clear()
    world.tags_to_pg.clear()
    torch._C._distributed_c10d._unregister_all_process_groups()
    # Groups are named by this count, and ranks meet under these names: a rank that was interrupted while it formed its
    # default group has counted it, and another may not.
    world.group_count = 0
    wires.forget()


def device_type() -> str:
    """The kind of device that this rank computes on, whatever a cell has bound to ``device``."""
    return _member.device.type


def free() -> bool:
    """Cut the main thread out of the collective, or the rendezvous, that it waits in. From the control thread."""
    _member.whole, _member.freed = False, True
    guard.free()
    for group in list(c10d._world.pg_map) if torch.cuda.is_available() else ():
        group.abort()  # NCCL's way; on gloo it does nothing
    return wires.cut() > 0


def begin(generation: str) -> None:
    """Whatever groups are formed from now on belong to ``generation``: a cell, or a membership."""
    _member.generation, _member.num_formed, _member.freed = generation, 0, False
    guard.resume()


def state() -> str:
    """What became of the session's groups: "kept", or "lost" to a cut or to a cell that formed others."""
    whole = _member.whole and guard.intact() and not live.in_doubt()
    kept = whole and dist.is_initialized() and dist.group.WORLD is _member.default
    return "kept" if kept else "lost"


def was_freed() -> bool:
    """Whether the cell that runs was cut out of a collective: what it raises then is a consequence."""
    return _member.freed


def _form_default() -> None:
    _form(_member.backend, timeout=TIMEOUT)
    _member.default = dist.group.WORLD
    recorder.begin()


def _form(backend: str | None, **options: Any) -> None:
    """`torch.distributed.init_process_group` on the session's store."""
    _member.num_formed += 1
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with wires.recorded():
        store = dist.TCPStore(host, port, is_master=False)  # type: ignore[attr-defined]
        prefix = f"{_member.generation}/{_member.num_formed}"
        options["store"] = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        _torch_init(backend, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), **options)
    guard.begin(prefix)


def _watch_torch() -> None:
    """Remember further groups; accept code written for torchrun, which asks for what the session has done already."""

    @functools.wraps(_torch_init)
    def init_process_group(backend: str | None = None, init_method: str | None = None, **options: Any) -> None:
        if dist.is_initialized() and (backend or "") in str(dist.get_backend_config()):
            return
        if dist.is_initialized() or init_method not in (None, "env://") or options.get("store"):
            _torch_init(backend, init_method, **options)  # theirs alone, or torch's error: there is a group already
            return
        for name in ("rank", "world_size"):  # the environment says the same
            options.pop(name, None)
        _form(backend, **options)

    @functools.wraps(_torch_new_group)
    def new_group(*args: Any, **options: Any) -> Any:
        with wires.recorded():
            group = _torch_new_group(*args, **options)
        if dist.group.WORLD is _member.default:
            _member.formed.append((args, options))
        return group

    for module in (dist, c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]
    c10d._new_group_with_tag = new_group
    guard.install()


def _take_device(threads: int) -> torch.device:
    torch.set_num_threads(threads)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _backends(backend: str, device: torch.device) -> str:
    """nccl with a gloo group beside it for CPU tensors, where there are GPUs; else gloo."""
    chosen = backend if backend != "auto" else ("nccl" if device.type == "cuda" else "gloo")
    return "cpu:gloo,cuda:nccl" if chosen == "nccl" else chosen


def _fill(user_ns: dict[str, Any], device: torch.device) -> None:
    import nbtrain

    user_ns.update(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        device=device,
        dist=dist,
        torch=torch,
        nt=nbtrain,
    )


def describe(user_ns: dict[str, Any]) -> dict[str, Any]:
    """`RankInfo` as a dict, once the groups stand."""
    device = _member.device
    info = RankInfo(
        rank=dist.get_rank(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        world_size=dist.get_world_size(),
        pid=os.getpid(),
        host=socket.gethostname(),
        device=_device_name(device),
        backend=dist.get_backend(),
        threads=torch.get_num_threads(),
        mesh=repr(user_ns["mesh"]),
    )
    return asdict(info)


def _device_name(device: torch.device) -> str:
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
