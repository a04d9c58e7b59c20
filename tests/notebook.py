"""A notebook without a page: a real kernel that runs cells and keeps what each of them published."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager


@dataclass
class Output:
    """What a cell published. ``messages`` are in order; ``late`` came for it after it had ended."""

    status: str = "ok"
    error: str = ""
    ename: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

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

    def __call__(self, code: str, timeout: float = 60.0) -> Output:
        """Run a cell and wait for its end."""
        return self.wait(self.send(code), timeout)

    def send(self, code: str) -> str:
        """Run a cell without waiting; gives its request's id."""
        request: str = self.client.execute(code)
        self.by_request[request] = Output(seconds=-time.monotonic())
        self.last_id = request
        return request

    def wait(self, request: str, timeout: float = 60.0) -> Output:
        output = self.by_request[request]
        deadline = time.monotonic() + timeout
        while not self._next(deadline, request):
            pass
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

    def _next(self, deadline: float, until_idle: str) -> bool:
        """File one message; whether it says that ``until_idle`` has ended."""
        import queue

        try:
            message = self.client.get_iopub_msg(timeout=max(deadline - time.monotonic(), 0.01))
        except queue.Empty:
            raise TimeoutError("no message in time") from None
        parent = message["parent_header"].get("msg_id", "")
        if message["msg_type"] == "status":
            return bool(parent == until_idle and message["content"]["execution_state"] == "idle")
        if parent in self.by_request:
            self.by_request[parent].messages.append(message)
        return False
