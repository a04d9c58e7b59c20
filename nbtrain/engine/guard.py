"""The guard: ranks compare what they are about to do before a collective, so that a mismatch is an error and no death.

gloo ends the process where shapes differ and waits for ever where operations do. So the ranks of the group first tell
each other what they call (`nbtrain.engine.agreement`). Where the call blocks they wait there for each other, in Python,
where an interrupt ends it at once. Where it does not (``async_op``, messages) each looks at what is there and goes on:
whoever comes second sees a mismatch and does not begin, so that data of the two never meet.

What cells call is guarded, by default; what nbtrain, FSDP or a library calls costs a look at the caller's file.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.autograd.function
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.distributed import c10d_logger
from torch.distributed import distributed_c10d as c10d

from nbtrain.engine import fingerprint, tracebacks, wires
from nbtrain.engine.agreement import Agreement, Ledger
from nbtrain.engine.fingerprint import Call
from nbtrain.errors import CollectiveError, SessionError

COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "barrier", "all_gather", "all_gather_single", "all_gather_into_tensor"),
    *("all_gather_object", "gather", "gather_object", "scatter", "scatter_object_list", "broadcast_object_list"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
)
KEPT_HANDLES = 256
MESSAGES = ("send", "recv", "isend", "irecv")
# These files may stand between a cell and the function of torch that it calls.
_PASSED = {
    *(c10d.__file__, c10d_logger.__file__, __file__, inspect.getfile(c10d.deprecated)),  # type: ignore[attr-defined]
    *(torch.distributed.nn.functional.__file__, torch.autograd.function.__file__),
}


class _State:
    """What the guard of this rank knows. One a process, as torch's default group is."""

    mode = "cells"
    store: Any = None  # a connection of the guard's own: another one may be blocked by a rendezvous
    world: Any = None  # the default group that is guarded
    ledger: Ledger | None = None
    waiting: dict[str, Any] | None = None
    freed = False
    broken = False
    called_at = 0.0  # when the call was begun that runs now; 0.0 without one


_state = _State()
_uneven: dict[str, int] = {}  # how many of a group's numbers were given to what not all of its ranks take part in
_handles: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()  # of messages, by group
_local = threading.local()


def install() -> None:
    """Lead every collective of torch through the guard. Once a process.

    The functions stay the objects that they are, so that names bound to them before, torch's own tables of them and
    `torch.compile` see no other: only what they run changes.
    """
    for name in COLLECTIVES:
        _lead(name, _collective)
    for name in MESSAGES:
        _lead(name, _message)
    _lead("monitored_barrier", _monitored)


def set_mode(mode: str) -> None:
    """Guard what cells call ("cells"), all collectives ("on"), or none ("off")."""
    _state.mode = mode


def begin(prefix: str) -> None:
    """A default group was formed; ``prefix`` is its own in the session's store."""
    if _state.store is None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with wires.spared():
            _state.store = dist.TCPStore(host, port, is_master=False)  # type: ignore[attr-defined]
    if _state.ledger is not None:
        _state.ledger.close()
    _state.world, _state.ledger = dist.group.WORLD, Ledger(_state.store, f"guard/{prefix}")
    _state.broken = False
    _uneven.clear()


def resume() -> None:
    """Another cell begins."""
    _state.freed = False


def free() -> None:
    """Give up the wait for other ranks. From the control thread."""
    _state.freed = True


def intact() -> bool:
    """Whether no mismatch has left a collective half begun, as one that does not block may."""
    return not _state.broken


def held_s() -> float:
    """For how long the call that runs now was called, the guard's own wait included; 0.0 without one."""
    return time.time() - _state.called_at if _state.called_at else 0.0


def waiting() -> list[dict[str, Any]]:
    """The call that this rank waits to begin, as `nbtrain.engine.recorder.pending` gives them. From any thread."""
    now = _state.waiting
    return [] if now is None else [{**now, "waits_s": time.time() - now["since"]}]


