"""Who waits for whom: what each rank says of itself, as a table and as sentences."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbtrain.cluster.cell import Cell
from nbtrain.cluster.failures import Death, ranks_text, restart_command
from nbtrain.cluster.members import Members
from nbtrain.cluster.ranks import compact
from nbtrain.cluster.report import Table

ASK_S = 0.15  # a rank that has not answered by then holds the interpreter, or does not run at all

# One collective has several names: gloo makes a reduce-scatter of an all-reduce, and objects travel in tensors.
_KINDS = {"reduce_scatter": "allreduce", "send": "message", "recv": "message"}
_SUFFIXES = ("_object_list", "_into_tensor", "_object", "_tensor", "_single", "_list", "_base")


@dataclass(frozen=True)
class Wait:
    """A collective that a rank waits in: number ``seq`` of the group ``ranks``, for ``seconds``."""

    op: str
    group: str
    ranks: tuple[int, ...]
    seq: int
    tensors: str  # "float32 [4]"
    seconds: float
    told: str = ""  # the whole in words
    by: str = ""  # "messages" has numbers of its own

    @property
    def kind(self) -> str:
        """What must be the same on all ranks of the group."""
        name = self.op.removeprefix("_")
        name = next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)
        return _KINDS.get(name, name.replace("_", ""))

    @property
    def text(self) -> str:
        return self.told or f"{self.op} #{self.seq}" + (f" of {self.tensors}" if self.tensors else "")


@dataclass(frozen=True)
class Look:
    """What is known of a rank at one moment.

    ``state`` is "idle", "runs", "finished" (the cell that others still run), "failed" (in it), "dead" or "silent";
    ``about`` names the cell or the cause of death, ``place`` the cell's (last) line, ``spot`` what it calls there.
    """

    rank: int
    state: str
    about: str = ""
    seconds: float = 0.0
    place: str = ""
    spot: str = ""
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True, repr=False)
class Where(Table):
    """Where each rank is, and what that means."""

    findings: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return "\n".join([super().__repr__(), *self.findings, *self.advice])

    def _repr_html_(self) -> str:
        lines = "".join(f"<div>{html.escape(line)}</div>" for line in (*self.findings, *self.advice))
        return super()._repr_html_() + lines


def where(members: Members, headline: str, cells: Sequence[Cell]) -> Where:
    """Where every rank is now; ``cells`` are those that still run."""
    return described(look(members, cells, ASK_S), headline, members.world_size)


def described(looks: Sequence[Look], headline: str, world_size: int, *, advice: bool = True) -> Where:
    """``looks`` as a table, what they mean, and with ``advice`` what to do about it."""
    columns = ("rank", "state", "line", "waits in")
    return Where(
        headline, columns, rows(looks, world_size), tuple(diagnose(looks)), tuple(advise(looks) if advice else ())
    )


def look(members: Members, cells: Sequence[Cell], timeout: float) -> list[Look]:
    """Ask all ranks at once; one that does not answer within ``timeout`` s is silent."""
    answers = members.ask_all(range(members.world_size), "where", timeout)
    return [_look(rank, members.dead, cells, answers.get(rank)) for rank in range(members.world_size)]


def rows(looks: Iterable[Look], world_size: int) -> list[tuple[str, ...]]:
    """Table rows, one for ranks that are alike."""
    alike: dict[tuple[str, ...], list[Look]] = {}
    for one in looks:
        key = (one.state, one.about, one.place, one.spot, *(f"{w.text} {w.ranks}" for w in one.waits))
        alike.setdefault(key, []).append(one)
    return [_row(members, world_size) for members in alike.values()]


def diagnose(looks: Sequence[Look]) -> list[str]:
    """What the ranks' answers mean, as sentences; empty if no rank waits for another."""
    findings = []
    for (_, ranks), waits in _by_group(looks).items():
        findings += _diagnose_group(ranks, waits, {one.rank: one for one in looks})
    return findings


def absent(looks: Sequence[Look]) -> list[int]:
    """The ranks that others wait for."""
    missing: set[int] = set()
    for (_, ranks), waits in _by_group(looks).items():
        if not _in_progress(ranks, waits):
            missing |= set(ranks) - {one.rank for one, _ in waits}
    return sorted(missing)


