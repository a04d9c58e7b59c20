"""The rendezvous store of a session: a process of its own, so that it outlives every rank."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from nbtrain.engine import registry

HOST = "127.0.0.1"


def serve(path: str, host: str = HOST, wait: Callable[[], object] | None = None) -> None:
    """Serve a ``TCPStore`` on a free port of ``host``, write the port to ``path``, and return when ``wait`` does.

    ``TCPStore`` by itself listens on every interface; given a listening socket it does not.
    """
    import torch.distributed as dist

    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it without saying so
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    _write_atomically(Path(path), str(port))
    (wait or signal.pause)()
    del store


def _write_atomically(path: Path, text: str) -> None:
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)


if __name__ == "__main__":
    serve(sys.argv[1], wait=sys.stdin.buffer.read)  # the kernel holds the other end: it ends when the kernel does
    registry.end_all(Path(sys.argv[1]).parent)
