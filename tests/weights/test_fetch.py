"""Names of models become files; the hub is one of our own, and nothing but loopback is contacted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bough.base.errors import ConfigError
from bough.weights.fetch import resolve

# Every connection that is not to the loopback address ends the process.
_SCRIPT = """
import json, os, socket, sys
def guard(event, args):
    if event == "socket.connect" and args[0].family in (socket.AF_INET, socket.AF_INET6):
        if args[1][0] not in ("127.0.0.1", "::1"):
            os._exit(77)
    if event == "socket.getaddrinfo" and args[0] not in ("127.0.0.1", "localhost"):
        os._exit(78)
sys.addaudithook(guard)
from bough.base.errors import ConfigError
from bough.weights.fetch import resolve
for name in json.loads(sys.argv[1]):
    try:
        path = resolve(*name)
        files = sorted(p.name for p in path.iterdir()) if path.is_dir() else [path.name]
        print(json.dumps({"path": str(path), "files": files}))
    except ConfigError as error:
        print(json.dumps({"error": error.message}))
"""

NO_HUB = "http://127.0.0.1:1"


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """``ask(endpoint, (model, revision), ..., offline=False)``: resolve in a process whose hub cache is the test's."""

    def run(endpoint: str, *names: tuple[str, str | None], offline: bool = False) -> list[dict[str, Any]]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
        kept = {k: v for k, v in kept.items() if not k.lower().endswith("_proxy")}
        env = kept | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": str(int(offline))}
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, json.dumps(names)], env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def _files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_folder_of_the_hub_then_offline(hub: Any, ask: Any, llama_folder: Path) -> None:
    pickle, code, copy = "pytorch_model.bin", "modeling.py", "consolidated.safetensors"
    unwanted = (pickle, code, copy, "onnx/model.safetensors", "original/x.json")
    hub.repos["me/tiny"] = _files(llama_folder) | {"tokenizer.json": b"{}"} | dict.fromkeys(unwanted, b"x")
    (first,) = ask(hub.url, ("me/tiny", None))
    assert first["files"] == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    folder = Path(first["path"])
    assert (folder / "model.safetensors").read_bytes() == (llama_folder / "model.safetensors").read_bytes()
    asked = len(hub.log)
    assert not any(name in line for line in hub.log for name in unwanted)
    assert ask(hub.url, ("me/tiny", None), offline=True) == [first]
    assert len(hub.log) == asked
    # A hub that has gone away is no obstacle either.
    assert ask(NO_HUB, ("me/tiny", None)) == [first]
    (absent,) = ask(NO_HUB, ("me/other", None), offline=True)
    assert "HF_HUB_OFFLINE is set" in absent["error"] and "unset it" in absent["error"]


def test_gguf_of_the_hub(hub: Any, ask: Any) -> None:
    hub.repos["me/quants"] = {"config.json": b"{}", "m.Q4_0.gguf": b"four", "m-q8_0.gguf": b"eight"}
    hub.repos["me/odd"] = {"a.IQ1_S.gguf": b"1", "b.IQ2_S.gguf": b"2"}
    names = [("me/quants", None), ("me/quants:m.Q4_0.gguf", None), ("me/quants:no.gguf", None), ("me/odd", None)]
    best, named, missing, unclear = ask(hub.url, *names)
    assert best["files"] == ["m-q8_0.gguf"] and named["files"] == ["m.Q4_0.gguf"]
    assert Path(best["path"]).read_bytes() == b"eight" and Path(named["path"]).read_bytes() == b"four"
    assert "no file 'no.gguf'" in missing["error"]
    assert "2 GGUF files; name one, such as me/odd:a.IQ1_S.gguf" in unclear["error"]
    assert ask(NO_HUB, names[0], names[1], offline=True) == [best, named]


def test_what_the_hub_refuses(hub: Any, ask: Any, llama_folder: Path) -> None:
    hub.repos["me/gated"] = _files(llama_folder)
    hub.gated.append("me/gated")
    hub.repos["me/pickles"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    hub.repos["me/nothing"] = {"README.md": b"x"}
    hub.repos["me/bare"] = {"model.safetensors": b"x"}
    gated, pickles, nothing, bare, unknown, revision = ask(
        hub.url, ("me/gated", None), ("me/pickles", None), ("me/nothing", None), ("me/bare", None),
        ("me/unknown", None), ("me/nothing", "v9"),
    )  # fmt: skip
    assert "accept its terms" in gated["error"]
    assert "save_pretrained" in pickles["error"]
    assert "no weights that can be served" in nothing["error"]
    assert "no config.json" in bare["error"]
    assert "the hub has no model me/unknown" in unknown["error"]
    assert "no revision 'v9'" in revision["error"]
    assert not any("pytorch_model" in line for line in hub.log)


def test_no_hub_at_all(ask: Any) -> None:
    (answer,) = ask(NO_HUB, ("me/tiny", None))
    assert "cannot be used" in answer["error"] and NO_HUB in answer["error"]


def test_paths_are_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").touch()
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize("name", ["/no/such/folder", "./gone", "models/gone.gguf", "bare-name", "a/b/c", "a b/c", ""])
def test_names_that_are_neither(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no file or folder"):
        resolve(name)
