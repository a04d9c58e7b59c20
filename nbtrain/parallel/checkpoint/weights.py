"""A trainer's model in one safetensors file: written by rank 0, to which the others send, one tensor at a time."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from nbtrain.errors import CheckpointError
from nbtrain.parallel import mesh
from nbtrain.parallel.checkpoint import safetensors, storage
from nbtrain.parallel.checkpoint.contents import parameter_names
from nbtrain.parallel.checkpoint.numbers import fits
from nbtrain.parallel.checkpoint.together import Misfit, attempt, gather, listed, require_all
from nbtrain.parallel.pieces import Box, Held, aliases, held_parameters

if TYPE_CHECKING:
    from nbtrain.parallel.trainer import Trainer

_TORCHS = (".pt", ".pth", ".bin", ".ckpt")
_SEVERAL = (
    "of a model in several files make one first: type safetensors.torch.save_file({name: tensor for file in files for "
    "name, tensor in safetensors.torch.load_file(file).items()}, 'whole.safetensors') and import that"
)


def export_weights(trainer: Trainer, path: str | os.PathLike[str]) -> None:
    """`Trainer.export_weights`."""
    stepper = trainer._stepper
    stepper.require_whole()
    held = held_parameters(trainer.model, stepper.layout)
    place, problem = attempt(lambda: _place(path)) if mesh.rank() == 0 else (None, "")
    answers = gather((problem, storage.extents(held, set(held) - parameter_names(trainer))))
    require_all(f"'{path}' was not written", [answer[0] for answer in answers])
    everyone = [answer[1] for answer in answers]
    table = {name: extent for extents in reversed(everyone) for name, extent in extents.items()}
    specs = {name: (extent.shape, extent.dtype) for name, extent in table.items()}
    names, problem = attempt(lambda: safetensors.ordered(specs))
    require_all("no weights were exported", [problem])  # the same on every rank
    assert names is not None, "nothing failed"
    whole = _whole(names, specs, held, storage.assign(everyone))
    metadata = {"format": "pt", "aliases": json.dumps(aliases(trainer.model, stepper.layout))}
    problem = "" if place is None else attempt(lambda: _write(place, specs, metadata, whole))[1]
    for _ in whole:  # after an error too: the other ranks send
        pass
    require_all(f"'{path}' was not written", gather(problem))


def import_weights(trainer: Trainer, path: str | os.PathLike[str], *, strict: bool = True) -> None:
    """`Trainer.import_weights`."""
    stepper = trainer._stepper
    stepper.require_whole()
    held = held_parameters(trainer.model, stepper.layout)
    file, problem = attempt(lambda: _opened(Path(path)))
    found, misfit = ({}, Misfit()) if file is None else _fit(trainer, held, file)
    names = {*held, *found.values()} | set(aliases(trainer.model, stepper.layout))
    answers = gather((problem, misfit, names))
    require_all("nothing was imported", [answer[0] for answer in answers])
    assert file is not None, "nothing failed"
    _require_fit(Path(path), file, answers, strict)
    with torch.no_grad():
        _, problem = attempt(lambda: _copy(held, found, file))
    require_all(f"{path} was imported in part", gather(problem))
    if stepper.mirror is not None:
        stepper.mirror_again()


def _opened(path: Path) -> safetensors.Reader:
    """Raises `CheckpointError` for what a model may lie in, and is not one file of this format."""
    if path.suffix == ".json":
        raise CheckpointError(f"{path} is a table of several files; {_SEVERAL}")
    if path.is_dir():
        files = ", ".join(sorted(entry.name for entry in path.glob("*.safetensors"))[:4]) or "none"
        raise CheckpointError(
            f"{path} is a folder; give one safetensors file in it (it has {files}), or give trainer.load what "
            f"trainer.save was given; {_SEVERAL}"
        )
    return safetensors.Reader(path)


def _whole(
    names: list[str],
    specs: Mapping[str, safetensors.Spec],
    held: Mapping[str, Held],
    chosen: Mapping[tuple[str, Box], int],
) -> Iterator[torch.Tensor]:
    """On rank 0, the whole tensors in order, on the CPU; the others send their pieces, and get empty ones."""
    rank, device = mesh.rank(), torch.device(mesh.default_device_type() if dist.is_initialized() else "cpu")
    boxes: dict[str, list[tuple[Box, int]]] = {}
    for (name, box), owner in chosen.items():
        boxes.setdefault(name, []).append((box, owner))
    for name in names:
        shape, dtype = specs[name]
        whole = torch.empty(shape if rank == 0 else 0, dtype=dtype)
        own = {piece.box: piece.view for piece in held[name].pieces} if name in held else {}
        for box, owner in boxes.get(name, ()):
            if rank == 0:
                _part(whole, box).copy_(own[box] if owner == 0 else _received(box, dtype, owner, device))
            elif rank == owner:
                _send(own[box], device)
        yield whole


def _send(view: torch.Tensor, device: torch.device) -> None:
    # as bytes: not every backend sends every dtype
    dist.send(view.to(device).contiguous().flatten().view(torch.uint8), 0)


def _received(box: Box, dtype: torch.dtype, owner: int, device: torch.device) -> torch.Tensor:
    flat = torch.empty(box.numel * dtype.itemsize, dtype=torch.uint8, device=device)
    dist.recv(flat, owner)
    return flat.view(dtype).view(box.sizes)


def _part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(box.starts, box.sizes, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def _place(path: str | os.PathLike[str]) -> Path:
    """Where the file goes; its folder is made.

    Raises:
        CheckpointError: It cannot be a file's name.
    """
    place = Path(path)
    if not place.name or place.is_dir():
        raise CheckpointError(f"it is a folder; give a file in it: {os.fspath(place / 'model.safetensors')!r}")
    if place.suffix in _TORCHS:
        raise CheckpointError(
            f"what is written is a safetensors file, which torch.load does not read; give {place.stem}.safetensors, "
            "or type torch.save(trainer.state_dict(), ...) on one rank for a file of torch's"
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def _write(
    path: Path, specs: Mapping[str, safetensors.Spec], metadata: Mapping[str, str], whole: Iterator[torch.Tensor]
) -> None:
    """The file gets its name when it is on the disk; where that fails, nothing stays."""
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with hidden.open("wb") as file:
            writer = safetensors.Writer(file, specs, metadata)
            for tensor in whole:
                writer.add(tensor)
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden, path)
    except BaseException:
        with contextlib.suppress(OSError):
            hidden.unlink()
        raise


def _fit(trainer: Trainer, held: Mapping[str, Held], file: safetensors.Reader) -> tuple[dict[str, str], Misfit]:
    """The file's name of each tensor, and what does not fit."""
    others: dict[str, list[str]] = {}
    for other, name in aliases(trainer.model, trainer._stepper.layout).items():
        others.setdefault(name, []).append(other)
    theirs = json.loads(file.metadata.get("aliases", "{}"))
    found, misfit = {}, Misfit()
    for name, one in held.items():
        candidates = [name, *others.get(name, ()), *([theirs[name]] if name in theirs else [])]
        present = list(dict.fromkeys(candidate for candidate in candidates if candidate in file.entries))
        if not present:
            misfit.lacking.append(name)
            continue
        there, entry = present[0], file.entries[present[0]]
        if differ := [other for other in present[1:] if not _same(file, there, other)]:
            misfit.gaps.append(f"its '{there}' and '{differ[0]}' differ, and the model has one tensor for both")
        elif entry.shape != one.shape:
            misfit.problems.append(f"'{there}' is {entry.shape} and must be {one.shape}")
        elif not fits(entry.dtype, one.dtype):
            misfit.problems.append(f"'{there}' is {entry.dtype} and must be {one.dtype}")
        else:
            found[name] = there
    return found, misfit


def _same(file: safetensors.Reader, first: str, second: str) -> bool:
    """By bytes: a NaN is like itself."""
    entries = file.entries[first], file.entries[second]
    if entries[0].shape != entries[1].shape or entries[0].dtype != entries[1].dtype:
        return False
    return torch.equal(*(file.tensor(name).flatten().view(torch.uint8) for name in (first, second)))


def _require_fit(
    path: Path, file: safetensors.Reader, answers: list[tuple[str, Misfit, set[str]]], strict: bool
) -> None:
    misfit = Misfit.of_all(answer[1] for answer in answers)
    known = set().union(*(answer[2] for answer in answers))
    if unknown := [name for name in file.entries if name not in known and not misfit.problems]:
        misfit.gaps.append(f"the model has no {listed(unknown)}")
    misfit.require_none(f"{path} does not fit the model", strict, f"importing {path.name}")


def _copy(held: Mapping[str, Held], found: Mapping[str, str], file: safetensors.Reader) -> None:
    for name, there in found.items():
        whole = file.tensor(there)
        for piece in held[name].pieces:
            piece.view.copy_(_part(whole, piece.box))