def _lead(name: str, through: Callable[..., Any]) -> None:
    function = getattr(c10d, name, None)
    if function is None:  # an older torch
        return
    raw = inspect.unwrap(function)
    if f"_nbtrain_{name}" in raw.__globals__:
        return
    signature = inspect.signature(raw)
    inner = types.FunctionType(raw.__code__, raw.__globals__, name, raw.__defaults__)
    inner.__kwdefaults__ = raw.__kwdefaults__
    raw.__globals__[f"_nbtrain_{name}"] = functools.partial(through, name, inner, signature)
    raw.__signature__ = signature
    raw.__defaults__ = raw.__kwdefaults__ = None
    raw.__code__ = _through.__code__.replace(
        co_names=(f"_nbtrain_{name}",),
        co_name=name,
        co_filename=inner.__code__.co_filename,
        co_firstlineno=inner.__code__.co_firstlineno,
    )


def _through(*args: Any, **kwargs: Any) -> Any:
    """The body of each function that is led through the guard; `_lead` puts its one global name in."""
    return _nbtrain_name(args, kwargs)  # type: ignore[name-defined]  # noqa: F821


def _collective(name: str, inner: Any, signature: inspect.Signature, args: Any, kwargs: Any) -> Any:
    given, group = _seen(signature, args, kwargs)
    if group is None or _state.ledger is None:
        return inner(*args, **kwargs)
    ranks = dist.get_process_group_ranks(group)
    agreement = _state.ledger.next(group.group_name, ranks, group.rank())
    call = _described(fingerprint.of_collective, name, given, group) if _is_guarded() else None
    _state.called_at = time.time() if call is not None else 0.0
    try:
        if call is not None:
            _check(agreement, call, group, blocks=not given.get("async_op"))
        return _inside(inner, args, kwargs)
    finally:
        _state.called_at = 0.0


def _message(name: str, inner: Any, signature: inspect.Signature, args: Any, kwargs: Any) -> Any:
    given, group = _seen(signature, args, kwargs)
    if group is None:
        return inner(*args, **kwargs)
    is_own = _is_from_cell()
    if given.get("tag") and not is_own:  # nbtrain's, each exchange with a tag of its own: names for ever new ones
        return _counted(group, inner, args, kwargs)
    sends = name.endswith("send")
    peer = _peer(given, "dst" if sends else "src", group)
    call = _described(fingerprint.of_message, name, given["tensor"])
    agreement = _between(group, peer, sends, given.get("tag", 0))
    if agreement is not None and call is not None and _is_guarded():
        _check(agreement, call, group, blocks=False)
    shown = _shown(call, agreement, 0) if call is not None and name in ("send", "recv") else nullcontext()
    with shown:
        result = _counted(group, inner, args, kwargs)
    if name in ("isend", "irecv") and is_own:
        _keep(group, result)
    if agreement is None and isinstance(result, int):  # from anyone: now it is known from whom
        _between(group, result, sends, given.get("tag", 0))
    return result


def _keep(group: Any, handle: Any) -> None:
    """gloo loses a connection on which bytes arrive for a handle that is gone: a cell that drops one would hang others.

    Only waiting tells that a message has come; of those that nobody waits for, the last ones stay.
    """
    unfinished = [other for other in _handles.get(group, ()) if not other.is_completed()]
    _handles[group] = [*unfinished, handle][-KEPT_HANDLES:]


def _monitored(name: str, inner: Any, signature: inspect.Signature, args: Any, kwargs: Any) -> Any:
    """It sends messages to and from one rank, and compares by itself."""
    _, group = _seen(signature, args, kwargs)
    return inner(*args, **kwargs) if group is None else _counted(group, inner, args, kwargs)