def advise(looks: Sequence[Look]) -> list[str]:
    """What to type next."""
    advice = []
    if diagnose(looks):
        advice.append("To end it: Kernel > Interrupt, or %distributed interrupt; the ranks keep their state.")
    gone = [one.rank for one in looks if one.state in ("dead", "silent")]
    if gone:
        advice.append(f"To replace {ranks_text(gone)}: {restart_command(gone)}")
    return advice


def stuck(before: Sequence[Look], now: Sequence[Look]) -> bool:
    """Whether ranks wait, at both looks, in one and the same collective that others have not joined."""
    then = {(one.rank, group, wait.seq) for group, waits in _by_group(before).items() for one, wait in waits}
    for (name, ranks), waits in _by_group(now).items():
        same = [wait for one, wait in waits if (one.rank, (name, ranks), wait.seq) in then]
        if same and not _in_progress(ranks, waits):
            return True
    return False


def _look(rank: int, dead: Mapping[int, Death], cells: Sequence[Cell], answer: Any) -> Look:
    cell = next((cell for cell in cells if rank in cell.ranks), None)
    state, about = "idle", ""
    if rank in dead:
        return Look(rank, "dead", dead[rank].how, place=dead[rank].at)
    if cell is not None:
        about = cell.title
        state = "runs" if rank in cell.running else "failed" if rank in cell.failures else "finished"
    seconds = cell.seconds if cell is not None else 0.0
    if answer is None:
        return Look(rank, "silent", about, seconds)
    at = answer["user"] or answer["cell"]
    place = f"{_where(at)}: {at['line'].strip()}" if at else ""
    spot = "input or a debugger" if answer["asks"] else answer["spot"]
    return Look(rank, state, about, seconds, place, spot, tuple(map(_wait, answer["pending"])))


def _wait(entry: Mapping[str, Any]) -> Wait:
    tensors = ", ".join(f"{d} {s}" for d, s in zip(entry["dtypes"], entry["sizes"], strict=False))
    told = entry.get("told", "")
    group, ranks, by = entry["group"], tuple(entry["ranks"]), entry.get("by", "")
    return Wait(entry["op"], group, ranks, entry["seq"], tensors, entry["waits_s"], told, by)


def _where(frame: Mapping[str, Any]) -> str:
    number = frame["number"]
    return f"{frame['cell'] or 'the cell'}, line {number}" if frame["kind"] == "cell" else f"{frame['file']}:{number}"


def _row(alike: Sequence[Look], world_size: int) -> tuple[str, ...]:
    first = alike[0]
    waits = []
    for position, wait in enumerate(first.waits):
        longest = max(one.waits[position].seconds for one in alike)
        waits.append(f"{wait.text}{_of(wait, world_size)} for {_seconds(longest)}")
    place = first.place + (f"  (in {first.spot})" if first.spot else "")
    return compact(one.rank for one in alike), _state(first), place, "; ".join(waits)


def _state(one: Look) -> str:
    if one.state == "dead":
        return f"dead ({one.about})"
    if one.state == "runs":
        return f"runs {one.about} for {_seconds(one.seconds)}"
    if one.state in ("finished", "failed"):
        return f"{one.state} {'in ' * (one.state == 'failed')}{one.about}"
    return f"does not answer{one.about and f', runs {one.about}'}" if one.state == "silent" else one.state


def _of(wait: Wait, world_size: int) -> str:
    """Which group, unless it is the default one, or told."""
    return f" of {ranks_text(wait.ranks)}" if wait.ranks and len(wait.ranks) < world_size and not wait.told else ""


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


_Waits = list[tuple[Look, Wait]]


def _by_group(looks: Iterable[Look]) -> dict[tuple[str, tuple[int, ...]], _Waits]:
    """The oldest wait of each rank in each group."""
    groups: dict[tuple[str, tuple[int, ...]], _Waits] = {}
    for one in looks:
        for wait in one.waits:
            waits = groups.setdefault((wait.group, wait.ranks), [])
            if all(other.rank != one.rank for other, _ in waits):
                waits.append((one, wait))
    return groups


