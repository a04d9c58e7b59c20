"""`save`: a checkpoint of a trainer, whole or not at all.

::

    all ranks     tell each other what they hold, and decide who writes what
    each rank     copies its share to host memory (blocking=False), writes one file, leaves a note that it is there
    the last      who finds the notes of all writes the table of contents and the manifest, and renames the directory
    all ranks     agree, at once or in `Saving.wait`

Nobody waits while files are written, and nothing is sent: an interrupt, a rank's death or groups that are formed again
leave at worst a hidden directory, which the next save removes.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nbtrain.errors import CheckpointError, UsageError
from nbtrain.parallel import mesh
from nbtrain.parallel.cell import require_all_ranks, say
from nbtrain.parallel.checkpoint import contents, folder, storage
from nbtrain.parallel.checkpoint.folder import Published
from nbtrain.parallel.checkpoint.manifest import Manifest
from nbtrain.parallel.checkpoint.storage import Extents
from nbtrain.parallel.checkpoint.together import attempt, gather, host, require_all, told
from nbtrain.parallel.pieces import Box, Held, Piece

if TYPE_CHECKING:
    from nbtrain.parallel.trainer import Trainer

_NOTE = ".written.{}"
_FINISHING = ".finishing"
_active: set[str] = set()  # names of the directories that this process writes


class Report(NamedTuple):
    """What a rank tells of a checkpoint that it writes."""

    name: str
    problem: str
    path: str | None  # where it is the rank that finished it
    warning: str  # of what failed when the checkpoint was there


@dataclass
class Draft:
    """What writing a checkpoint needs on one rank.

    Attributes:
        directory: Hidden.
        rank: This one.
        tensors: Its pieces.
        everyone: What each rank holds.
        chosen: Who writes what.
        plain: What is no tensor, on rank 0.
        manifest: Of the checkpoint.
        keep: How many stay.
    """

    directory: Path
    rank: int
    tensors: Mapping[str, Held]
    everyone: list[Extents]
    chosen: Mapping[tuple[str, Box], int]
    plain: bytes | None
    manifest: Manifest
    keep: int | None

    def copied(self) -> Draft:
        """With copies, in host memory, of what this rank writes."""
        copies: dict[str, list[Piece]] = {}
        for (name, box), view in storage.own_share(self.rank, self.tensors, self.chosen):
            copies.setdefault(name, []).append(Piece(box, view.to("cpu", copy=True)))
        return replace(
            self, tensors={name: replace(self.tensors[name], pieces=tuple(parts)) for name, parts in copies.items()}
        )

    def write(self) -> Published | None:
        """Writes this rank's share; where it is the last one, finishes the checkpoint and tells where it is."""
        if not self.directory.is_dir():
            raise CheckpointError(
                f"{host()} has no {self.directory}, which rank 0 made; give a directory that all ranks share"
            )
        results = storage.write(self.directory, self.rank, self.tensors, self.chosen, self.plain)
        note = self.directory / _NOTE.format(self.rank)
        partial = note.with_name(f"{note.name}.part")
        partial.write_bytes(pickle.dumps(results))
        os.replace(partial, note)
        return self.finish()

    def finish(self) -> Published | None:
        """Finishes the checkpoint where all have written and nobody else does."""
        notes = [self.directory / _NOTE.format(rank) for rank in range(len(self.everyone))]
        if not all(note.exists() for note in notes):
            return None
        marker = self.directory / _FINISHING
        try:
            marker.mkdir()
        except (FileExistsError, FileNotFoundError):
            return None  # another rank was the last too
        results = [storage.load_results(note.read_bytes()) for note in notes]
        storage.Writer(self.directory).finish(storage.metadata(self.everyone, self.chosen), results)
        for note in notes:
            note.unlink()
        marker.rmdir()
        self.manifest.write(self.directory)
        return folder.publish(self.directory, self.manifest, self.keep)


