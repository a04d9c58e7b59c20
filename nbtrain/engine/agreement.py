"""Ranks tell each other through the session's store what they are about to call, and compare.

The fingerprint is part of a key, so that all ranks' keys being there is the comparison, and what the others gave is
read only when that lasts. At 4 ranks on 2 busy cores that costs 0.5 to 0.9 ms; an all-gather of 8 bytes over gloo took
3.3 to 5.1 ms.

::

    <generation>/<group>/<count>                      one line of each rank: what it calls, and whether it waits
    <generation>/<group>/<count>/<digest>/<position>  there when the rank has given this fingerprint
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbtrain.engine import fingerprint
from nbtrain.engine.fingerprint import Call
from nbtrain.errors import CollectiveError

# A peer may come to the same collective by a way that is not guarded, C++ for instance: then the guard must not be what
# it waits for. Whoever has waited for this long begins; whoever comes later still compares.
GRACE_S = 10.0
SETTLE_S = 1.0  # after a mismatch, for the ranks that have not come yet: all shall get the same message
LOOK_S = 0.02  # what the others gave is read when they have not agreed by then, and so often while they settle
PAUSE = 0.1, 0.05  # between two looks: this part of what was waited already, and at most so many seconds
KEPT = 64  # calls that do not wait, until it is looked up which of them everyone has passed


@dataclass(frozen=True)
class Given:
    """What a rank has given; ``begun``: it does not wait for the others."""

    call: Call
    digest: str
    begun: bool


class Agreement:
    """Call ``number`` of those of ``ranks`` in ``name``; this rank has the ``position`` among them."""

    def __init__(self, store: Any, prefix: str, name: str, number: int, ranks: Sequence[int], position: int) -> None:
        self.name, self.number = name, number
        self.base = f"{prefix}/{name}/{number}"
        self.ranks = ranks
        self.passed = False  # by every rank: nobody reads its keys any more
        self._store = store
        self._position = position
        self._own = ""

    def post(self, call: Call, *, begins: bool) -> None:
        """Say what this rank is about to do."""
        line = [str(self._position), call.digest, call.text, _packed(call.sends), _packed(call.receives), str(begins)]
        self._own = self._keys(call)[self._position]
        self._store.append(self.base, "\t".join(line) + "\n")
        self._store.set(self._own, "")  # after the line: who finds this finds that

    def read(self) -> dict[int, Given]:
        """What has been given until now, by position."""
        given: dict[int, Given] = {}
        for line in self._store.get(self.base).decode().splitlines():
            position, digest, text, sends, receives, begun = line.split("\t")
            call = Call("", (), text, (), _unpacked(sends), _unpacked(receives))
            given[int(position)] = Given(call, digest, begun == "True")
        return given

    def wait(self, call: Call, given_up: Callable[[], bool]) -> None:
        """Return when all ranks have given the same, or when they need not be waited for.

        Raises:
            CollectiveError: they have not, or ``given_up()``.
        """
        began = time.monotonic()
        # Not by the store's own wait: one that times out (torch 2.13) sometimes never returns, and writes to the log.
        while not self._store.check(self._keys(call)):
            waited = time.monotonic() - began
            if given_up():
                raise CollectiveError(f"{call.op} was given up before it began: not all ranks came to it")
            if waited > LOOK_S:
                self.compare(given_up)
            if waited > GRACE_S:
                self.post(call, begins=True)
                return self.compare(given_up)
            time.sleep(min(waited * PAUSE[0], PAUSE[1]))
        if call.sends:
            self.compare(given_up)

    def compare(self, given_up: Callable[[], bool]) -> None:
        """Compare what has been given until now.

        Raises:
            CollectiveError: it differs; it says which rank gave what.
        """
        if _differ(self.read()):
            self._settle(given_up)
            given = self.read()
            raise CollectiveError(self._disagreement(given), begun=any(one.begun for one in given.values()))

    def is_complete(self) -> bool:
        """Whether all ranks have come; what was before this is passed then."""
        self._store.append(self.base, "")  # it may be deleted: reading what is not there would wait
        came = self.read()
        if not came:
            self._store.delete_key(self.base)
        return len(came) in (0, len(self.ranks))

    def delete(self) -> None:
        self._store.delete_key(self._own)
        if self._position == 0:
            self._store.delete_key(self.base)

    def _keys(self, call: Call) -> list[str]:
        return [f"{self.base}/{call.digest}/{position}" for position in range(len(self.ranks))]

    def _settle(self, given_up: Callable[[], bool]) -> None:
        """Wait for the ranks that have not come yet, but not for long."""
        deadline = time.monotonic() + SETTLE_S
        while len(self.read()) < len(self.ranks) and time.monotonic() < deadline and not given_up():
            time.sleep(LOOK_S)

    def _disagreement(self, given: Mapping[int, Given]) -> str:
        texts: dict[str, list[int]] = {}
        for position, rank in enumerate(self.ranks):
            text = given[position].call.text if position in given else "has not come yet"
            texts.setdefault(text, []).append(rank)
        parts = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in texts.items())
        kept = "" if any(one.begun for one in given.values()) else "Nothing was sent. "
        return f"the ranks do not call the same: {parts}. {kept}Make the call the same on all of them"


class Ledger:
    """The calls of every group under ``prefix``, counted, and their keys deleted when they are passed."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._counts: dict[str, int] = {}
        self._kept: dict[str, list[Agreement]] = {}

    def next(self, name: str, ranks: Sequence[int], position: int) -> Agreement:
        """The next call in ``name``, a group or a pair. Every call counts, guarded or not: ranks must count alike."""
        count = self._counts[name] = self._counts.get(name, 0) + 1
        return Agreement(self._store, self._prefix, name, count, ranks, position)

    def keep(self, agreement: Agreement) -> None:
        """Remember keys that were posted, and delete those that everyone has passed."""
        kept = self._kept.setdefault(agreement.name, [])
        if len(kept) >= KEPT and not kept[0].passed and kept[KEPT // 2].is_complete():
            _pass(kept[: KEPT // 2])
        while kept and kept[0].passed:
            kept.pop(0).delete()
        kept.append(agreement)

    def complete(self, agreement: Agreement) -> None:
        """All ranks have come to ``agreement``: they have passed what was before it."""
        _pass(self._kept[agreement.name][:-1])

    def close(self) -> None:
        """The groups are gone: delete what is left."""
        for agreement in (one for kept in self._kept.values() for one in kept):
            agreement.delete()


def _pass(agreements: Sequence[Agreement]) -> None:
    for agreement in agreements:
        agreement.passed = True


def _differ(given: Mapping[int, Given]) -> bool:
    calls = {position: one.call for position, one in given.items()}
    return len({one.digest for one in given.values()}) > 1 or not fingerprint.fit(calls)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _packed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _unpacked(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()
