"""What went wrong on the ranks, for a person: once per distinct error, the first failure first.

A failure is the plain data that `nbtrain.engine.tracebacks.describe` makes on a rank.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbtrain import errors
from nbtrain.cluster.ranks import compact

Failure = dict[str, Any]
_BOLD, _DIM, _OFF = "\x1b[1m", "\x1b[2m", "\x1b[0m"  # colours are hard to read on a notebook's red
_GLOO_PLACE = re.compile(r"^\[\S+\.cc:\d+\] ")
MAX_GROUPS = 8  # distinct errors that are shown in full


@dataclass(frozen=True)
class Group:
    """Ranks that failed alike: the same exception types at the same lines. Messages may differ."""

    failures: dict[int, Failure]

    @property
    def first(self) -> Failure:
        return min(self.failures.values(), key=lambda failure: failure["time"])

    @property
    def ranks(self) -> list[int]:
        return sorted(self.failures)

    @property
    def order(self) -> tuple[bool, float]:
        """First failures before the peers' "connection closed"."""
        return all(f["consequence"] for f in self.failures.values()), self.first["time"]


def group(failures: dict[int, Failure]) -> list[Group]:
    """The distinct errors, the first failure first."""
    alike: dict[Any, dict[int, Failure]] = {}
    for rank, failure in failures.items():
        alike.setdefault(_place(failure), {})[rank] = failure
    return sorted((Group(members) for members in alike.values()), key=lambda one: one.order)


def summary(groups: Iterable[Group]) -> str:
    """One line: the first failure."""
    first = next(iter(groups))
    last = first.first["chain"][-1]
    return f"{last['ename']} on {ranks_text(first.ranks)}" + (f": {last['evalue']}" if last["evalue"] else "")


def render(groups: list[Group]) -> list[str]:
    """The lines of the traceback that the notebook shows."""
    lines: list[str] = []
    for position, one in enumerate(groups[:MAX_GROUPS]):
        if position:
            lines.append("")
        lines += _render_consequence(one) if position and one.order[0] else _render_group(one)
    if len(groups) > MAX_GROUPS:
        rest = [rank for one in groups[MAX_GROUPS:] for rank in one.ranks]
        lines.append(f"… and {len(groups) - MAX_GROUPS} other errors on {ranks_text(rest)}")
    return lines


def as_error(rank: int, failure: Failure) -> Exception:
    """A failure of a function of ours: its own clear error as itself, another one with its traceback."""
    last = failure["chain"][-1]
    own: type[Exception] | None = getattr(errors, last["ename"], None)
    if last["ename"] == "NotImplementedError":
        own = NotImplementedError
    if own is not None:
        return own(last["evalue"])
    groups = group({rank: failure})
    return errors.CellError(summary(groups), groups, render(groups))


def ranks_text(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {compact(listed)}"


@dataclass(frozen=True)
class Death:
    """How a rank ended ("SIGKILL", "exit code 3"), and at which line of which cell; ``at`` is empty if none ran.

    ``replaced`` says that the session ended it, to put another process in its place.
    """

    how: str
    at: str = ""
    replaced: bool = False

    def told(self, rank: int) -> str:
        """A clause."""
        place = f" at {self.at}" if self.at else ""
        return f"rank {rank} was replaced{place}" if self.replaced else f"rank {rank} died ({self.how}){place}"


def were(ranks: Collection[int]) -> str:
    """ "was" or "were"."""
    return "was" if len(ranks) == 1 else "were"


def restart_command(ranks: Collection[int]) -> str:
    """What puts new processes in the place of ``ranks``."""
    return f"%distributed restart --ranks {compact(ranks)} --replay"


def replace_advice(ranks: Collection[int], world_size: int) -> str:
    """What to type when ``ranks`` have died."""
    if len(ranks) == world_size:
        return "type %distributed restart to start again"
    return f"type {restart_command(ranks)} to replace what died"


def exit_text(code: int | str | None) -> str:
    """How a process ended: "SIGKILL" or "exit code 3"."""
    if isinstance(code, str):
        return code
    if code is None:
        return "its process is gone"
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


def _place(failure: Failure) -> Any:
    return tuple(
        (link["ename"], tuple((f["file"] if f["kind"] != "cell" else "cell", f["number"]) for f in link["frames"]))
        for link in failure["chain"]
    )


def _render_group(one: Group) -> list[str]:
    lines = []
    chain = one.first["chain"]
    for link in chain[:-1]:
        lines += _render_link(link, f"{link['ename']}: {link['evalue']}")
        lines.append(f"{_DIM}which led to{_OFF}")
    last = chain[-1]
    messages = _messages(one)
    head = f"{_BOLD}{last['ename']}{_OFF} on {_BOLD}{ranks_text(one.ranks)}{_OFF}"
    lines += _render_link(last, f"{head}: {next(iter(messages))}".removesuffix(": ") if len(messages) == 1 else head)
    if len(messages) > 1:
        lines += [f"  {compact(ranks)}| {text}" for text, ranks in messages.items()]
    return lines


def _render_consequence(one: Group) -> list[str]:
    last = one.first["chain"][-1]
    cell = next((frame for frame in last["frames"] if frame["kind"] == "cell"), None)
    where = f" at {_where(cell)}: {cell['line'].strip()}" if cell else ""
    text = _plain_words(last["evalue"].splitlines()[0] if last["evalue"] else "")
    return [f"{_DIM}{ranks_text(one.ranks)} then failed{where}{_OFF}", f"{_DIM}  {last['ename']}: {text[:160]}{_OFF}"]


def _plain_words(text: str) -> str:
    """Without gloo's place in its sources, and without its advice, which is about another kind of failure."""
    return _GLOO_PLACE.sub("", text).partition(". This is typically caused by")[0]


def _messages(one: Group) -> dict[str, list[int]]:
    messages: dict[str, list[int]] = {}
    for rank in one.ranks:
        messages.setdefault(one.failures[rank]["chain"][-1]["evalue"], []).append(rank)
    return messages


def _render_link(link: dict[str, Any], head: str) -> list[str]:
    lines = [head]
    folded: list[dict[str, Any]] = []
    for frame in link["frames"]:
        if frame["kind"] == "library":
            folded.append(frame)
            continue
        lines += _fold(folded)
        folded = []
        lines += _render_frame(frame)
    return lines + _fold(folded)


def _render_frame(frame: dict[str, Any]) -> list[str]:
    function = f" in {frame['function']}" if frame["function"] not in ("<module>", "") else ""
    times = f", {frame['times']} times" if frame.get("times", 1) > 1 else ""
    lines = [f"  {_where(frame)}{function}{times}"]
    width = len(str(frame["number"] + 1))
    for number, text in frame["around"]:
        if number == frame["number"]:
            lines.append(f"{_BOLD}  --> {number:>{width}} {text}{_OFF}")
        elif text:
            lines.append(f"      {number:>{width}} {text}")
    return lines


def _fold(frames: list[dict[str, Any]]) -> list[str]:
    """Library frames as one line that names the innermost."""
    if not frames:
        return []
    last = frames[-1]
    count = f"{len(frames)} library frames, the last: " if len(frames) > 1 else ""
    place = "/".join(Path(last["file"]).parts[-3:])
    return [f"{_DIM}  … {count}{place}:{last['number']} in {last['function']}{_OFF}"]


def _where(frame: dict[str, Any]) -> str:
    if frame["kind"] == "cell":
        return f"{frame.get('cell') or 'the cell'}, line {frame['number']}"
    return f"{frame['file']}:{frame['number']}"
