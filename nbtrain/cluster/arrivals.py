"""Waiting for ranks to register with the controller, or to go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from nbtrain.cluster.client import RankClient
from nbtrain.errors import StartError

START_TIMEOUT_S = 120.0


class Arrivals:
    """Hears which ranks register and unregister, from `__enter__` on."""

    def __init__(self, client: RankClient) -> None:
        self._client = client
        self._changed = threading.Event()

    def __enter__(self) -> Arrivals:
        self._client.on_membership(self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.off_membership(self._hear)

    def wait_for(self, ranks: Iterable[int], check: Callable[[], None]) -> None:
        """Until all ``ranks`` have registered; ``check`` raises where one cannot come any more."""
        wanted = set(ranks)
        self._until(lambda: wanted <= set(self._client.ids), check, "did not come")

    def wait_until_gone(self, ranks: Iterable[int]) -> None:
        wanted = set(ranks)
        self._until(lambda: not wanted & set(self._client.ids), lambda: None, "did not go")

    def _until(self, reached: Callable[[], bool], check: Callable[[], None], what: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not reached():
            self._changed.clear()
            check()
            if time.monotonic() > deadline:
                raise StartError(f"ranks {what} within {START_TIMEOUT_S:.0f} s; {len(self._client.ids)} are there")
            self._changed.wait(0.05)

    def _hear(self, _: dict[str, Any]) -> None:
        self._changed.set()
