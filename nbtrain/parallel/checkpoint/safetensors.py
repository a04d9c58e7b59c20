"""The safetensors format, read and written one tensor at a time: the library's writer needs all of them at once.

::

    8 bytes   length of the header, little-endian
    header    JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {text: text}}, padded
    data      tensors one behind the other, row-major, little-endian
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from nbtrain.errors import CheckpointError

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_ZIP = b"PK\x03\x04"  # how torch.save's files begin
_LARGEST_HEADER = 100 * 2**20  # the library's own limit


def ordered(specs: Mapping[str, Spec]) -> list[str]:
    """Names in the order in which `Writer` takes tensors: large elements first, so that all are aligned.

    Raises:
        CheckpointError: The format has no such dtype.
    """
    strange = [f"'{name}' is {dtype}" for name, (_, dtype) in specs.items() if dtype not in _NAMES]
    if strange:
        raise CheckpointError(f"safetensors has no such numbers: {', '.join(strange)}")
    return sorted(specs, key=lambda name: -specs[name][1].itemsize)


class Writer:
    """Writes the header, then what `add` is given, in the order of `ordered`."""

    def __init__(self, file: BinaryIO, specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> None:
        self._file = file
        header: dict[str, Any] = {_METADATA: dict(metadata)}
        end = 0
        for name in ordered(specs):
            shape, dtype = specs[name]
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(struct.pack("<Q", len(text)) + text)

    def add(self, tensor: torch.Tensor) -> None:
        self._file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies, in bytes from the beginning of the data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int


class Reader:
    """A file whose tensors are read where they are looked at.

    Attributes:
        entries: By name.
        metadata: The file's own.

    Raises:
        CheckpointError: It is no safetensors file, or damaged.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                beginning = file.read(8)
                if beginning.startswith(_ZIP):
                    raise CheckpointError(
                        f"{path} is a file of torch.save; type trainer.load_state_dict(torch.load({str(path)!r})), or "
                        "write it again with safetensors"
                    )
                length = struct.unpack("<Q", beginning)[0]
                if length > min(_LARGEST_HEADER, os.fstat(file.fileno()).st_size - 8):
                    raise CheckpointError(f"{path} is no safetensors file: its header would have {length} bytes")
                header = json.loads(file.read(length))
                # private: tensors may be written to, though nobody does
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._start = 8 + length
            self.metadata: dict[str, str] = header.pop(_METADATA, {})
            self.entries = dict(_entries(header, len(self._map) - self._start))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as problem:
            raise CheckpointError(f"{path} cannot be read as a safetensors file: {problem}") from problem

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the file: what is not looked at is not read."""
        entry = self.entries[name]
        numel = math.prod(entry.shape)
        if not numel:
            return torch.empty(entry.shape, dtype=entry.dtype)
        # bytes first: older files need not be aligned
        offset, size = self._start + entry.begin, numel * entry.dtype.itemsize
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=offset)
        if offset % entry.dtype.itemsize:
            flat = flat.clone()
        return flat.view(entry.dtype).view(entry.shape)


def _entries(header: Mapping[str, Any], size: int) -> Iterator[tuple[str, Entry]]:
    for name, told in header.items():
        if told["dtype"] not in _DTYPES:
            raise ValueError(f"'{name}' is of the unknown dtype {told['dtype']}")
        entry = Entry(tuple(told["shape"]), _DTYPES[told["dtype"]], told["data_offsets"][0])
        end = entry.begin + math.prod(entry.shape) * entry.dtype.itemsize
        if end != told["data_offsets"][1] or not 0 <= entry.begin <= end <= size:
            raise ValueError(f"'{name}' lies outside of the file: it is cut off")
        yield name, entry
