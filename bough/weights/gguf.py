"""Reading GGUF files: header, metadata and tensor table, with every number checked against the file.

The format: magic ``GGUF``, version, tensor count, metadata count; typed key-value pairs; the tensor
table (name, dimensions, type, offset); then, aligned, the tensors' bytes. All little-endian.

A file is untrusted. Every length is compared with the bytes that are left before anything of that
length is read or allocated, so memory stays proportional to the file; whatever is wrong raises
:class:`~bough.base.errors.ConfigError` that names the file and the place.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bough.base.errors import ConfigError
from bough.weights.blocks import BlockFormat, decode_into
from bough.weights.formats import FORMATS, OTHER_TYPES
from bough.weights.mapped import MappedFile

if TYPE_CHECKING:
    import torch

MAX_KEY_BYTES = 1024
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_STRING_BYTES = 64 << 20
MAX_ARRAY = 1 << 23
MAX_DIMS = 4

_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    number: np.dtype(code)
    for number, code in {
        0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
    }.items()
}  # fmt: skip

#: A metadata value; arrays of strings are lists, all other arrays numpy arrays.
Value = int | float | bool | str | list[str] | npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. ``shape`` is row-major, as torch has it; ``start`` and ``nbytes`` are file positions."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    start: int
    nbytes: int


class _Cursor:
    """A position in the file that never passes its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, nbytes: int) -> int:
        """Step over ``nbytes`` and return where they begin."""
        start = self.at
        if nbytes > len(self.data) - start:
            raise ValueError(f"{nbytes} bytes are announced at byte {start}, {len(self.data) - start} are left")
        self.at = start + nbytes
        return start

    def u32(self) -> int:
        value: int = struct.unpack_from("<I", self.data, self.take(4))[0]
        return value

    def u64(self) -> int:
        value: int = struct.unpack_from("<Q", self.data, self.take(8))[0]
        return value

    def string(self, most: int = MAX_STRING_BYTES) -> str:
        length = self.u64()
        if length > most:
            raise ValueError(f"a string of {length} bytes at byte {self.at}; at most {most} are allowed")
        start = self.take(length)
        return self.data[start : start + length].decode()

    def strings(self, count: int) -> list[str]:
        """``count`` strings. The loop of :meth:`string`, spelt out: vocabularies have hundreds of thousands."""
        data, end, at = self.data, len(self.data), self.at
        unpack = struct.Struct("<Q").unpack_from
        out: list[str] = []
        for _ in range(count):
            if end - at < 8:
                raise ValueError(f"the file ends within an array of {count} strings")
            start = at + 8
            at = start + unpack(data, at)[0]
            if at > end:
                raise ValueError(f"a string at byte {start} passes the end of the file")
            out.append(data[start:at].decode())
        self.at = at
        return out

    def value(self) -> Value:
        kind = self.u32()
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        dtype = _scalar(kind)
        value: Value = np.frombuffer(self.data, dtype, 1, self.take(dtype.itemsize))[0].item()
        return value

    def _array(self) -> Value:
        kind, count = self.u32(), self.u64()
        if count > MAX_ARRAY:
            raise ValueError(f"an array of {count} elements; at most {MAX_ARRAY} are allowed")
        if kind == _STRING:
            return self.strings(count)
        dtype = _scalar(kind)
        return np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize)).copy()


def _scalar(kind: int) -> np.dtype[Any]:
    dtype = _SCALARS.get(kind)
    if dtype is None:
        raise ValueError("arrays of arrays are not supported" if kind == _ARRAY else f"unknown value type {kind}")
    return dtype


