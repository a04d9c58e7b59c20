"""The session's connection to its ranks: ipyparallel's client, with cells that are never skipped in silence.

Differences from the client that it extends: a cell is sent with ``stop_on_error`` off, because an engine otherwise
aborts what is queued behind an error and ipyparallel reports nothing; output goes to a listener as it comes, also after
the cell's reply; and no message is kept.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import ipyparallel as ipp
from ipyparallel.client.client import unpack_message
from ipyparallel.serialize import serialize_object


@dataclass(frozen=True)
class Bound:
    """An argument of a call that is bound to a name on the rank: its buffers travel without a copy.

    Functions get the rank's namespace as their globals.
    """

    value: Any


class Listener(Protocol):
    """Hears what happens to one cell. Called on the client's IO thread."""

    def on_output(self, rank: int, kind: str, content: dict[str, Any]) -> None: ...

    def on_reply(self, rank: int, content: dict[str, Any]) -> None: ...

    def on_idle(self, rank: int) -> None: ...


class CallFailed(Exception):
    """A function that was called on a rank raised; ``failure`` is its description as data."""

    def __init__(self, rank: int, failure: dict[str, Any]) -> None:
        last = failure["chain"][-1]
        super().__init__(f"{last['ename']} on rank {rank}: {last['evalue']}")
        self.rank = rank
        self.failure = failure
        self.message: str = last["evalue"]
        self.kind: str = last["ename"]


class RankClient(ipp.Client):
    """Sends cells and calls to ranks. Engine id equals rank."""

    def __init__(self, connection_info: dict[str, Any], **kwargs: Any) -> None:
        self._listeners: dict[str, tuple[int, Listener]] = {}
        self._calls: dict[str, tuple[int, Future[Any]]] = {}
        super().__init__(connection_info, **kwargs)
        self._queue_handlers["execute_reply"] = self._on_execute_reply
        self._queue_handlers["nbtrain_reply"] = self._on_call_reply

    def activate(self, *_: Any, **__: Any) -> None:
        """Leave ``%px`` alone: the user may have a cluster of their own."""

    def execute(self, rank: int, code: str, listener: Listener, about: dict[str, Any]) -> str:
        """Run ``code`` as a cell on ``rank``; returns the request's id.

        ``about`` says of the cell: its ``number`` in the session, its ``label`` in the notebook, and by how many lines
        (``offset``) ``code`` begins below its first.
        """
        content = {
            "code": code,
            "silent": False,
            "store_history": True,  # without it IPython does not see the semicolon that mutes a value
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": False,
        }
        metadata = {"nbtrain": about}
        message = self.session.msg("execute_request", content=content, metadata=metadata)
        identity = message["header"]["msg_id"]
        self._listeners[identity] = (rank, listener)
        self._post(message, rank)
        return identity

    def call(self, rank: int, name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call ``nbtrain.engine.calls.<name>`` on ``rank``, behind the cells that it runs.

        The future raises `CallFailed` if the function raises.
        """
        sizes = self.session.buffer_threshold, self.session.item_threshold
        plain = tuple(None if isinstance(arg, Bound) else arg for arg in args)
        buffers = serialize_object((plain, kwargs), *sizes)
        for arg in args:
            if isinstance(arg, Bound):
                buffers += serialize_object(arg.value, *sizes)
        message = self.session.msg("nbtrain_call", content={"name": name})
        answer: Future[Any] = Future()
        self._calls[message["header"]["msg_id"]] = (rank, answer)
        try:
            self._post(message, rank, buffers)
        except ConnectionError as gone:
            answer.set_exception(gone)
        return answer

    def ask(self, rank: int, name: str, **args: Any) -> Future[Any]:
        """Ask the rank's control thread, which answers while a cell runs."""
        answer: Future[Any] = Future()

        def settle(reply: Any) -> None:
            content = reply.result()["content"]
            if content["status"] == "ok":
                answer.set_result(content["value"])
            else:
                answer.set_exception(RuntimeError(f"rank {rank}: {content['message']}"))

        sent = self._send(
            self._control_stream,
            "nbtrain_request",
            content={"name": name, "args": args},
            ident=self._identity(rank),
        )
        sent.add_done_callback(settle)
        return answer

    def unregister(self, rank: int) -> None:
        """Tell the controller that ``rank`` has died; it would find out by its heartbeats, a minute later."""
        message = self.session.msg("unregistration_request", content={"id": rank})
        self._io_loop.add_callback(lambda: self.session.send(self._query_stream, message))

    def on_membership(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Call back, on the IO thread, whenever a rank registers or unregisters."""
        self._registration_callbacks.append(callback)

    def off_membership(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """No longer call back."""
        self._registration_callbacks.remove(callback)

    def abandon(self, rank: int, reason: str) -> None:
        """Nothing more will come from ``rank``: fail its calls. The cells' owner settles its cells."""
        for identity, (owner, answer) in list(self._calls.items()):
            if owner == rank:
                del self._calls[identity]
                if not answer.done():
                    answer.set_exception(ConnectionError(reason))
        for identity, (owner, _) in list(self._listeners.items()):
            if owner == rank:
                self._listeners.pop(identity, None)

    def forget(self, identity: str) -> None:
        """No longer route what comes late for a cell."""
        self._listeners.pop(identity, None)

    def _identity(self, rank: int) -> bytes:
        identity: str | None = self._engines.get(rank)
        if identity is None:
            raise ConnectionError(f"rank {rank} is not connected")
        return identity.encode()

    def _post(self, message: dict[str, Any], rank: int, buffers: Any = None) -> None:
        # Through the stream, not its socket: a raw send may swallow the one notice that a reply has arrived, and the
        # reply then lies there until something else comes (libzmq's descriptor is edge-triggered).
        if self._closed:
            raise OSError("the session's connections are closed")
        ident = self._identity(rank)
        self._io_loop.add_callback(lambda: self.session.send(self._mux_stream, message, ident=ident, buffers=buffers))

    def _on_execute_reply(self, message: dict[str, Any]) -> None:
        entry = self._listeners.get(message["parent_header"].get("msg_id"))
        if entry is not None:
            entry[1].on_reply(entry[0], message["content"])

    def _on_call_reply(self, message: dict[str, Any]) -> None:
        rank, answer = self._calls.pop(message["parent_header"]["msg_id"], (-1, None))
        if answer is None or answer.done():
            return
        content = message["content"]
        if content["status"] == "error":
            answer.set_exception(CallFailed(rank, content["failure"]))
            return
        try:
            data, *large = message["buffers"]
            # bytearrays: what arrives can be written to
            answer.set_result(pickle.loads(data, buffers=[bytearray(buffer) for buffer in large]))
        except Exception as problem:  # a class's own unpickling may raise anything
            answer.set_exception(problem)

    @unpack_message
    def _dispatch_iopub(self, message: dict[str, Any]) -> None:
        kind = message["header"]["msg_type"]
        entry = self._listeners.get(message["parent_header"].get("msg_id"))
        if entry is None:
            return
        rank, listener = entry
        if kind == "status":
            if message["content"]["execution_state"] == "idle":
                listener.on_idle(rank)
        else:
            listener.on_output(rank, kind, message["content"])
