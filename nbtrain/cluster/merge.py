"""Several ranks' outputs become one: what all ranks print alike is shown once, what differs is labelled by rank.

::

    rank 0   A  B  C0          A
    rank 1   A  B  C1    =>    B
    rank 2   A  W  B  C2       2| W       (before B: the others wait for rank 2 to catch up)
                               0| C0 ..

Pure logic: no clock, no thread, no kernel. Each rank has a queue of tokens. A token is let go when every rank has it
at its head, or when it has waited for ``hold_s`` seconds. Within a rank, order is kept.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbtrain.cluster.ranks import compact

_FRACTION = re.compile(r"(\d+(?:\.\d+)?)\s*(?:/\s*(\d+(?:\.\d+)?)|%)")
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")  # where an object lies is no difference between ranks
_PROCESS = re.compile(r"ipykernel_\d+")  # nor which process it is: warnings name its files
_CHANGING = re.compile(r"[\d.,:?%\s/<|░▏▎▍▌▋▊▉█#=>\-]+")


@dataclass(frozen=True)
class Line:
    """A line of text, its end included; a bar's last state has ``bar`` set, what one rank says for all ``shared``."""

    stream: str
    text: str
    bar: bool = False
    shared: bool = False

    @property
    def key(self) -> Hashable:
        return (self.stream, "bar", _bar_label(self.text)) if self.bar else (self.stream, _same(self.text), self.shared)


@dataclass(frozen=True)
class Rich:
    """A display message: a figure, a table, a last expression's value."""

    kind: str
    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    display_id: str | None = None

    @property
    def key(self) -> Hashable:
        named = self.display_id is not None
        return (self.kind, _same(json.dumps(self.data, sort_keys=True, default=str)), named)


Token = Line | Rich


@dataclass(frozen=True)
class Piece:
    """What is shown: a token, and the ranks that it is from when these are not all. ``token`` is the first rank's."""

    token: Token
    ranks: tuple[int, ...]
    everyone: bool

    @property
    def label(self) -> str:
        return "" if self.everyone else f"{compact(self.ranks)}| "


@dataclass
class _Rank:
    """One rank's queue. ``partial`` is the unfinished line of each stream, ``emitted`` counts tokens let go."""

    queue: deque[tuple[float, Token]] = field(default_factory=deque)
    counts: Counter[Hashable] = field(default_factory=Counter)
    partial: dict[str, str] = field(default_factory=dict)
    bars: dict[str, str] = field(default_factory=dict)
    partial_since: float = 0.0
    emitted: int = 0

    def put(self, token: Token, now: float) -> None:
        self.queue.append((now, token))
        self.counts[token.key] += 1

    def pop(self) -> Token:
        _, token = self.queue.popleft()
        self.counts[token.key] -= 1
        if not self.counts[token.key]:
            del self.counts[token.key]
        self.emitted += 1
        return token

    def waits_for(self, key: Hashable) -> bool:
        """Whether the rank has the token further back in its queue."""
        return self.counts[key] > 0 and self.queue[0][1].key != key