def _in_progress(ranks: Sequence[int], waits: _Waits) -> bool:
    """Whether every rank of the group is in the same collective: it takes its time, and nobody is missing."""
    alike = {(wait.by, wait.kind, wait.seq, wait.tensors if wait.kind in _SAME_SHAPES else "") for _, wait in waits}
    return len(waits) == len(ranks) and len(alike) == 1


_SAME_SHAPES = ("allreduce", "broadcast", "reduce")


def _diagnose_group(ranks: tuple[int, ...], waits: _Waits, looks: Mapping[int, Look]) -> list[str]:
    if _in_progress(ranks, waits):
        return []
    findings = [_waiting(those) for those in _alike(waits).values()]
    findings += _differences(waits)
    absent = [looks[rank] for rank in ranks if rank in looks and rank not in {one.rank for one, _ in waits}]
    for text, those in _grouped((_absent(one), one.rank) for one in absent).items():
        findings.append(f"{ranks_text(those).capitalize()} {'has' if len(those) == 1 else 'have'} not joined: {text}.")
    return findings


def _alike(waits: _Waits) -> dict[tuple[str, str], _Waits]:
    alike: dict[tuple[str, str], _Waits] = {}
    for one, wait in waits:
        alike.setdefault((wait.text, one.place), []).append((one, wait))
    return alike


def _waiting(those: _Waits) -> str:
    one, wait = those[0]
    who = ranks_text(look.rank for look, _ in those).capitalize()
    verb = "waits" if len(those) == 1 else "wait"
    place = f", at {one.place}" if one.place else ""
    return f"{who} {verb} in {wait.text} for {_seconds(max(w.seconds for _, w in those))}{place}."


def _differences(waits: _Waits) -> list[str]:
    """Mismatches among the ranks that wait: one is ahead, or they are not in the same operation, or shapes differ."""
    if len({wait.by for _, wait in waits}) > 1:  # their numbers say nothing
        return _disagreement("operation", waits, lambda wait: f"{wait.op}{wait.by and ' by '}{wait.by}")
    by_seq = _grouped((wait.seq, one.rank) for one, wait in waits)
    if len(by_seq) > 1:
        most = max(by_seq, key=lambda seq: (len(by_seq[seq]), -seq))
        return [_apart(ranks, seq - most) for seq, ranks in by_seq.items() if seq != most]
    if len({wait.kind for _, wait in waits}) > 1:
        return _disagreement("operation", waits, lambda wait: wait.op)
    if len({wait.tensors for _, wait in waits}) > 1 and waits[0][1].kind in _SAME_SHAPES:
        return _disagreement("shape or dtype", waits, lambda wait: wait.tensors)
    return []


def _disagreement(what: str, waits: _Waits, shown: Callable[[Wait], str]) -> list[str]:
    texts = _grouped((shown(wait), one.rank) for one, wait in waits)
    parts = "; ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in texts.items())
    return [f"They do not agree on the {what}: {parts}."]


def _apart(ranks: Sequence[int], distance: int) -> str:
    verb = "is" if len(ranks) == 1 else "are"
    count = "one collective" if abs(distance) == 1 else f"{abs(distance)} collectives"
    return f"{ranks_text(ranks).capitalize()} {verb} {count} {'ahead' if distance > 0 else 'behind'}."


def _absent(one: Look) -> str:
    """What a rank does that others wait for."""
    at = f" at {one.place}" if one.place else ""
    if one.waits:
        return f"waiting in {(wait := one.waits[0]).text}{'' if wait.told else f' of {ranks_text(wait.ranks)}'}{at}"
    if one.state == "runs":
        return f"waiting for its data in next(loader){at}" if one.spot == "next(loader)" else f"still computing{at}"
    return {
        "dead": f"dead ({one.about}){at}",
        "silent": "no answer, as it is stopped or holds the interpreter in C code",
        "finished": f"left {one.about} early, without this collective",
        "failed": f"failed in {one.about}",
    }.get(one.state, "idle, not running this cell")


def _grouped(pairs: Iterable[tuple[Any, int]]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for key, rank in pairs:
        groups.setdefault(key, []).append(rank)
    return groups
