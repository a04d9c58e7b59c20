"""Pieces of tensors as items of torch's distributed checkpoints: who writes what, and who reads what.

The files are those of ``torch.distributed.checkpoint``: its own tools read them (``dcp.load``, ``dcp_to_torch_save``).
Tensors are named ``model.<name>`` and ``optimizer.state.<parameter>.<key>``.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import pickle
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from nbtrain.errors import CheckpointError
from nbtrain.parallel.pieces import Box, Held

PLAIN = "trainer"
"""The one item that holds no tensor."""


@dataclass(frozen=True)
class Extent:
    """What a rank has of one tensor, without its numbers.

    Attributes:
        shape: Of the whole.
        dtype: Of its elements.
        boxes: Those that lie on the rank.
        like_first: Copies may differ, and the first rank's counts: buffers, which no optimizer keeps equal.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    like_first: bool = False


Extents = Mapping[str, Extent]
"""By name of the item."""


def extents(tensors: Mapping[str, Held], like_first: Collection[str] = ()) -> dict[str, Extent]:
    return {
        name: Extent(held.shape, held.dtype, tuple(piece.box for piece in held.pieces), name in like_first)
        for name, held in tensors.items()
    }


def assign(everyone: list[Extents]) -> dict[tuple[str, Box], int]:
    """Which rank writes each box: of those that hold it, the one that has least to write so far."""
    holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
    weights: dict[tuple[str, Box], int] = {}
    first: set[tuple[str, Box]] = set()
    for rank, held in enumerate(everyone):
        for name, extent in held.items():
            for box in extent.boxes:
                holders[name, box].append(rank)
                weights[name, box] = box.numel * extent.dtype.itemsize
                if extent.like_first:
                    first.add((name, box))
    load = [0] * len(everyone)
    chosen = {}
    for key, ranks in holders.items():
        chosen[key] = ranks[0] if key in first else min(ranks, key=load.__getitem__)
        load[chosen[key]] += weights[key]
    return chosen


def metadata(everyone: list[Extents], chosen: Mapping[tuple[str, Box], int]) -> Metadata:
    """DCP's table of contents."""
    entries: dict[str, Any] = {PLAIN: BytesStorageMetadata()}
    for name, extent in itertools.chain.from_iterable(held.items() for held in everyone):
        properties = TensorProperties(dtype=extent.dtype)
        entries.setdefault(name, TensorStorageMetadata(properties, torch.Size(extent.shape), []))
    for name, box in chosen:
        entries[name].chunks.append(_chunk(box))
    return Metadata(entries, planner_data={name: _path(name) for name in entries})


def write(
    directory: Path, rank: int, tensors: Mapping[str, Held], chosen: Mapping[tuple[str, Box], int], plain: bytes | None
) -> list[WriteResult]:
    """Writes this rank's share to one file, and waits until it is on the disk.

    Args:
        directory: Of the checkpoint.
        rank: This one.
        tensors: By name of the item.
        chosen: As `assign` gives it.
        plain: The item that is no tensor, where this rank writes it.
    """
    views = dict(own_share(rank, tensors, chosen))
    items = [_write_item(name, box, tensors[name]) for name, box in views]
    if plain is not None:
        items.append(WriteItem(MetadataIndex(PLAIN), WriteItemType.BYTE_IO))
    if not items:
        return []
    writer = Writer(directory)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
    empty = [SavePlan([])] * rank
    *_, plan = writer.prepare_global_plan([*empty, SavePlan(items)])
    written: Future[list[WriteResult]] = writer.write_data(plan, _Source(views, plain))
    return written.wait()


def own_share(
    rank: int, tensors: Mapping[str, Held], chosen: Mapping[tuple[str, Box], int]
) -> Iterable[tuple[tuple[str, Box], torch.Tensor]]:
    """What this rank writes."""
    for name, held in tensors.items():
        for piece in held.pieces:
            if chosen[name, piece.box] == rank:
                yield (name, piece.box), piece.view


