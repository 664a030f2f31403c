"""Reading safetensors equals the ``safetensors`` package; what is unsound is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from bough.base.errors import ConfigError
from bough.device.layers import context
from bough.weights.loader import each_tensor, open_checkpoint
from bough.weights.safetensors import DTYPES, SafetensorsFile
from tests.driving import make_driver
from tests.models.convert import write
from tests.models.parity import WHOLE, Case, ids_of, make_checkpoint


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a": torch.randint(0, 2, (3, 5)).to(dtype),
        "scalar": torch.ones((), dtype=dtype),
        "empty": torch.empty(0, 4, dtype=dtype),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    for name, expected in tensors.items():
        got = file.tensor(name)
        assert got.dtype == dtype and got.shape == expected.shape
        assert torch.equal(got.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))
        wanted = torch.float32 if dtype.is_floating_point else dtype
        assert torch.equal(file.tensor(name, torch.float32), expected.to(wanted))


def test_tensors_outlive_the_file_and_are_writable(tmp_path: Path) -> None:
    save_file({"a": torch.arange(10.0)}, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    tensor = file.tensor("a")
    file.close()
    tensor += 1
    assert torch.equal(tensor, torch.arange(1.0, 11.0))


def _shards(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {f"w{i}": torch.full((4,), float(i)) for i in range(6)}
    weight_map = {}
    for k in range(2):
        shard = f"model-{k + 1:05}-of-00002.safetensors"
        part = {name: value for i, (name, value) in enumerate(tensors.items()) if i % 2 == k}
        save_file(part, folder / shard)
        weight_map.update(dict.fromkeys(part, shard))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return tensors


def test_shards(tmp_path: Path) -> None:
    expected = _shards(tmp_path)
    got = dict(each_tensor(open_checkpoint(tmp_path), torch.bfloat16))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name].to(torch.bfloat16)) for name in expected)


def test_a_whole_file_comes_before_shards(tmp_path: Path) -> None:
    """As in transformers: an index beside it is one that was forgotten."""
    whole = {"w0": torch.full((2, 3), 7.0)}
    _shards(tmp_path)
    save_file(whole, tmp_path / "model.safetensors")
    got = dict(each_tensor(open_checkpoint(tmp_path), torch.float32))
    assert got.keys() == whole.keys() and torch.equal(got["w0"], whole["w0"])


def test_bad_indexes(tmp_path: Path) -> None:
    _shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]
    for weight_map, message in [
        (good | {"w0": "../secret.safetensors"}, "not a file of the folder"),
        (good | {"w0": "model.bin"}, "not a file of the folder"),
        (good | {"w9": good["w0"]}, "does not hold it"),
        (good | {"w0": "absent.safetensors"}, "1 of 3 shards are missing"),
        ([], "no weight_map"),
    ]:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ConfigError, match=message):
            open_checkpoint(tmp_path)


def _raw(path: Path, header: Any, data: bytes = b"\0" * 32) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def _one(shape: Any, offsets: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (_one([8], [0, 33]), "disagree"),
        (_one([9], [0, 36]), "pass the end"),
        (_one([1 << 61, 1 << 61], [0, 32]), "disagree"),
        (_one([8], [-32, 0]), "bad offsets"),
        (_one([True], [0, 4]), "bad shape"),
        (_one([8.0], [0, 32]), "bad shape"),
        (_one([8], [32, 0]), "disagree"),
        (_one([1] * 9, [0, 4]), "bad shape"),
        (_one("8", [0, 32]), "bad shape"),
        (_one([8], [0, 32], "Q9"), "unsupported dtype 'Q9'"),
        ({"a": 5}, "not described"),
        (_one([8], [0, 32]) | {"b": _one([2], [24, 32])["a"]}, "overlaps"),
        ([], "not an object"),
        (b"{", "Expecting"),
        (b'{"a": 1, "a": 2}', "appears twice"),
        (b'{"a": ' + b"[" * 100000, "nested too deeply"),
        (b"\xff\xfe", "codec"),
    ],
)
def test_bad_headers(tmp_path: Path, header: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SafetensorsFile(_raw(tmp_path / "x.safetensors", header))


def test_short_files_and_huge_headers(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for content in (b"", b"1234", (1 << 60).to_bytes(8, "little") + b"{}", (100).to_bytes(8, "little") + b"{}"):
        path.write_bytes(content)
        with pytest.raises(ConfigError):
            SafetensorsFile(path)


def test_folders_without_sound_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="Give a folder"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="pickles and can run code"):
        open_checkpoint(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    assert open_checkpoint(tmp_path).names() == ["a"]
    save_file({"a": torch.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(ConfigError, match=r"no model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="neither a model folder nor"):
        open_checkpoint(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("config", "theta", "scaling"),
    [
        ({}, None, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, None),
        ({"rope_theta": 3.0, "rope_scaling": {"type": "yarn", "factor": 2}}, 3.0, {"rope_type": "yarn", "factor": 2}),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 9.0, "factor": 8.0}},
            9.0,
            {"rope_type": "llama3", "factor": 8.0},
        ),
    ],
)
def test_rope_is_spelt_one_way(tmp_path: Path, config: Any, theta: float | None, scaling: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"lm_head.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path).config
    assert (found.get("rope_theta"), found.get("rope_scaling")) == (theta, scaling)
    assert not found.keys() & {"tie_word_embeddings", "rope_parameters"}


def _output(code: str, *arguments: Path) -> str:
    """What Python prints, in a process that gives freed pieces back: by itself the C library keeps some or none,
    at times a tenth of such weights."""
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    return run.stdout


_PEAK = """
import sys, torch
from pathlib import Path
from bough.weights.loader import each_tensor, open_checkpoint
torch.set_num_threads(1)
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
checkpoint = open_checkpoint(Path(sys.argv[1]))
checkpoint.tensor("tiny", torch.bfloat16)
before = status("VmRSS")
weights = dict(each_tensor(checkpoint, torch.bfloat16))
print(sum(w.nbytes for w in weights.values()) >> 10, status("VmHWM") - before)
"""


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_loading_peaks_near_the_weights(tmp_path: Path, stored: torch.dtype) -> None:
    tensors = {f"w{i}": torch.zeros(1 << 21, dtype=stored) for i in range(32)}
    save_file(tensors | {"tiny": torch.zeros(4, dtype=stored)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    weights, peak = map(int, _output(_PEAK, tmp_path).split())
    assert weights >= 128 << 10 and peak < 1.1 * weights + (8 << 10)


_PEAK_OF_A_MODEL = """
import sys, torch
from pathlib import Path
from bough.device.layers.context import LayerContext
from bough.models.registry import model_class
from bough.weights.loader import open_checkpoint
from tests.driving import device_parts
torch.set_num_threads(1)
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
def load(path):
    checkpoint = open_checkpoint(Path(path))
    ops, *parts = device_parts("auto", torch.bfloat16)
    context = LayerContext(checkpoint, ops, *parts)
    with torch.inference_mode():
        model = model_class("llama")(checkpoint.config, context, 1 << 20, 129)
    # What is held a second time, for few rows, is meant to be.
    return model, ops.compact.n_bytes // 1024 if ops.name == "cpu" else 0