def _seen(signature: inspect.Signature, args: Any, kwargs: Any) -> tuple[Mapping[str, Any], Any]:
    """The arguments by name, and the group; None for it where the call is not ours to look at.

    That is where torch calls itself, the arguments are wrong, or this rank is not in the group or alone in it.
    """
    if getattr(_local, "inside", False) or _state.world is None or dist.group.WORLD is not _state.world:
        return {}, None
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return {}, None
    group = given.get("group") or _state.world
    if isinstance(group, dist.ProcessGroup) and group not in c10d._world.pg_map:
        raise SessionError(
            "this process group has ended: it was destroyed, or an interrupt, a failure or a replaced rank had the "
            "session's groups formed again; make it again, e.g. with dist.new_group"
        )
    return given, group if isinstance(group, dist.ProcessGroup) and group.size() > 1 else None


def _inside(inner: Any, args: Any, kwargs: Any) -> Any:
    """Call torch's function; what it calls in turn is part of it."""
    _local.inside = True
    try:
        return inner(*args, **kwargs)
    finally:
        _local.inside = False


def _counted(group: Any, inner: Any, args: Any, kwargs: Any) -> Any:
    before = _sequence(group)
    try:
        return _inside(inner, args, kwargs)
    finally:
        _uneven[group.group_name] = _uneven.get(group.group_name, 0) + _sequence(group) - before


def _sequence(group: Any) -> int:
    """How many operations the group has begun here; 0 where it does not count."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a group of several backends
        return 0


def _is_guarded() -> bool:
    if _state.mode == "off" or threading.current_thread() is not threading.main_thread():
        return False
    return _state.mode == "on" or _is_from_cell()


def _is_from_cell() -> bool:
    """Whether a cell, or a file of the user's, is what calls torch: not a library, and not nbtrain."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _PASSED:
        frame = frame.f_back
    return frame is not None and _is_own(frame.f_code.co_filename)


@functools.lru_cache(maxsize=4096)
def _is_own(file: str) -> bool:
    return tracebacks.kind(file) != "library"


def _described(describe: Callable[..., Call], *args: Any) -> Call | None:
    try:
        return describe(*args)
    except Exception:  # arguments that make no sense: torch says why
        return None


def _peer(given: Mapping[str, Any], kind: str, group: Any) -> int | None:
    """The rank of the other end; None for anyone."""
    within = given.get(f"group_{kind}")
    return given.get(kind) if within is None else dist.get_global_rank(group, within)


def _between(group: Any, peer: int | None, sends: bool, tag: int) -> Agreement | None:
    """The next message of this tag from one of two ranks to the other; None where the other is not known."""
    if peer is None or _state.ledger is None:
        return None
    ends = (dist.get_rank(), peer) if sends else (peer, dist.get_rank())
    return _state.ledger.next(f"{group.group_name}/{ends[0]}-{ends[1]}-{tag}", ends, 0 if sends else 1)


def _check(agreement: Agreement, call: Call, group: Any, blocks: bool) -> None:
    """Raise a CollectiveError if the ranks do not agree on ``call``, before this one begins it."""
    assert _state.ledger is not None
    try:
        agreement.post(call, begins=not blocks)
        _state.ledger.keep(agreement)
        if not blocks:
            agreement.compare(_is_freed)
            return
        with _shown(call, agreement, _sequence(group) - _uneven.get(group.group_name, 0) + 1):  # as torch's recorder
            agreement.wait(call, _is_freed)
        _state.ledger.complete(agreement)
    except CollectiveError as error:
        _state.broken |= error.begun
        raise
    except dist.DistNetworkError:  # the store is gone, and the session with it: no reason to fail here
        _state.mode = "off"


def _is_freed() -> bool:
    return _state.freed


@contextmanager
def _shown(call: Call, agreement: Agreement | None, number: int) -> Iterator[None]:
    """Tell a hang report, and the session when another rank has failed, of a wait that torch does not record."""
    _state.waiting = {
        "op": call.op,
        "group": agreement.name if agreement else "",
        "ranks": list(agreement.ranks) if agreement else [],
        "seq": number or (agreement.number if agreement else 0),
        "sizes": [list(tensor.shape) for tensor in call.tensors],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in call.tensors],
        "since": time.time(),
    }
    try:
        yield
    finally:
        _state.waiting = None