class Writer(FileSystemWriter):
    """DCP's, whose table of contents has no path of this machine in it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=None, save_id=self.save_id)


class Reader(FileSystemReader):
    """DCP's, which reads what several items need once, and runs no code that a file names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The table of contents.

        Raises:
            CheckpointError: It is damaged, or holds other things than a table.
        """
        path = Path(self.path) / ".metadata"
        try:
            table = _Tables(io.BytesIO(path.read_bytes())).load()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError) as problem:
            raise CheckpointError(f"{path} cannot be read: {problem}") from problem
        assert isinstance(table, Metadata)
        return table

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        def place(item: ReadItem) -> tuple[str, int, int]:
            info = self.storage_data[item.storage_index]
            return info.relative_path, info.offset, info.length

        items = sorted(plan.items, key=place)
        for file, in_file in itertools.groupby(items, key=lambda item: place(item)[0]):
            with (Path(self.path) / file).open("rb") as stream:
                for (_, offset, length), alike in itertools.groupby(in_file, key=place):
                    stream.seek(offset)
                    tensor = torch.load(io.BytesIO(stream.read(length)), map_location="cpu", weights_only=True)
                    for item in alike:
                        planner.resolve_tensor(item).copy_(_narrowed(tensor, item.storage_offsets, item.lengths))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_plain(self, table: Metadata) -> dict[str, Any]:
        """The item that is no tensor."""
        info: Any = table.storage_data[MetadataIndex(PLAIN)]
        with (Path(self.path) / info.relative_path).open("rb") as stream:
            stream.seek(info.offset)
            plain: dict[str, Any] = torch.load(io.BytesIO(stream.read(info.length)), weights_only=True)
            return plain


def read(reader: Reader, table: Metadata, wanted: Mapping[str, tuple[str, Held]]) -> None:
    """Reads into this rank's pieces.

    Args:
        reader: Of the checkpoint.
        table: Its contents.
        wanted: Item and pieces, by any key.
    """
    reader.set_up_storage_reader(table, is_coordinator=False)
    items: list[ReadItem] = []
    for key, (name, held) in wanted.items():
        chunks = [_chunk(piece.box) for piece in held.pieces]
        made = create_read_items_for_chunk_list(name, table.state_dict_metadata[name], chunks)  # type: ignore[arg-type]
        items += [dataclasses.replace(item, dest_index=dataclasses.replace(item.dest_index, fqn=key)) for item in made]
    sink = _Sink({key: held for key, (_, held) in wanted.items()})
    reader.read_data(LoadPlan(items), sink).wait()


def missing(table: Metadata, name: str, held: Held) -> bool:
    """Whether files lack some element of the tensor: a table that lost items would load as whatever was there."""
    entry: Any = table.state_dict_metadata[name]
    whole = Box((0,) * len(held.shape), held.shape).numel
    return sum(Box(tuple(chunk.offsets), tuple(chunk.sizes)).numel for chunk in entry.chunks) != whole


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.starts), torch.Size(box.sizes))


def _path(name: str) -> tuple[str, ...]:
    """Where an item lies in nested dicts, for torch's own tools."""
    if name.startswith("optimizer.state."):
        return "optimizer", "state", *name.removeprefix("optimizer.state.").rsplit(".", 1)
    first, _, rest = name.partition(".")
    return (first, rest) if rest else (first,)


def _write_item(name: str, box: Box, held: Held) -> WriteItem:
    data = TensorWriteData(_chunk(box), TensorProperties(dtype=held.dtype), torch.Size(held.shape))
    return WriteItem(MetadataIndex(name, torch.Size(box.starts)), WriteItemType.SHARD, tensor_data=data)


def _narrowed(tensor: torch.Tensor, starts: Iterable[int], sizes: Iterable[int]) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


class _Source(SavePlanner):
    """Gives DCP's writer what items name; they were chosen before (`assign`)."""

    def __init__(self, views: Mapping[tuple[str, Box], torch.Tensor], plain: bytes | None) -> None:
        self._views = {(name, torch.Size(box.starts)): view for (name, box), view in views.items()}
        self._plain = plain

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            assert self._plain is not None, "only who has it has the item"
            return io.BytesIO(self._plain)
        assert write_item.index.offset is not None, "`_write_item` gives one"
        return self._views[write_item.index.fqn, write_item.index.offset]

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def create_local_plan(self) -> SavePlan:
        raise NotImplementedError

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        raise NotImplementedError


class _Sink(LoadPlanner):
    """Tells DCP's reader where items go."""

    def __init__(self, wanted: Mapping[str, Held]) -> None:
        self._views = {
            (key, torch.Size(piece.box.starts)): piece.view for key, held in wanted.items() for piece in held.pieces
        }

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        assert index.offset is not None, "of a box"
        return _narrowed(self._views[index.fqn, index.offset], read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError


class _Tables(pickle.Unpickler):
    """Of DCP's own classes alone."""

    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _OTHERS = (
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.storage", "WriteResult"),
    )

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        own = (
            module in self._MODULES
            and isinstance(found := super().find_class(module, name), type)
            and found.__module__ == module
        )
        if dtype or own or (module, name) in self._OTHERS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a table")


def load_results(data: bytes) -> list[WriteResult]:
    """What a rank has told of its file."""
    results: list[WriteResult] = _Tables(io.BytesIO(data)).load()
    return results
