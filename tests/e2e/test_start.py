"""What cannot be served says so at once, in its last line; and the commands that a person types."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .serving import SERVE, TINY, environment, running

BOUGH = (sys.executable, "-m", "bough.cli.main")
SECONDS = 20.0


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be broken."""
    return shutil.copytree(tiny_model, tmp_path / "broken")


def fails(tmp_path: Path, *arguments: str) -> str:
    """The last line of ``bough serve``, which has to fail in time and to leave nothing behind."""
    runtime = tmp_path / "run"
    runtime.mkdir()
    result = subprocess.run(
        [*SERVE, "--port", "0", *arguments], env=environment(runtime), capture_output=True, text=True, timeout=SECONDS
    )
    assert result.returncode not in (0, None)
    assert "Traceback" not in result.stderr, result.stderr
    assert not list(runtime.iterdir())
    assert "serves" not in result.stdout
    return result.stderr.splitlines()[-1]


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", ')


def unknown_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))


def mistyped(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": "two"}))


def truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def too_few_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def bad_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def bad_template(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{% for %}"}))


BREAKAGES: tuple[tuple[Callable[[Path], None], str], ...] = (
    (no_config, "config.json"), (no_json, "config.json"), (unknown_type, "nonesuch"), (mistyped, "num_hidden_layers"),
    (truncated, "model.safetensors"), (no_weights, "safetensors"), (too_few_layers, "layers.2"),
    (no_tokenizer, "tokenizer"), (bad_tokenizer, "tokenizer.json"), (bad_template, "template"),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("ruin", "cause"), BREAKAGES, ids=lambda v: getattr(v, "__name__", ""))
def test_broken_folders(folder: Path, tmp_path: Path, ruin: Callable[[Path], None], cause: str) -> None:
    ruin(folder)
    last = fails(tmp_path, str(folder))
    assert last.startswith("bough: the engine cannot start: ") and cause in last, last


def test_nothing_is_imported_from_the_model_folder(folder: Path) -> None:
    for module in ("msgspec", "asyncio", "bough", "torch"):
        (folder / f"{module}.py").write_text("raise SystemExit('code of the model folder runs')")
    command = (sys.executable, "-P", "-m", "bough.cli.main", "serve")  # as the script `bough` starts it
    with running(".", *TINY, command=command, cwd=folder) as server:
        assert server.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}).status_code == 200


def test_nonesuch(tmp_path: Path) -> None:
    last = fails(tmp_path, str(tmp_path / "nothing"))
    assert "nothing" in last and "no file or folder" in last


def test_port_taken(tiny_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        last = fails(tmp_path, str(tiny_model), "--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}" in last and "--port" in last


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "cause"), [
    (("--context-length", "100000"), "context length must be in [2, 256]"),
    (("--pool-tokens", "8"), "pool"),
    (("--page-size", "0"), "page size"),
    (("--step-tokens", "4", "--max-running", "8"), "step of 4 tokens"),
    (("--memory-share", "2"), "memory share"),
    (("--grace", "inf"), "grace"),
    (("--threads", "0"), "threads"),
    (("--max-running", "-3"), "max_running"),
    (("--step-tokens", "0"), "step_tokens"),
    (("--context-length", "0"), "context_length"),
    (("--request-timeout", "-1"), "request timeout"),
    (("--stall-timeout", "nan"), "stall timeout"),
    (("--max-wait", "-1"), "longest wait"),
    (("--port", "70000"), "port"),
    (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
])  # fmt: skip
def test_flags_that_cannot_work(tiny_model: Path, tmp_path: Path, flags: tuple[str, ...], cause: str) -> None:
    last = fails(tmp_path, str(tiny_model), *flags)
    assert cause in last, last


def test_generate(tiny_model: Path, tmp_path: Path) -> None:
    def text() -> str:
        result = subprocess.run(
            [*BOUGH, "generate", "the cat", str(tiny_model), "--max-tokens", "20"],
            env=environment(tmp_path), capture_output=True, timeout=SECONDS,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result.stdout.decode()

    assert len(text()) > 5


def test_chat_in_a_terminal(tiny_model: Path, tmp_path: Path) -> None:
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [*BOUGH, "chat", str(tiny_model), "--max-tokens", "12"],
        env={**environment(tmp_path), "TERM": "dumb"}, stdin=terminal, stdout=terminal, stderr=terminal,
        start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    seen = b""

    def until(expected: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + SECONDS
        while expected not in seen:
            assert select.select([main], [], [], max(0.0, deadline - time.monotonic()))[0], seen
            seen += os.read(main, 4096)
        seen = seen.partition(expected)[2]

    try:
        until(b"> ")
        os.write(main, b"the cat\n")
        until(b"0 cached; first text")
        until(b"> ")
        os.write(main, b"the dog\n")
        until(b" prompt tokens, ")
        assert not seen.startswith(b"0 cached")
        until(b"> ")
        os.write(main, b"/exit\n")
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)


def test_doctor(tmp_path: Path) -> None:
    result = subprocess.run(
        [*BOUGH, "doctor"], env=environment(tmp_path), capture_output=True, text=True, timeout=SECONDS
    )
    assert result.returncode == 0 and "findings are fine" in result.stdout
