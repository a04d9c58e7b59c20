"""``input()``, ``getpass()`` and debuggers on a rank: the notebook asks the person, in the cell that runs.

::

    rank      input("lr? ")  ──nbtrain_prompt──>  cell  ──>  a person types 0.1
              "0.1"          <──answer, control channel──┘

The thread that asks waits in Python, so that an interrupt ends it at once. An answer that comes late is dropped.
"""

from __future__ import annotations

import itertools
import os
import queue
import sys
from typing import Any

from IPython.core.error import StdinNotImplementedError

POLL_S = 0.5  # Windows cannot interrupt a wait without a timeout

_numbers = itertools.count(1)
_waiting: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}  # by number, until it is answered or given up
_process = os.getpid()


def begin() -> None:
    """This process is a rank: its forked children are not, and nobody could answer them."""
    global _process
    _process = os.getpid()
    _waiting.clear()


def ask(kernel: Any, prompt: str, *, password: bool = False) -> str:
    """Ask the person at the notebook and wait for the answer.

    Raises:
        EOFError: they ended the input.
        StdinNotImplementedError: there is nobody to ask.
    """
    if os.getpid() != _process:
        raise StdinNotImplementedError("input in a worker process: nobody can answer there; use num_workers=0")
    number = next(_numbers)
    _waiting[number] = queue.SimpleQueue()
    try:
        _tell(kernel, number, prompt=prompt, password=password)
        return _text(_answer(number))
    except BaseException:
        _tell(kernel, number, withdrawn=True)
        raise
    finally:
        del _waiting[number]


def answer(kernel: Any, number: int, **reply: Any) -> bool:
    """Hand an answer to the thread that waits for it: ``text``, ``eof``, or a ``problem``. On the control thread."""
    waiting = _waiting.get(number)
    if waiting is None:
        return False  # it was interrupted meanwhile
    waiting.put(reply)
    return True


def standing() -> bool:
    """Whether this rank waits for a person."""
    return bool(_waiting)


def _tell(kernel: Any, number: int, **about: Any) -> None:
    sys.stdout.flush()  # what was printed before is shown before
    sys.stderr.flush()
    content = {"number": number, **about}
    parent = kernel.get_parent("shell")
    kernel.session.send(kernel.iopub_socket, "nbtrain_prompt", content, parent=parent, ident=kernel._topic("prompt"))


def _answer(number: int) -> dict[str, Any]:
    while True:
        try:
            return _waiting[number].get(timeout=POLL_S)
        except queue.Empty:
            continue


def _text(reply: dict[str, Any]) -> str:
    if reply.get("problem"):
        raise StdinNotImplementedError(reply["problem"])
    if reply.get("eof"):
        raise EOFError
    return str(reply["text"])
