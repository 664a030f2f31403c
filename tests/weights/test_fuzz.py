"""Damaged files: each one either loads or raises ConfigError, with memory in proportion to the file."""

from __future__ import annotations

import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.base.errors import ConfigError
from bough.weights.gguf import GgufFile
from bough.weights.gguf_families import FAMILIES
from bough.weights.loader import open_checkpoint
from tests.models.convert import ARCHITECTURES, write
from tests.models.parity import make_checkpoint
from tests.models.test_gguf import SAYABLE

# (kind of change, where as a fraction of 2**32, what)
Edit = tuple[str, int, int]

_EDGES = [1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
_NUMBERS = [0, 1, 2, 3, 4, 8, 9, 31, 32, 255, *_EDGES]

edits = st.lists(
    st.one_of(
        st.tuples(st.just("byte"), st.integers(0, (1 << 32) - 1), st.integers(0, 255)),
        st.tuples(st.just("u32"), st.integers(0, (1 << 32) - 1), st.sampled_from(_NUMBERS)),
        st.tuples(st.just("u64"), st.integers(0, (1 << 32) - 1), st.sampled_from(_NUMBERS)),
        st.tuples(st.just("cut"), st.integers(0, (1 << 32) - 1), st.integers(0, 64)),
        st.tuples(st.just("remove"), st.integers(0, (1 << 32) - 1), st.integers(1, 64)),
        st.tuples(st.just("double"), st.integers(0, (1 << 32) - 1), st.integers(1, 64)),
    ),
    min_size=1,
    max_size=4,
)


def damaged(content: bytes, changes: list[Edit], head: int) -> bytes:
    """``content`` after ``changes``, most of which fall into its first ``head`` bytes, where the structure is."""
    data = bytearray(content)
    for kind, where, what in changes:
        span = head if where % 8 else len(data)
        at = (where * max(1, min(span, len(data)))) >> 32
        if kind == "byte":
            data[at : at + 1] = bytes([what])
        elif kind == "u32":
            data[at : at + 4] = struct.pack("<I", what & 0xFFFFFFFF)
        elif kind == "u64":
            data[at : at + 8] = struct.pack("<Q", what)
        elif kind == "cut":
            del data[(where * max(1, len(data))) >> 32 :]
        elif kind == "remove":
            del data[at : at + what]
        else:
            data[at:at] = data[at : at + what]
    return bytes(data)


def read_everything(path: Path) -> bool:
    """Open and read all that can be read; True if nothing was wrong. Fails on any other error or a large allocation."""
    size = path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.iterdir())
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names():
            tensor = checkpoint.tensor(name, torch.float32)
            assert tensor.numel() <= 8 * size + 64
        checkpoint.close()
        return True
    except ConfigError:
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * size + (1 << 20)


def check_gguf(content: bytes, path: Path, changes: list[Edit]) -> None:
    path.write_bytes(damaged(content, changes, content.find(b"blk.1.")))
    read_everything(path)


def check_safetensors(content: bytes, folder: Path, changes: list[Edit]) -> None:
    (folder / "model.safetensors").write_bytes(damaged(content, changes, 2600))
    read_everything(folder)


def check_json(folder: Path, name: str, text: bytes, changes: list[Edit]) -> None:
    (folder / name).write_bytes(damaged(text, changes, len(text)))
    read_everything(folder)


@pytest.fixture(scope="module")
def gguf_path(write_gguf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    return write_gguf(path, quantise=gguf.GGMLQuantizationType.Q4_1)


@pytest.fixture(scope="module")
def folder(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("fuzz")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (copy / name).write_bytes((llama_folder / name).read_bytes())
    return copy


def run(check: Callable[[list[Edit]], None], examples: int) -> None:
    quick = settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    quick(given(edits)(check))()


QUICK_AND_LONG = [150, pytest.param(10_000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("examples", QUICK_AND_LONG)
def test_gguf(gguf_path: Path, tmp_path: Path, examples: int) -> None:
    content = gguf_path.read_bytes()
    assert read_everything(gguf_path)
    run(lambda changes: check_gguf(content, tmp_path / "m.gguf", changes), examples)


@pytest.fixture(scope="module", params=sorted(set(FAMILIES) - {"bert"}))
def family_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each architecture that generates."""
    folder = tmp_path_factory.mktemp("family")
    make_checkpoint(next(c for c in SAYABLE.values() if ARCHITECTURES[c.model_type] == request.param), folder)
    write(folder, folder / "m.gguf")
    return folder / "m.gguf"


@pytest.mark.parametrize("examples", [60, pytest.param(4000, marks=pytest.mark.slow)])
def test_gguf_of_every_family(family_path: Path, tmp_path: Path, examples: int) -> None:
    content = family_path.read_bytes()
    assert read_everything(family_path)
    run(lambda changes: check_gguf(content, tmp_path / "m.gguf", changes), examples)


SIZES = tuple(
    f".{name}".encode()
    for name in (
        "embedding_length", "feed_forward_length", "head_count", "head_count_kv", "key_length", "value_length",
        "expert_count", "expert_feed_forward_length", "q_lora_rank", "kv_lora_rank",
    )
)  # fmt: skip


UNUSED = (
    *(f"deepseek2.attention.{name}".encode() for name in ("head_count_kv", "key_length", "value_length")),
    b"gpt-oss.feed_forward_length",
)
"""All heads read one latent, and all layers have experts."""


def test_no_number_of_a_gguf_file_is_trusted(family_path: Path, tmp_path: Path) -> None:
    content, damage = family_path.read_bytes(), tmp_path / "m.gguf"
    with GgufFile(family_path) as file:
        keys = [key.encode() for key, value in file.metadata.items() if type(value) is int]
    for key in keys:
        at = content.index(key) + len(key)
        for number in (0, 1 << 20, (1 << 31) - 1, (1 << 32) - 1):
            damage.write_bytes(content[: at + 4] + struct.pack("<I", number) + content[at + 8 :])
            fits = read_everything(damage)
            assert not (fits and number and key.endswith(b".block_count"))
            assert not (fits and number and key.endswith(SIZES) and key not in UNUSED)


@pytest.mark.parametrize("layers", [10**6, 10**11, 1e30])
def test_no_number_of_layers_is_trusted(folder: Path, tmp_path: Path, layers: float) -> None:
    config = (folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(re.sub(r'("num_hidden_layers": )\d+', rf"\g<1>{layers}", config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    for weights in (True, False):
        with pytest.raises(ConfigError, match="num_hidden_layers"):
            open_checkpoint(tmp_path, weights)


@pytest.mark.parametrize("examples", QUICK_AND_LONG)
def test_safetensors(folder: Path, examples: int) -> None:
    content = (folder / "model.safetensors").read_bytes()
    assert read_everything(folder)
    run(lambda changes: check_safetensors(content, folder, changes), examples)
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_files(folder: Path, name: str) -> None:
    text = (folder / name).read_bytes()
    run(lambda changes: check_json(folder, name, text, changes), 80)
    (folder / name).write_bytes(text)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 3))
def test_arbitrary_bytes(tmp_path_factory: pytest.TempPathFactory, tail: bytes, heads: int) -> None:
    head = [b"", b"GGUF", b"GGUF\3\0\0\0", b"GGUF\3\0\0\0" + struct.pack("<QQ", 2, 2)][heads]
    path = tmp_path_factory.getbasetemp() / "arbitrary.gguf"
    path.write_bytes(head + tail)
    read_everything(path)
