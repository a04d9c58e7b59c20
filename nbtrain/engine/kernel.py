"""The kernel of a rank: runs cells, reports their errors as data, and answers while a cell runs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from ipyparallel.engine.kernel import IPythonParallelKernel
from ipyparallel.serialize import deserialize_object
from traitlets import Any as AnyTrait
from traitlets import Type

from nbtrain.engine import debugger, groups, prompts, tracebacks, trail, voice
from nbtrain.engine.control import CONTROL
from nbtrain.engine.shell import RankShell
from nbtrain.errors import UsageError
from nbtrain.parallel import cell, messages

DEAF_S = 0.25  # less than the time after which the session interrupts again
KEPT_VALUES = 32  # of cells that nobody waits for, until their handles are asked


class _NoShellThread:
    """Stands for the shell-channel thread that an engine does not have.

    ipykernel asks it which thread runs cells, before it awaits a cell with a top-level ``await``, and takes for granted
    that it is there: in ipyparallel's engines such a cell is never answered.
    """

    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        return False


class RankKernel(IPythonParallelKernel):
    """Adds to a reply what the notebook needs to know about the cell, and to the control channel our requests."""

    shell_class = Type(RankShell)
    shell_channel_thread = AnyTrait(_NoShellThread())
    _supports_kernel_subshells = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kept: dict[int, Any] = {}
        prompts.begin()
        debugger.install()
        cell.tell_voice(voice.say_for_all)
        self.control_handlers["nbtrain_request"] = self.nbtrain_request
        self.shell_handlers["nbtrain_call"] = self.nbtrain_call

    def raw_input(self, prompt: Any = "") -> str:
        """``input()``, also a debugger's."""
        return prompts.ask(self, str(prompt))

    def getpass(self, prompt: Any = "", stream: Any = None, **_: Any) -> str:
        return prompts.ask(self, str(prompt), password=True)

    @contextlib.contextmanager
    def _cancel_on_sigint(self, future: asyncio.Future[Any]) -> Iterator[None]:
        """Let SIGINT end a cell with a top-level ``await``: where it computes, and where it awaits.

        ipykernel's own would wake a loop that an engine does not run.
        """
        loop = asyncio.get_running_loop()
        raise_in_cell = signal.getsignal(signal.SIGINT)

        def interrupt(number: int, frame: Any) -> None:
            if asyncio.current_task(loop) is future and callable(raise_in_cell):
                raise_in_cell(number, frame)
                return
            self.shell.was_cancelled = True
            loop.call_soon_threadsafe(future.cancel)

        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, raise_in_cell)

    def pre_handler_hook(self) -> None:
        """Interrupts count while a cell runs only: elsewhere one would take the reply, and the cell would never end."""
        self.saved_sigint_handler = signal.signal(signal.SIGINT, _ignore)

    async def do_execute(self, code: str, silent: bool, *args: Any, **kwargs: Any) -> dict[str, Any]:
        shell = self.shell
        shell.failure = shell.displayhook.value = None
        shell.was_cancelled = False
        sent = (kwargs.get("cell_meta") or {}).get("nbtrain", {})
        groups.begin(str(sent.get("number", 0)))
        cell.tell_ranks(tuple(sent["ranks"]) if "ranks" in sent else None)
        shell.cell_number = sent.get("number", 0)
        shell.cell_label = (sent.get("label", ""), sent.get("offset", 0))
        started = time.time()
        try:
            with trail.trail.running(), _interruptible():
                reply: dict[str, Any] = await super().do_execute(code, silent, *args, **kwargs)
        except BaseException as error:  # an interrupt in between, or the kernel's own: a reply there must be
            signal.signal(signal.SIGINT, _ignore)
            shell.failure = shell.failure or tracebacks.describe(error)
            reply = {"status": "error"}
        if debugger.was_quit(shell.last_execution_result):
            shell.failure = shell.failure or debugger.quit_failure()
        if reply["status"] == "error":  # `failure` says it all; an exception's own text may not even be text
            last = shell.failure["chain"][-1] if shell.failure else {"ename": "Error", "evalue": ""}
            reply.update(ename=last["ename"], evalue=last["evalue"], traceback=[])
        debugger.end()
        self._keep(sent)
        shell.let_go()
        reply["nbtrain"] = {
            "seconds": time.time() - started,
            "failure": shell.failure,
            "groups": groups.state(),
            "exchanges": messages.numbers(),
        }
        return reply

    def _keep(self, sent: dict[str, Any]) -> None:
        """Keep the value of the last expression as ``_``, and for the notebook if it will ask for it."""
        hook = self.shell.displayhook
        value, hook.value = hook.value, None
        if value is not None:
            self.shell.user_ns["_"] = value
        if sent.get("keep"):
            self.kept[sent["number"]] = value
        while len(self.kept) > KEPT_VALUES:
            self.kept.pop(next(iter(self.kept)))

    def nbtrain_call(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Call a function of `nbtrain.engine.calls` on the main thread, with the rank's namespace."""
        content: dict[str, Any] = {"status": "ok"}
        buffers: list[Any] = []
        try:
            with _interruptible():
                value = self._called(parent)
            buffers = packed(value)
        except BaseException as error:  # KeyboardInterrupt too: the notebook waits for a reply
            signal.signal(signal.SIGINT, _ignore)
            content = {"status": "error", "failure": tracebacks.describe(_explained(error))}
        self.session.send(stream, "nbtrain_reply", content, parent=parent, ident=ident, buffers=buffers)

    def _called(self, parent: dict[str, Any]) -> Any:
        from nbtrain.engine import calls  # it needs torch, which the fork server has

        (args, kwargs), rest = deserialize_object(parent["buffers"], self.shell.user_ns)
        while rest:  # values to be bound, behind the other arguments
            value, rest = deserialize_object(rest, self.shell.user_ns)
            args = [*(arg for arg in args if arg is not None), value]
        return getattr(calls, parent["content"]["name"])(self.shell.user_ns, *args, **kwargs)

    def nbtrain_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Answer on the control thread, while the main thread runs a cell or waits in a collective."""
        content = parent["content"]
        try:
            reply = {"status": "ok", "value": CONTROL[content["name"]](self, **content["args"])}
        except Exception as problem:
            reply = {"status": "error", "message": f"{type(problem).__name__}: {problem}"}
        self.session.send(stream, "nbtrain_reply", reply, parent=parent, ident=ident)


def _ignore(number: int, frame: Any) -> None:
    """The handler between cells; not SIG_IGN, which subprocesses would inherit."""


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt inside.

    Not again for a moment after the first: a second one, sent because the first may have been dropped, must not fall
    into the code that answers the first.
    """
    last = -math.inf

    def interrupt(number: int, frame: Any) -> None:
        nonlocal last
        if time.monotonic() - last > DEAF_S:
            last = time.monotonic()
            raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGINT, interrupt)
        yield
    finally:
        signal.signal(signal.SIGINT, _ignore)


def packed(value: Any) -> list[Any]:
    """``value`` as buffers: a pickle, then what it holds of large memory, without a copy."""
    large: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=large.append)
    return [data, *(buffer.raw() for buffer in large)]


def _explained(error: BaseException) -> BaseException:
    """An error that says what to type, where pickle names only what it did not find."""
    if isinstance(error, AttributeError) and "on <module '__main__'" in str(error):
        return UsageError(
            f"{error}: the ranks do not know this class; run the cell that defines it there too, "
            "with %%distributed --local"
        )
    return error