class Merger:
    """Merges the output of ``ranks``."""

    def __init__(self, ranks: Sequence[int], hold_s: float = 0.8) -> None:
        self.ranks = {rank: _Rank() for rank in ranks}
        self.hold_s = hold_s

    def text(self, rank: int, stream: str, text: str, now: float) -> None:
        """Feed text as it comes, cut anywhere."""
        state = self.ranks[rank]
        if not state.partial.get(stream):
            state.partial_since = now
        *lines, rest = (state.partial.get(stream, "") + text).split("\n")
        for line in lines:
            self._line(state, stream, line, now)
        state.partial[stream] = rest
        if "\r" in rest:
            state.bars[stream] = _overwritten(rest)

    def shared(self, rank: int, text: str, now: float) -> None:
        """Feed lines that a rank says for all: nobody is waited for."""
        self._end_lines(self.ranks[rank], now)
        for line in text.split("\n"):
            self.ranks[rank].put(Line("stdout", line + "\n", shared=True), now)

    def rich(self, rank: int, rich: Rich, now: float) -> None:
        """Feed a display message. It ends the lines before it, which keeps the rank's order."""
        self._end_lines(self.ranks[rank], now)
        self.ranks[rank].put(rich, now)

    def finish(self, rank: int, now: float) -> None:
        """The rank's cell is over: its last line is complete. It may still print, from a thread."""
        self._end_lines(self.ranks[rank], now)

    def take(self, now: float, *, final: bool = False) -> Iterator[Piece]:
        """The pieces that can be shown now; with ``final`` everything that is left."""
        self._release_partial_lines(now, final)
        while (group := self._next_group(now, final)) is not None:
            token = self._slowest(group)
            yield Piece(token, tuple(sorted(group)), everyone=_is_shared(token) or len(group) == len(self.ranks))

    def bar(self) -> Line | None:
        """The bar that stands now, from the slowest rank that has one."""
        bars = [(s, text) for state in self.ranks.values() for s, text in state.bars.items()]
        if not bars:
            return None
        stream, text = min(bars, key=lambda bar: _fraction(bar[1]))
        return Line(stream, text, bar=True)

    @property
    def empty(self) -> bool:
        """Whether nothing waits to be shown."""
        return not any(state.queue or any(state.partial.values()) for state in self.ranks.values())

    def _line(self, state: _Rank, stream: str, line: str, now: float) -> None:
        if state.bars.pop(stream, None) is not None or "\r" in line.rstrip("\r"):
            state.put(Line(stream, _overwritten(line) + "\n", bar=True), now)
        else:
            state.put(Line(stream, line.rstrip("\r") + "\n"), now)

    def _end_lines(self, state: _Rank, now: float) -> None:
        for stream, rest in state.partial.items():
            if rest:
                is_bar = state.bars.pop(stream, None) is not None
                state.put(Line(stream, _overwritten(rest) if is_bar else rest, bar=is_bar), now)
        state.partial.clear()

    def _release_partial_lines(self, now: float, final: bool) -> None:
        """Show an unfinished line (``print(..., end="")``) that has stood for a while."""
        for state in self.ranks.values():
            stale = final or now - state.partial_since >= 2 * self.hold_s
            if stale and any(state.partial.values()) and (final or not state.bars):
                self._end_lines(state, now)

    def _next_group(self, now: float, final: bool) -> list[int] | None:
        """The ranks whose common head is to be shown next; their heads are still in place."""
        heads: dict[Hashable, list[int]] = {}
        for rank, state in self.ranks.items():
            if state.queue:
                heads.setdefault(state.queue[0][1].key, []).append(rank)
        if not heads:
            return None
        ready = [
            group for key, group in heads.items() if final or len(group) == len(self.ranks) or self._expired(group, now)
        ]
        if not ready:
            return None
        free = [group for group in ready if not self._others_come_to(group)]
        return min(free or ready, key=lambda group: (self.ranks[group[0]].emitted, group[0]))

    def _expired(self, group: list[int], now: float) -> bool:
        head = self.ranks[group[0]].queue[0][1]
        if _is_shared(head):
            return True
        if self._bar_goes_on(head):
            return False
        first, token = min((self.ranks[rank].queue[0] for rank in group), key=lambda entry: entry[0])
        # A figure takes each rank its own time to draw, and two of one are worse than one that comes late; so are bars.
        return now - first >= (2 * self.hold_s if isinstance(token, Rich) or token.bar else self.hold_s)

    def _bar_goes_on(self, token: Token) -> bool:
        """Whether a finished bar still runs on another rank, so that the slowest can be shown for all."""
        if not (isinstance(token, Line) and token.bar):
            return False
        standing = (Line(s, text, bar=True) for state in self.ranks.values() for s, text in state.bars.items())
        return any(bar.key == token.key for bar in standing)

    def _others_come_to(self, group: list[int]) -> bool:
        key = self.ranks[group[0]].queue[0][1].key
        return any(state.queue and state.waits_for(key) for r, state in self.ranks.items() if r not in group)

    def _slowest(self, group: list[int]) -> Token:
        tokens = [self.ranks[rank].pop() for rank in group]
        if isinstance(tokens[0], Line) and tokens[0].bar:
            return min(tokens, key=lambda token: _fraction(token.text))  # type: ignore[union-attr]
        return tokens[0]


def _is_shared(token: Token) -> bool:
    return isinstance(token, Line) and token.shared


def _same(text: str) -> str:
    if "at 0x" in text:
        text = _ADDRESS.sub("at 0x", text)
    return _PROCESS.sub("ipykernel_", text) if "ipykernel_" in text else text


def _overwritten(text: str) -> str:
    """What a terminal shows of a line with carriage returns."""
    return next((part for part in reversed(text.split("\r")) if part.strip()), "")


def _bar_label(bar: str) -> str:
    """What tells which bars are one: the words before the count. Speed, time and values come and go."""
    count = _FRACTION.search(bar)
    return _CHANGING.sub(" ", bar[: count.start()] if count else bar).strip()


def _fraction(bar: str) -> float:
    """How far a bar is, 0 to 1; a bar without numbers counts as the furthest."""
    match = _FRACTION.search(bar)
    if match is None:
        return float("inf")
    done, total = match.groups()
    return float(done) / float(total or 100) if float(total or 100) else 0.0