load(sys.argv[1])
before = status("VmRSS")
model, second = load(sys.argv[2])
print(status("VmHWM") - before - second)
"""


@pytest.mark.parametrize("tied", [True, False])
def test_a_large_vocabulary_is_not_in_memory_twice(tmp_path: Path, tied: bool) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    make_checkpoint(Case("llama"), small)
    make_checkpoint(Case("llama", {"vocab_size": 1 << 17, "hidden_size": 256, "tie_word_embeddings": tied}), large)
    weights = (large / "model.safetensors").stat().st_size / 2 / 1024  # float32 in the file
    assert weights > 64 << 10 and int(_output(_PEAK_OF_A_MODEL, small, large)) < 1.1 * weights + (4 << 10)


@pytest.mark.parametrize(
    ("kernels", "quantize", "stored"),
    [("reference", "none", "folder"), ("auto", "none", "folder"), ("auto", "int8", "folder"), ("auto", "auto", "Q8_0"),
     ("reference", "auto", "Q8_0")],
)  # fmt: skip
def test_a_vocabulary_in_pieces_gives_the_same_bits(
    kernels: str, quantize: str, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(Case("llama"), tmp_path)
    path = tmp_path if stored == "folder" else tmp_path / "m.gguf"
    if stored != "folder":
        write(tmp_path, path, gguf.GGMLQuantizationType[stored])
    found = []
    for piece in (1 << 20, 32):
        monkeypatch.setattr(context, "PIECE", piece)
        driver = make_driver(path, kernels=kernels, dtype=torch.bfloat16, quantize=quantize)
        seq = driver.add(0, ids_of(1, 20), WHOLE)
        driver.run([seq], 3)
        found.append((seq.ids, seq.logprobs, seq.prompt_logprobs))
    assert found[0] == found[1]
