"""A notebook without a page: a real kernel that runs cells and keeps what each of them published."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

PROMPT_S = 0.02  # between two looks at whether a cell asks


def plain(text: str) -> str:
    """``text`` without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@dataclass
class Output:
    """What a cell published. ``messages`` are in order; ``late`` came for it after it had ended."""

    status: str = "ok"
    error: str = ""
    ename: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    prompts: list[str] = field(default_factory=list)  # what a person was asked

    @property
    def stdout(self) -> str:
        return self._stream("stdout")

    @property
    def stderr(self) -> str:
        return self._stream("stderr")

    @property
    def count(self) -> int:
        """The number in brackets beside the cell."""
        return next(m["content"]["execution_count"] for m in self.messages if m["msg_type"] == "execute_input")

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()

    @property
    def shown(self) -> list[str]:
        """What a page shows of the lines: text behind a carriage return covers what was before it."""
        return [line.rsplit("\r", 1)[-1] for line in self.stdout.split("\n")]

    @property
    def displays(self) -> list[dict[str, Any]]:
        return [m["content"]["data"] for m in self.messages if m["msg_type"] in ("display_data", "execute_result")]

    @property
    def plain(self) -> list[str]:
        return [data.get("text/plain", "") for data in self.displays]

    def _stream(self, name: str) -> str:
        streams = [m["content"] for m in self.messages if m["msg_type"] == "stream"]
        return "".join(content["text"] for content in streams if content["name"] == name)


class Notebook:
    """A kernel with the extension loaded. ``with Notebook() as nb: nb("%%distributed\\nprint(rank)")``."""

    def __init__(self, *, load: bool = True, env: dict[str, str] | None = None) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(**({"env": env} if env else {}))
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.by_request: dict[str, Output] = {}
        self.last_id = ""
        if load:
            assert self("%load_ext nbtrain").status == "ok"

    def __call__(self, code: str, timeout: float = 60.0, answers: Sequence[str] | None = None) -> Output:
        """Run a cell and wait for its end; what it asks gets ``answers``. Without any it is a page that takes none."""
        return self.wait(self.send(code, allow_stdin=answers is not None), timeout, answers or ())

    def send(self, code: str, *, allow_stdin: bool = False) -> str:
        """Run a cell without waiting; gives its request's id."""
        request: str = self.client.execute(code, allow_stdin=allow_stdin)
        self.by_request[request] = Output(seconds=-time.monotonic())
        self.last_id = request
        return request

    def wait(self, request: str, timeout: float = 60.0, answers: Sequence[str] = ()) -> Output:
        output = self.by_request[request]
        deadline = time.monotonic() + timeout
        left = list(answers)
        while not self._next(deadline, request, left):
            pass
        assert not left, f"not asked for {left}, but for {output.prompts}"
        output.seconds += time.monotonic()
        while True:
            reply = self.client.get_shell_msg(timeout=timeout)
            if reply["parent_header"].get("msg_id") == request:
                break
        output.status = reply["content"]["status"]
        if output.status == "error":
            output.ename = reply["content"]["ename"]
            output.error = "\n".join(reply["content"]["traceback"])
        return output

    def listen(self, seconds: float) -> None:
        """Collect what comes late, under the cells that it belongs to."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                self._next(deadline, "")
            except TimeoutError:
                return

    def value(self, expression: str) -> Any:
        """The value of an expression in the notebook's kernel, through its repr."""
        import ast

        reply = self.client.execute_interactive(
            "", user_expressions={"value": expression}, output_hook=lambda _: None, timeout=30
        )
        answer = reply["content"]["user_expressions"]["value"]
        assert answer["status"] == "ok", answer
        return ast.literal_eval(answer["data"]["text/plain"])

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def restart(self) -> None:
        """Kernel > Restart: the same notebook, a new process."""
        self.manager.restart_kernel(now=True)
        self.client.wait_for_ready(timeout=60)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)

    def __enter__(self) -> Notebook:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def await_prompt(self, timeout: float = 30.0) -> str:
        """Wait until the running cell asks, without answering; gives the prompt."""
        return str(self.client.get_stdin_msg(timeout=timeout)["content"]["prompt"])

    def _answer(self, answers: list[str]) -> None:
        """Answer what the cell asks now, if it does."""
        if not self.client.stdin_channel.msg_ready():
            return
        asked = self.client.get_stdin_msg(timeout=10)
        self.by_request[asked["parent_header"]["msg_id"]].prompts.append(asked["content"]["prompt"])
        assert answers, f"not prepared for {asked['content']['prompt']!r}"
        self.client.input(answers.pop(0))

    def _next(self, deadline: float, until_idle: str, answers: list[str] | None = None) -> bool:
        """File one message, and answer what is asked meanwhile; whether it says that ``until_idle`` has ended."""
        import queue

        while True:
            step = deadline if answers is None else min(deadline, time.monotonic() + PROMPT_S)
            try:
                message = self.client.get_iopub_msg(timeout=max(step - time.monotonic(), 0.01))
                break
            except queue.Empty:
                if time.monotonic() >= deadline:
                    raise TimeoutError("no message in time") from None
            if answers is not None:
                self._answer(answers)
        parent = message["parent_header"].get("msg_id", "")
        if message["msg_type"] == "status":
            return bool(parent == until_idle and message["content"]["execution_state"] == "idle")
        if parent in self.by_request:
            self.by_request[parent].messages.append(message)
        return False