class GgufFile:
    """An open GGUF file.

    Attributes:
        metadata: key -> value, in the file's order.
        tensors: tensor name -> where it lies, in the file's order.
    """

    def __init__(self, path: Path) -> None:
        """Map ``path`` and read everything but the tensors' bytes; ConfigError if it is not a sound GGUF file."""
        self.path = path
        self._file = MappedFile(path)
        try:
            cursor = _Cursor(self._file.data)
            n_tensors, n_pairs = _header(cursor)
            self.metadata = _metadata(cursor, n_pairs)
            self.tensors = _tensors(cursor, n_tensors, self.metadata.get("general.alignment", 32))
            _refuse_overlap(self.tensors)
        except (ValueError, OverflowError) as error:
            self._file.close()
            raise ConfigError(f"{path} is not a usable GGUF file: {error}") from error

    def part(self, name: str, index: int | slice | None = None) -> TensorInfo:
        """Where a tensor lies, or the ``index``-th of what its first dimension counts, or some of these."""
        info = self.tensors[name]
        if index is None:
            return info
        nbytes = info.nbytes // info.shape[0]
        if isinstance(index, int):
            return replace(info, shape=info.shape[1:], start=info.start + index * nbytes, nbytes=nbytes)
        count = index.stop - index.start
        shape = (count, *info.shape[1:])
        return replace(info, shape=shape, start=info.start + index.start * nbytes, nbytes=count * nbytes)

    def tensor(self, name: str, dtype: torch.dtype, index: int | slice | None = None) -> torch.Tensor:
        """A new tensor of ``dtype`` with the decoded values of :meth:`part`."""
        import torch  # slow, and not needed by those who only read the metadata

        info = self.part(name, index)
        out = torch.empty(info.shape, dtype=dtype)
        decode_into(out, self._file.view(info.start, info.nbytes), info.format)
        self._file.forget(info.start, info.nbytes)
        return out

    def rows(self, name: str, index: int | slice | None = None) -> torch.Tensor:
        """A copy of the bytes of :meth:`part`, of two dimensions: uint8 [rows, bytes of a row]."""
        info = self.part(name, index)
        return self._file.read(info.start, info.nbytes).view(info.shape[0], -1)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _header(cursor: _Cursor) -> tuple[int, int]:
    """(number of tensors, number of metadata pairs)."""
    start = cursor.take(4)
    if cursor.data[start : start + 4] != b"GGUF":
        raise ValueError("it does not begin with 'GGUF'")
    version = cursor.u32()
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        raise ValueError("it is big-endian" if swapped in (2, 3) else f"version {version}; versions 2 and 3 are known")
    n_tensors, n_pairs = cursor.u64(), cursor.u64()
    if n_tensors > MAX_TENSORS or n_pairs > MAX_PAIRS:
        raise ValueError(f"it announces {n_tensors} tensors and {n_pairs} metadata pairs")
    return n_tensors, n_pairs


def _metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.string(MAX_KEY_BYTES)
        if key in metadata:
            raise ValueError(f"metadata key {key!r} appears twice")
        try:
            metadata[key] = cursor.value()
        except ValueError as error:
            raise ValueError(f"metadata key {key!r}: {error}") from error
    return metadata


def _tensors(cursor: _Cursor, count: int, alignment: Value) -> dict[str, TensorInfo]:
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise ValueError("general.alignment is not a power of two")
    table = [_table_entry(cursor) for _ in range(count)]
    data_start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, fmt, offset in table:
        if name in tensors:
            raise ValueError(f"tensor {name!r} appears twice")
        if offset % alignment:
            raise ValueError(f"tensor {name!r} is not aligned")
        values = 1
        for dim in shape:
            values *= dim
        if not values or shape[-1] % fmt.values:
            raise ValueError(f"tensor {name!r}: shape {list(shape)} does not suit type {fmt.name}")
        start, nbytes = data_start + offset, fmt.nbytes(values)
        if start + nbytes > len(cursor.data):
            raise ValueError(f"tensor {name!r} passes the end of the file; the file may be cut short")
        tensors[name] = TensorInfo(name, shape, fmt, start, nbytes)
    return tensors


def _table_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], BlockFormat, int]:
    name = cursor.string(MAX_KEY_BYTES)
    n_dims = cursor.u32()
    if not 1 <= n_dims <= MAX_DIMS:
        raise ValueError(f"tensor {name!r} has {n_dims} dimensions")
    shape = tuple(cursor.u64() for _ in range(n_dims))[::-1]
    kind = cursor.u32()
    fmt = FORMATS.get(kind)
    if fmt is None:
        known = ", ".join(f.name for f in FORMATS.values())
        raise ValueError(f"tensor {name!r} has type {OTHER_TYPES.get(kind, kind)}, which is not supported; use {known}")
    return name, shape, fmt, cursor.u64()


def _refuse_overlap(tensors: dict[str, TensorInfo]) -> None:
    end = 0
    for info in sorted(tensors.values(), key=lambda t: t.start):
        if info.start < end:
            raise ValueError(f"tensor {info.name!r} overlaps another one")
        end = info.start + info.nbytes
