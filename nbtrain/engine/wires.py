"""The connections of the process groups, so that a rank which waits in a collective can be freed.

A gloo collective waits in C++, where no signal reaches it, and neither ``abort`` nor ``shutdown`` ends it. What does is
to shut its connections down from another thread: the wait raises at once, and the process, with its models, lives on.
Only connections that were opened while a group was formed are touched; the listening sockets are not (shutting one of
these kills the process). A rank that waits for a peer to connect has no such connection yet: it gets one, which ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator

_FD_FOLDER = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
_wires: dict[int, tuple[int, int]] = {}  # descriptor -> (device, inode): a number may come to mean another file
_spared: set[int] = set()  # the guard's own
_before: dict[int, tuple[int, int]] | None = None  # what was open when the group that is being formed was begun


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """The sockets that are opened inside belong to a group."""
    global _before
    outer, _before = _before, _before if _before is not None else _sockets()
    try:
        yield
    finally:
        _wires.update(_opened())
        _before = outer


def cut() -> int:
    """Shut down every connection of every group; returns how many. From any thread."""
    forming = _opened()
    wires = {**_wires, **forming}
    num_cut = sum(_shut_down(number) for number, identity in wires.items() if _identity(number) == identity)
    for number in forming:
        _connect_for_peers(number)
    return num_cut + sum(_shut_down(number) for number in _to_store())


def forget() -> None:
    """The groups are destroyed: what they had open is theirs no longer."""
    _wires.clear()


@contextlib.contextmanager
def spared() -> Iterator[None]:
    """The sockets that are opened inside are never cut."""
    before = _sockets()
    try:
        yield
    finally:
        _spared.update(_since(before))


def _to_store() -> list[int]:
    """Connections to the session's store that a cell has opened: it may wait there for a key."""
    store = (os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0")))
    return [number for number in set(_sockets()) - _spared if _peer(number) == store]


def _peer(number: int) -> tuple[str, int] | None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as wire:
        if wire.family in (socket.AF_INET, socket.AF_INET6):
            address, port, *_ = wire.getpeername()
            return address.removeprefix("::ffff:"), port
    return None


def _opened() -> dict[int, tuple[int, int]]:
    """Sockets that came since the group that is being formed was begun."""
    return {} if _before is None else _since(_before)


def _since(before: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    return {number: identity for number, identity in _sockets().items() if before.get(number) != identity}


def _sockets() -> dict[int, tuple[int, int]]:
    if not os.path.isdir(_FD_FOLDER):  # Windows: a stuck rank is freed by its timeout only
        return {}
    found = ((int(name), _identity(int(name))) for name in os.listdir(_FD_FOLDER) if name.isdigit())
    return {number: identity for number, identity in found if identity is not None}


def _identity(number: int) -> tuple[int, int] | None:
    """Which socket a descriptor is; None for another kind of file, or none."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None


def _connect_for_peers(number: int) -> None:
    """Stand in for the peers that a group's listener still waits for, and leave.

    gloo's handshake is the number of the peer's pair, eight bytes; a number that is not waited for is kept unused.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as listener:
        if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return
        for pair in range(int(os.environ.get("WORLD_SIZE", "1"))):
            with socket.create_connection(listener.getsockname(), timeout=1.0) as connection:
                connection.sendall(struct.pack("<q", pair))


def _shut_down(number: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as wire:
        wire.getpeername()  # raises for a listening socket
        wire.shutdown(socket.SHUT_RDWR)
        return True
    return False