class Saving:
    """A checkpoint that is written, or was.

    ``os.fspath`` of it gives its path, so that ``trainer.load`` takes it.

    Attributes:
        step: Optimizer steps that it holds.
        seconds: How long this rank's work took; None before it is done.
    """

    def __init__(self, draft: Draft) -> None:
        self.step = draft.manifest.step
        self.seconds: float | None = None
        self.name = draft.directory.name
        self._directory = draft.directory
        self._draft: Draft | None = draft
        self._begun = time.perf_counter()
        self._path: Path | None = None
        self._problem = self._warning = ""
        self._thread: threading.Thread | None = None
        self._agreed = False
        _active.add(self.name)

    @property
    def done(self) -> bool:
        """Whether nothing is left to do, as far as this rank knows. Moves nothing: ranks may differ."""
        return self._agreed or self._problem != "" or not self._directory.exists()

    @property
    def path(self) -> Path:
        """Of the checkpoint, or where it is expected. Known for sure behind `wait`."""
        return self._path or self._directory.with_name(f"step-{self.step:08}")

    def wait(self) -> Path:
        """Returns when the checkpoint is whole, on the disk and the latest one. Collective.

        Raises:
            CheckpointError: It could not be written on some rank; earlier ones are as they were.
        """
        if not self._agreed:
            require_all_ranks("Saving.wait")
            self.join()
            self.agree(gather(self.report()))
        require_all(self._failed, [self._problem] if self._problem else [])
        return self.path

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        state = "done" if self.done else "being written"
        if self._problem:
            state = f"failed: {self._problem}"
        return f"<Saving of step {self.step} to {self.path}: {state}>"

    def start(self, *, blocking: bool) -> None:
        """Writes, or begins to."""
        if blocking:
            self._run()
            return
        assert self._draft is not None, "it has not begun"
        self._draft = self._draft.copied()
        self._thread = threading.Thread(target=self._run, name=f"save {self.name}")
        self._thread.start()

    def join(self) -> None:
        """Waits for what this rank writes. Can be interrupted."""
        if self._thread is not None:
            self._thread.join()

    def report(self) -> Report | None:
        """To tell the other ranks, behind `join`; None where this rank was interrupted before it had written."""
        finished = None if self._path is None else self._path.name
        return None if self.seconds is None else Report(self.name, self._problem, finished, self._warning)

    def agree(self, reports: list[Report | None]) -> None:
        """Ends what all ranks began; where some did not, nothing becomes of it. Collective in the rarest case.

        A rank may not have seen the note of another: on some network filesystems names show late.
        """
        if any(report is None or report.name != self.name for report in reports):
            self._problem = self._problem or "some ranks were interrupted before they had written"
        else:
            self._problem = _joined([report.problem for report in reports if report is not None])
        if not self._problem:
            self._settle([report for report in reports if report is not None])
        self._drop()

    def _settle(self, reports: list[Report]) -> None:
        if not any(report.path for report in reports):
            if mesh.rank() == 0:
                _, self._problem = attempt(self._finish_late)
            reports = [report for report in gather(self.report()) if report is not None]
            self._problem = reports[0].problem
        for report in reports:
            if report.path:
                self._path = self._directory.with_name(report.path)
            if report.warning:
                say(report.warning)

    def _finish_late(self) -> None:
        assert self._draft is not None, "it is kept until ranks agree"
        if (published := self._draft.finish()) is None:
            raise CheckpointError(f"{self._directory} lacks the notes of some ranks")
        self._path, self._warning = published

    def _run(self) -> None:
        assert self._draft is not None, "it has not been dropped"
        try:
            if (published := self._draft.write()) is not None:
                self._path, self._warning = published
        except Exception as problem:  # all ranks raise it, when they agree
            self._problem = told(problem)
        self.seconds = time.perf_counter() - self._begun
        # what was copied need not wait for the others
        self._draft = replace(self._draft, tensors={})

    def _drop(self) -> None:
        self._agreed, self._draft, self._thread = True, None, None
        _active.discard(self.name)
        if self._problem and mesh.rank() == 0 and self._directory.exists():
            folder.remove(self._directory)

    @property
    def _failed(self) -> str:
        return f"the checkpoint of step {self.step} was not written"


def save(
    trainer: Trainer,
    directory: str | os.PathLike[str],
    *,
    keep: int | None = None,
    blocking: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> Saving:
    """`Trainer.save`."""
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise UsageError(f"keep={keep!r} must be a number of checkpoints of at least 1, or None for all")
    trainer._stepper.require_whole()
    settle(trainer)
    trainer._stepper._drop()
    saving = Saving(_draft(trainer, Path(os.path.abspath(directory)), keep, extra))
    trainer._disk.saving = saving
    saving.start(blocking=blocking)
    if blocking:
        saving.wait()
        trainer._disk.saving = None
    return saving


def settle(trainer: Trainer) -> None:
    """Ends the checkpoint that was begun before. Collective.

    Raises:
        CheckpointError: It could not be written.
    """
    saving, trainer._disk.saving = trainer._disk.saving, None
    if saving is not None:
        saving.join()
    reports = gather(None if saving is None or saving._agreed else saving.report())
    if saving is not None and not saving._agreed:
        saving.agree(reports)
        if all(report is not None for report in reports):
            saving.wait()


def _draft(trainer: Trainer, directory: Path, keep: int | None, extra: Mapping[str, Any] | None) -> Draft:
    """What all ranks have agreed to write. Collective."""
    rank, step = mesh.rank(), trainer.num_steps
    made, problem = attempt(lambda: folder.begin(directory, step, _active)) if rank == 0 else (None, "")
    held, second = attempt(lambda: _told(trainer, extra))
    mine = (problem or second, None if made is None else made.name, None if held is None else held[1:])
    reports = gather(mine)
    plan, problems = None, [report[0] for report in reports]
    if not any(problems):
        plan, problem = attempt(lambda: _merged(trainer, directory, reports))
        problems = gather(problem)
    if any(problems) and made is not None:
        folder.remove(made)
    require_all("no checkpoint was begun", problems)
    assert held is not None, "nothing failed"
    assert plan is not None, "nothing failed"
    plain, manifest, everyone = plan
    trainer._disk.trainer_id = manifest.trainer
    return Draft(directory / reports[0][1], rank, held[0], everyone, storage.assign(everyone), plain, manifest, keep)


def _told(trainer: Trainer, extra: Mapping[str, Any] | None) -> tuple[Mapping[str, Held], Extents, bytes]:
    found = contents.contents(trainer, extra)
    return found.tensors, storage.extents(found.tensors, found.copies), contents.packed(contents.plain(found.facts))


def _merged(trainer: Trainer, directory: Path, reports: list[Any]) -> tuple[bytes | None, Manifest, list[Extents]]:
    """What is no tensor, on rank 0, which looks into the directory too."""
    everyone = [report[2][0] for report in reports]
    facts = contents.merged([contents.unpacked(report[2][1]) for report in reports])
    manifest = contents.manifest(trainer, facts, everyone)
    if mesh.rank() != 0:
        return None, manifest, everyone
    folder.require_same_model(directory, manifest)
    return contents.packed(facts), manifest, everyone


def _joined(problems: list[str]) -> str:
    try:
        require_all("", problems)
    except CheckpointError as problem:
        return str(problem).removeprefix(": ")
    return ""
