"""One view over both weight formats, in Hugging Face's names and conventions.

A checkpoint is opened without reading its tensors; each tensor is read, decoded and converted when it is
asked for, into memory of its own, so that loading peaks at the weights plus one tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from bough.base.errors import ConfigError
from bough.base.params import Pooling
from bough.device.ops.experts import HeldWeight
from bough.device.ops.packed import PackedWeight
from bough.device.quant.base import Blocks
from bough.device.quant.blocks import PACKERS
from bough.weights.gguf import GgufFile
from bough.weights.gguf_model import (
    Stored,
    config_of,
    describe,
    generation_config_of,
    join_heads,
    parameters_of,
    pooling_of,
    restore_rows,
    tokenizer_of,
)
from bough.weights.progress import watched
from bough.weights.quantized import KV_SCALES, Get, method_of
from bough.weights.safetensors import open_folder, read_json

T = TypeVar("T")
log = logging.getLogger(__name__)

_DEPTHS = "num_hidden_layers", "n_layer", "n_layers", "num_layers"
_SIZES = (
    "hidden_size", "intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "num_attention_heads",
    "shared_expert_intermediate_size", "num_key_value_heads", "head_dim", "kv_lora_rank", "q_lora_rank", "v_head_dim",
    "qk_rope_head_dim", "qk_nope_head_dim", "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts",
)  # fmt: skip
_MOST_LAYERS = 1 << 12
"""Of a model without parameters."""

#: A folder with tokenizer files, or the ``tokenizer.*`` metadata of a GGUF file as plain data.
TokenizerSource = Path | dict[str, Any]


class Checkpoint(Protocol):
    """An open model.

    Attributes:
        path: the file or folder.
        config: as in ``config.json``; where ``rope_scaling`` is present, it is None or a dict with ``rope_type``, and
            ``tie_word_embeddings`` is true where there is no head.
        generation_config: as in ``generation_config.json``, empty if there is none.
        tokenizer_source: what a tokenizer is built from.
        pooling: how embeddings are made of hidden states, where it tells.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_source: TokenizerSource
    pooling: Pooling | None

    def names(self) -> list[str]:
        """Parameter names, in the order in which they are best read."""

    def tensor(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> torch.Tensor:
        """A new contiguous tensor, or some ``rows`` of one that has a :meth:`shape`; ConfigError if there is none.

        ``dtype`` converts floating values. None keeps the stored dtype, float32 for block formats.
        """

    def blocks(self, name: str, rows: slice | None = None) -> Blocks | PackedWeight | HeldWeight | None:
        """The same of a quantised matrix without decoding it; None if it is none, ConfigError if it is missing."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """That of a parameter whose rows can be read apart; None for others."""

    def close(self) -> None:
        """Give the files back; tensors that were read stay valid."""


class GgufCheckpoint:
    """A GGUF file of a supported architecture."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        self._decoded: set[str] = set()
        try:
            meta, family = describe(self._file)
            self._stored = parameters_of(self._file, meta, family)
            self.config = config_of(self._file, meta, family)
            _check_sizes(path, self.config, [info.shape for info in self._file.tensors.values()])
            self.pooling = pooling_of(meta)
            self.generation_config = generation_config_of(meta, self.config["vocab_size"])
            self.tokenizer_source: TokenizerSource = tokenizer_of(self._file)
        except ConfigError:
            self._file.close()
            raise

    def names(self) -> list[str]:
        return list(self._stored)

    def tensor(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> torch.Tensor:
        stored = self._where(name)
        if stored.offset:
            weight = self._file.tensor(stored.tensor, torch.float32) - stored.offset
            return weight.to(dtype or torch.float32)
        weight = self._file.tensor(
            stored.tensor, dtype or torch.float32, rows if stored.expert is None else stored.expert
        )
        if stored.values is not None:
            return join_heads(weight, self._file.tensor(stored.values, weight.dtype))
        return restore_rows(weight, stored.heads) if stored.heads else weight

    def blocks(self, name: str, rows: slice | None = None) -> Blocks | None:
        stored = self._where(name)
        part = rows if stored.expert is None else stored.expert
        info = self._file.part(stored.tensor, part)
        if info.format.values == 1 or len(info.shape) != 2:
            return None
        if info.format.name not in PACKERS and info.format.name not in self._decoded:
            self._decoded.add(info.format.name)
            log.info("%s: weights in %s are decoded, as there is no kernel for it", self.path, info.format.name)
        found = self._file.rows(stored.tensor, part)
        return Blocks(info.format.name, restore_rows(found, stored.heads) if stored.heads else found, info.shape[1])

    def shape(self, name: str) -> tuple[int, ...] | None:
        stored = self._where(name)
        return self._file.tensors[stored.tensor].shape if stored == Stored(stored.tensor) else None

    def _where(self, name: str) -> Stored:
        if name not in self._stored:
            raise ConfigError(f"{self.path} has no parameter {name!r}")
        return self._stored[name]

    def close(self) -> None:
        self._file.close()


class FolderCheckpoint:
    """A Hugging Face folder: ``config.json``, safetensors, tokenizer files."""

    def __init__(self, path: Path, weights: bool = True) -> None:
        """Without ``weights`` it has no parameters, whatever there is."""
        self.path = path
        config = read_json(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else {}
        self._method = method_of(config)
        self._files = open_folder(path) if weights else {}
        self._names = self._plain_names()
        self._told = False
        headed = any(name.endswith("lm_head.weight") for name in self._files)
        self.config = _plain_config(config, not weights or headed)
        if weights:
            _check_sizes(path, self.config, [file.tensors[name].shape for name, file in self._files.items()])
        else:
            _check_depth(path, self.config, _MOST_LAYERS)
        self.tokenizer_source: TokenizerSource = path
        self.pooling = _pooling(path)

    def names(self) -> list[str]:
        return list(self._names)

    def tensor(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> torch.Tensor:
        stem = self._stem(name)
        if self._method is None or stem is None:
            return self._stored(name, dtype, rows)
        return self._read(stem, self._method.dense).to(dtype or torch.float32)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._files[name].tensors[name].shape if self._stem(name) is None else None

    def blocks(self, name: str, rows: slice | None = None) -> PackedWeight | HeldWeight | None:
        stem = self._stem(name)
        if self._method is None or stem is None:
            return None
        if self._method.floats is not None and (floats := self._read(stem, self._method.floats)) is not None:
            return floats
        packed = None if self._method.integers is None else self._read(stem, self._method.integers).packed()
        if packed is None and not self._told:
            self._told = True
            log.info("%s: %s weights are decoded, as there is no kernel for %s", self.path, self._method.name, name)
        return packed

    def _plain_names(self) -> dict[str, str | None]:
        """Names of the parameters, and of quantised ones what those of their tensors begin with."""
        if self._method is None:
            return dict.fromkeys(self._files)
        mark = self._method.mark
        stems = [name.removesuffix(mark) for name in self._files if name.endswith(f".{mark}")]
        parts = {f"{stem}{end}" for stem in stems for end in ("weight", mark, *self._method.others)}
        plain = [name for name in self._files if name not in parts and not name.endswith(KV_SCALES)]
        return {f"{stem}weight": stem for stem in stems} | dict.fromkeys(plain)

    def _read(self, stem: str, read: Callable[[Get], T]) -> T:
        try:
            return read(lambda end: self._stored(stem + end))
        except (RuntimeError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{self.path}: {stem}weight is not as its quantisation says: {error}") from error

    def _stem(self, name: str) -> str | None:
        if name not in self._names:
            raise ConfigError(f"{self.path} has no parameter {name!r}")
        return self._names[name]

    def _stored(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> torch.Tensor:
        if name not in self._files:
            raise ConfigError(f"{self.path} has no parameter {name!r}")
        return self._files[name].tensor(name, dtype, rows)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _pooling(folder: Path) -> Pooling | None:
    """What the folder's configuration for sentence-transformers says, if it has one.

    Raises ConfigError for a way that is not supported.
    """
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return None
    config = read_json(file)
    modes = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    known: dict[str, Pooling] = {
        "pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first",
    }  # fmt: skip
    if len(modes) != 1 or modes[0] not in known:
        raise ConfigError(f"{file}: of the ways of pooling only one is supported at a time, {' or '.join(known)}")
    return known[modes[0]]


def _check_sizes(path: Path, config: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]) -> None:
    """ConfigError for more layers than there are parameters, which have these ``shapes``, or a size that is in none of
    them, before anything of that many is made."""
    _check_depth(path, config, len(shapes))
    largest = max((dim for shape in shapes for dim in shape), default=0)
    _check(path, config, _SIZES, max(largest, len(shapes)))


def _check_depth(path: Path, config: Mapping[str, Any], most: int) -> None:
    _check(path, config, _DEPTHS, most)


def _check(path: Path, config: Mapping[str, Any], names: Sequence[str], most: int) -> None:
    for name in names:
        size = config.get(name)
        if isinstance(size, int | float) and size > most:
            raise ConfigError(f"{path}: the config's {name!r} is {size}; its parameters suffice for at most {most}")


def _plain_config(config: dict[str, Any], has_head: bool) -> dict[str, Any]:
    """``config`` in one spelling, whichever release of transformers wrote it.

    New files keep theta, scaling and how much of a head rotates together in ``rope_parameters``; old scalings say
    ``type``. Where they differ between the kinds of layers, ``rope_parameters`` stays. Models of more than text have a
    ``text_config``.
    """
    text = config.get("text_config")
    plain = {**config, **text, "model_type": config.get("model_type")} if isinstance(text, dict) else dict(config)
    together = plain.get("rope_parameters")
    if isinstance(together, dict) and not any(isinstance(value, dict) for value in together.values()):
        del plain["rope_parameters"]
    else:
        together = None
    scaling = plain.get("rope_scaling")
    if isinstance(together, dict):
        scaling = {key: value for key, value in together.items() if key != "rope_theta"}
        plain |= {key: together[key] for key in ("rope_theta", "partial_rotary_factor") if key in together}
    if isinstance(scaling, dict):
        scaling = {("rope_type" if key == "type" else key): value for key, value in scaling.items()}
        plain["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    else:  # the architecture's own
        plain.pop("rope_scaling", None)
    if not has_head:
        plain["tie_word_embeddings"] = True
    return plain


def open_checkpoint(path: Path, weights: bool = True) -> Checkpoint:
    """Open a GGUF file, or a folder with safetensors or with one GGUF file.

    Without ``weights`` a folder needs only a config and a tokenizer. Raises ConfigError if it is damaged, of an
    unsupported kind, or missing.
    """
    if not weights:
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} has no config.json, which random weights are made after")
        return FolderCheckpoint(path, weights=False)
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if any(path.glob("*.safetensors")) or not ggufs:
            return FolderCheckpoint(path)
        if len(ggufs) > 1:
            raise ConfigError(f"{path} has {len(ggufs)} GGUF files; name the one to serve")
        return GgufCheckpoint(ggufs[0])
    if path.suffix == ".gguf":
        return GgufCheckpoint(path)
    raise ConfigError(f"{path} is neither a model folder nor a .gguf file")


def stored_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the files that hold its parameters."""
    path = checkpoint.path
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def each_tensor(
    checkpoint: Checkpoint, dtype: torch.dtype | None = None, show: bool | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters, one at a time, with a progress bar on standard error.

    ``show`` None draws the bar only if standard error is a terminal; True and False decide it.
    """
    for name in watched(checkpoint.names(), "loading weights", "tensor", show):
        yield name, checkpoint.tensor(name, dtype)
