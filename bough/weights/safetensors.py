"""Reading safetensors files: one file or a folder of shards, every number checked against the file.

The format: a little-endian 64-bit header length, a JSON object (name -> dtype, shape, data_offsets), the
bytes of the tensors. The check is our own because a weights file is untrusted; reading is our own
because it copies each tensor once, straight into its final dtype, and gives the file's pages back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bough.base.errors import ConfigError
from bough.weights.mapped import MappedFile

MAX_HEADER_BYTES = 16 << 20
MAX_JSON_BYTES = 64 << 20
MAX_DIMS = 8

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

# Values converted at a time when the requested dtype is not the stored one.
PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies; ``start`` and ``nbytes`` are file positions."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_json(path: Path, most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file; ConfigError if it is missing, too large, or not an object."""
    try:
        if path.stat().st_size > most:
            raise ValueError(f"it is larger than {most} bytes")
        return _json_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _json_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object; ValueError for anything else, also for names that appear twice and absurd nesting."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise ValueError("a name appears twice in one JSON object")
        return found

    try:
        value = json.loads(data.decode(), object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("the JSON is not an object")
    return value


class SafetensorsFile:
    """One open safetensors file; ``tensors`` maps names, in the header's order, to where they lie."""

    def __init__(self, path: Path) -> None:
        """Map ``path`` and check its header; ConfigError if it is not a sound safetensors file."""
        self.path = path
        self._file = MappedFile(path)
        try:
            self.tensors = _read_header(self._file)
        except ValueError as error:
            self._file.close()
            raise ConfigError(f"{path} is not a usable safetensors file: {error}") from error

    def tensor(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> torch.Tensor:
        """A new tensor, or some rows of it; floating values are converted to ``dtype``, or stay as they are stored."""
        stored = self.tensors[name]
        if rows is not None:
            count, size = rows.stop - rows.start, stored.nbytes // stored.shape[0]
            stored = StoredTensor(
                stored.dtype, (count, *stored.shape[1:]), stored.start + rows.start * size, count * size
            )
        wanted = dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
        if wanted == stored.dtype:
            return self._file.read(stored.start, stored.nbytes).view(wanted).view(stored.shape)
        out = torch.empty(stored.shape, dtype=wanted)
        if out.numel():
            self._convert_into(out.view(-1), stored)
        return out

    def _convert_into(self, out: torch.Tensor, stored: StoredTensor) -> None:
        raw = self._file.view(stored.start, stored.nbytes)
        step = PIECE * stored.dtype.itemsize
        for first in range(0, stored.nbytes, step):
            piece = torch.from_numpy(raw[first : first + step].copy()).view(stored.dtype)
            begin = first // stored.dtype.itemsize
            out[begin : begin + piece.numel()].copy_(piece)
        self._file.forget(stored.start, stored.nbytes)

    def close(self) -> None:
        self._file.close()


def _read_header(file: MappedFile) -> dict[str, StoredTensor]:
    size = len(file.data)
    if size < 8:
        raise ValueError("it is shorter than its header")
    length = int.from_bytes(file.data[:8], "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {size}; the file may be cut short")
    header = _json_object(file.data[8 : 8 + length])
    tensors = {name: _entry(name, value, 8 + length, size) for name, value in header.items() if name != "__metadata__"}
    end = 0
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if stored.start < end:
            raise ValueError(f"tensor {name!r} overlaps another one")
        end = stored.start + stored.nbytes
    return tensors


def _entry(name: str, value: Any, data_start: int, size: int) -> StoredTensor:
    if not isinstance(value, dict):
        raise ValueError(f"tensor {name!r} is not described by an object")
    dtype = DTYPES.get(str(value.get("dtype")))
    if dtype is None:
        raise ValueError(f"tensor {name!r} has the unsupported dtype {value.get('dtype')!r:.40}")
    shape, offsets = _counts(value.get("shape")), _counts(value.get("data_offsets"))
    if shape is None or offsets is None or len(shape) > MAX_DIMS or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has a bad shape or bad offsets")
    nbytes = dtype.itemsize
    for dim in shape:
        nbytes *= dim
    begin, end = offsets
    if end - begin != nbytes or data_start + end > size:
        raise ValueError(f"tensor {name!r}: shape, dtype and offsets disagree or pass the end of the file")
    return StoredTensor(dtype, tuple(shape), data_start + begin, nbytes)


def _counts(values: Any) -> list[int] | None:
    """``values`` if it is a list of integers that are not negative, else None."""
    sound = isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in values)
    return values if sound else None


def open_folder(folder: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> the open file that holds it, for ``model.safetensors``, an index or a lone file, in this order.

    ConfigError if a shard is missing, the index lies, or there is nothing but formats that can run code.
    """
    path, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not path.is_file():
        if index.is_file():
            return _open_shards(folder, read_json(index).get("weight_map"))
        path = _lone_file(folder)
    file = SafetensorsFile(path)
    return dict.fromkeys(file.tensors, file)


def _open_shards(folder: Path, weight_map: Any) -> dict[str, SafetensorsFile]:
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{folder}: the safetensors index has no weight_map")
    shards = list(dict.fromkeys(map(str, weight_map.values())))
    for shard in shards:
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ConfigError(f"{folder}: the safetensors index names {shard!r}, which is not a file of the folder")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ConfigError(f"{folder}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:3])}")
    files: dict[str, SafetensorsFile] = {}
    try:
        for shard in shards:
            files[shard] = SafetensorsFile(folder / shard)
        for name, shard in weight_map.items():
            if name not in files[str(shard)].tensors:
                raise ConfigError(f"{folder}: the index places {name!r} in {shard}, which does not hold it")
    except ConfigError:
        for file in files.values():
            file.close()
        raise
    return {name: files[str(shard)] for name, shard in weight_map.items()}


def _lone_file(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{folder} has {len(found)} safetensors files but no model.safetensors.index.json")
    raise ConfigError(f"{folder} has no safetensors weights. {refusal(sorted(p.name for p in folder.iterdir()))}")


def refusal(names: list[str]) -> str:
    """What to tell someone whose model has these files, but neither safetensors nor GGUF."""
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in names):
        return (
            "It has only .bin or .pt weights, which are pickles and can run code, so they are never loaded. "
            "Convert them once where you trust them: AutoModelForCausalLM.from_pretrained(model)"
            ".save_pretrained(folder) of the transformers package writes safetensors."
        )
    return "Give a folder with config.json and *.safetensors, or a .gguf file."
