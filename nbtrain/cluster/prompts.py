"""What the ranks of a cell ask a person: one after another, in the notebook's cell, while it is waited for.

A rank's message arrives on the client's IO thread. The notebook's main thread, which waits for the cell, asks: nobody
else may read from a front end. Where the main thread does not wait, the rank is told so at once.
"""

from __future__ import annotations

import _thread
import contextlib
import getpass
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from IPython.core.error import StdinNotImplementedError
from IPython.core.getipython import get_ipython

from nbtrain.errors import UsageError

NO_INPUT = (
    "the rank asks for input, and this front end takes none (nbconvert and papermill do not); "
    "send the value with --push, or run the cell in JupyterLab"
)
NOBODY = (
    "the rank asks for input, and nobody waits for this cell; run it without --no-block, or wait first, e.g. job.wait()"
)


STAY_S = 0.4  # with a rank whose debugger has asked: time to ask again
SETTLE_S = 0.05  # after a prompt, for those of other ranks
_OWN = re.compile(r"i?pdb> |\(Pdb\) |>>> |\.\.\. |In : ")  # prompts that say by themselves what they are


class Reply(Protocol):
    """Sends a rank the answer to its prompt ``number``: ``text``, ``eof=True``, or a ``problem``."""

    def __call__(self, rank: int, *, number: int, **answer: Any) -> object: ...


@dataclass(frozen=True)
class Prompt:
    """What a rank asks. ``text`` is the rank's own prompt."""

    rank: int
    number: int
    text: str
    password: bool

    @property
    def is_own(self) -> bool:
        """Whether the prompt says by itself what it is: a debugger's, or an interpreter's."""
        return _OWN.fullmatch(self.text) is not None

    @property
    def label(self) -> str:
        """What the person sees: whose prompt it is."""
        return f"rank {self.rank} {self.text}" if self.is_own else f"rank {self.rank}> {self.text}"


class Prompts:
    """The prompts of one cell. Thread-safe.

    Attributes:
        news: Set when one arrives, and when the cell ends: whoever waits for the cell waits for this, and clears it.
    """

    def __init__(self) -> None:
        self.news = threading.Event()
        self._reply: Reply | None = None
        self._standing: dict[int, Prompt] = {}
        self._num_waiting = 0
        self._last: int | None = None  # the rank whose debugger the person is in
        self._lock = threading.RLock()
        self._asked: Prompt | None = None  # what the person reads now
        self._withdrawn = False

    @property
    def ranks(self) -> list[int]:
        """The ranks that wait for a person."""
        with self._lock:
            return sorted(self._standing)

    def open(self, reply: Reply, *, attended: bool) -> None:
        """Ranks may ask from now on; ``attended`` says that the main thread will wait for the cell."""
        self._reply = reply
        self._num_waiting = int(attended and _on_main_thread())

    def on_message(self, rank: int, content: dict[str, Any]) -> None:
        """A rank asks, or no longer does."""
        if content.get("withdrawn"):
            self.drop(rank)
            return
        prompt = Prompt(rank, content["number"], content["prompt"], content["password"])
        with self._lock:
            attended = self._num_waiting > 0
            if attended:
                self._standing[rank] = prompt
        if attended:
            self.news.set()
        else:
            self._send(prompt, problem=NOBODY)

    def drop(self, rank: int) -> None:
        """The rank asks no longer: it was interrupted, or its process ended. Whoever types an answer is let go."""
        with self._lock:
            prompt = self._standing.pop(rank, None)
            if prompt is not None and prompt is self._asked:
                self._withdrawn = True
                _thread.interrupt_main()

    @contextlib.contextmanager
    def attended(self) -> Iterator[None]:
        """The main thread waits for the cell inside; on another thread this does nothing."""
        if not _on_main_thread():
            yield
            return
        with self._lock:
            self._num_waiting += 1
        try:
            yield
        finally:
            self._leave()

    def put(self, before: Callable[[], None], num_ranks: int) -> float:
        """Put what stands to the person, by rank; ``before`` is called before each. Gives the seconds that it took."""
        began = time.monotonic()
        if not _on_main_thread():
            return 0.0
        while len(self.ranks) < num_ranks and self.news.wait(SETTLE_S):
            self.news.clear()  # ranks that ask alike ask at about the same time
        while (prompt := self._next()) is not None:
            before()
            answer = self._ask(prompt)
            with self._lock:
                if self._standing.get(prompt.rank) is prompt:
                    del self._standing[prompt.rank]
            self._send(prompt, **answer)
            if prompt.is_own:
                self._stay_with(prompt.rank)
        return time.monotonic() - began

    def _stay_with(self, rank: int) -> None:
        """A debugger asks again at once, unless it has let its rank go on: others that ask wait until then."""
        self._last = rank
        deadline = time.monotonic() + STAY_S
        while rank not in self._standing and time.monotonic() < deadline:
            if self.news.wait(SETTLE_S):
                self.news.clear()

    def _ask(self, prompt: Prompt) -> dict[str, Any]:
        """The person's answer, as it is sent to the rank; none of use if the rank withdraws what it asks."""
        try:
            with self._lock:
                self._asked, self._withdrawn = prompt, False
            try:
                return _asked(prompt)
            finally:
                with self._lock:
                    self._asked = None
        except KeyboardInterrupt:
            if not self._withdrawn:
                raise
            return {"eof": True}

    def _next(self) -> Prompt | None:
        with self._lock:
            if not self._standing:
                return None
            return self._standing[self._last if self._last in self._standing else min(self._standing)]

    def _leave(self) -> None:
        with self._lock:
            self._num_waiting -= 1
            left = [] if self._num_waiting else list(self._standing.values())
            for prompt in left:
                del self._standing[prompt.rank]
        for prompt in left:
            self._send(prompt, problem=NOBODY)

    def _send(self, prompt: Prompt, **answer: Any) -> None:
        if self._reply is not None:
            self._reply(prompt.rank, number=prompt.number, **answer)


def require_input(what: str) -> None:
    """Refuses what asks a person where none can be asked.

    Raises:
        UsageError: the front end takes no input.
    """
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is not None and not kernel._allow_stdin:
        raise UsageError(f"{what} needs a front end that takes input, and this one does not; type it in JupyterLab")


def first_failed(errors: dict[int, dict[str, Any] | None]) -> int | None:
    """The rank that failed first in the last cell in which any did; None if none has.

    ``errors`` is by rank what `nbtrain.engine.control.last_error` gives.
    """
    found = {rank: error for rank, error in errors.items() if error}
    if not found:
        return None
    return min(found, key=lambda rank: (-found[rank]["cell"], found[rank]["consequence"], found[rank]["time"]))


def _asked(prompt: Prompt) -> dict[str, Any]:
    try:
        return {"text": _read(prompt.label, prompt.password)}
    except EOFError:
        return {"eof": True}
    except StdinNotImplementedError:
        return {"problem": NO_INPUT}


def _read(label: str, password: bool) -> str:
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None:
        return getpass.getpass(label) if password else input(label)
    return str(kernel.getpass(label) if password else kernel.raw_input(label))


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
