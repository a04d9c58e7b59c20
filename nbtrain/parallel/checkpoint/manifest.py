"""`Manifest`: what a checkpoint is, as readable JSON beside its tensors (``nbtrain.json``)."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbtrain.errors import CheckpointError

NAME = "nbtrain.json"
FORMAT = 1
"""A reader takes this version and older ones."""


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint.

    Attributes:
        format: Of the files.
        versions: ``{"nbtrain", "torch", "python"}`` that wrote it.
        saved_ns: When, in nanoseconds since 1970.
        step: Optimizer steps done.
        plan: That it was trained by, as ``Plan.to_dict`` gives it, and
        world_size: on how many ranks.
        model: Class, for people.
        tensors: ``{name: {"shape", "dtype"}}`` of parameters and buffers, under the names of the model before it was
            laid out; tied ones once.
        aliases: ``{other name: name}`` of tied ones.
        extra_states: Names of what modules keep beside tensors.
        optimizer: ``{"class", "groups": [names], "state": {name: {key: {"shape", "dtype"} | None}}}``; None is plain
            data.
        scheduler: Class, or None.
        loaders: ``{"batch_size", "batches"}`` of those made by the trainer, in order.
        files: Size of each file in bytes.
    """

    versions: Mapping[str, str]
    saved_ns: int
    step: int
    plan: Mapping[str, Any]
    world_size: int
    model: str
    tensors: Mapping[str, Mapping[str, Any]]
    aliases: Mapping[str, str]
    extra_states: list[str]
    optimizer: Mapping[str, Any]
    scheduler: str | None
    loaders: list[dict[str, int]]
    files: Mapping[str, int] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, directory: Path) -> None:
        """Puts it on the disk, with the sizes of the files that are there."""
        files = {entry.name: entry.stat().st_size for entry in sorted(directory.iterdir()) if entry.is_file()}
        text = json.dumps(dataclasses.asdict(dataclasses.replace(self, files=files)), indent=1)
        with (directory / NAME).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """That of a checkpoint.

        Raises:
            CheckpointError: It is none, or of a later nbtrain.
        """
        path = directory / NAME
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] > FORMAT:
                raise CheckpointError(
                    f"{directory} has format {data['format']}, written by nbtrain {data['versions']['nbtrain']}; this "
                    f"nbtrain reads up to {FORMAT}: upgrade it"
                )
            known = {entry.name for entry in dataclasses.fields(cls)}
            return cls(**{key: value for key, value in data.items() if key in known})
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise CheckpointError(f"{path} cannot be read as a manifest: {problem}") from problem

    def damaged(self, directory: Path) -> list[str]:
        """What of the files is missing or has another size."""
        problems = []
        for name, size in self.files.items():
            path = directory / name
            if not path.is_file():
                problems.append(f"the file {name} is missing")
            elif path.stat().st_size != size:
                problems.append(f"the file {name} has {path.stat().st_size} bytes and must have {size}")
        return problems
