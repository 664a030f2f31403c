"""``sglang.utils``: what scripts and notebooks use of it."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bough.lang.backends.runtime import end_process
from bough.lang.choices import mean_logprob
from bough.lang.media import encode_image_base64 as encode_image_base64
from bough.lang.media import encode_video_base64 as encode_video_base64
from bough.lang.state import ProgramState
from bough.lang.types import schema_of

compute_normalized_prompt_logprobs = mean_logprob


def read_jsonl(filename: str) -> Iterator[Any]:
    """The objects of a file with one JSON text a line; lines that begin with ``#`` are left out."""
    with open(filename) as file:
        for line in file:
            if not line.startswith("#"):
                yield json.loads(line)


def dump_state_text(filename: str, states: list[Any], mode: str = "w") -> None:
    """Write the texts of states, or texts, to a file, with a ruler between them."""
    with open(filename, mode) as file:
        for i, state in enumerate(states):
            text = state.text() if isinstance(state, ProgramState) else str(state)
            file.write(f"{'=' * 40} {i} {'=' * 40}\n{text}\n{'=' * 80}\n\n")


def download_and_cache_file(url: str, filename: str | None = None) -> str:
    """The path of a copy of ``url``, which is made the first time."""
    path = Path(filename or Path(tempfile.gettempdir()) / url.rpartition("/")[2])
    if not path.exists():
        part = path.with_name(path.name + ".part")
        with urllib.request.urlopen(url, timeout=600) as response, part.open("wb") as file:
            while data := response.read(1 << 20):
                file.write(data)
        part.rename(path)
    return str(path)


class HttpResponse:
    """An answer, whatever its status."""

    def __init__(self, status_code: int, content: bytes) -> None:
        self.status_code = status_code
        self.content = content

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        return json.loads(self.content)

    def iter_lines(self, **_: Any) -> Iterator[bytes]:
        yield from self.content.splitlines()


def http_request(
    url: str,
    json: Any = None,
    stream: bool = False,
    api_key: str | None = None,
    verify: str | None = None,
    method: str | None = None,
) -> HttpResponse:
    """One request; a POST where there is JSON to send."""
    import json as encoder
    import ssl

    headers = {"Content-Type": "application/json; charset=utf-8"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if json is None else encoder.dumps(json).encode()
    request = urllib.request.Request(url, data, headers, method=method or ("GET" if data is None else "POST"))
    context = ssl.create_default_context(cafile=verify) if verify else None
    try:
        with urllib.request.urlopen(request, context=context) as response:
            return HttpResponse(response.status, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return HttpResponse(error.code, error.read())


def print_highlight(html_content: str) -> None:
    """Show a line of a notebook."""
    sys.stdout.write(f"{html_content}\n")


def launch_server_cmd(
    command: str, host: str = "0.0.0.0", port: int | None = None
) -> tuple[subprocess.Popen[str], int]:
    """Start a server; (process, port). ``python -m sglang.launch_server`` starts bough's."""
    if port is None:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
    return subprocess.Popen(server_command(shlex.split(command.replace("\\\n", " ")), port), text=True), port


def server_command(words: list[str], port: int) -> list[str]:
    """The command line of ``bough serve`` for one of SGLang's; others as they are, with the port."""
    if "sglang.launch_server" not in words:
        return [*words, "--port", str(port)]
    arguments = words[words.index("sglang.launch_server") + 1 :]
    model = [arguments[i + 1] for i, word in enumerate(arguments) if word in ("--model-path", "--model")]
    host = [arguments[i + 1] for i, word in enumerate(arguments) if word == "--host"]
    command = [sys.executable, "-m", "bough.cli.main", "serve", *model, "--port", str(port)]
    return [*command, "--host", host[0]] if host else command


def terminate_process(process: subprocess.Popen[str]) -> None:
    """End a server that :func:`launch_server_cmd` started."""
    end_process(process)


def kill_process_tree(pid: int | None, *_: Any, **__: Any) -> None:
    """Ask a server to end; bough's takes its own processes with it."""
    if pid is not None:
        try:
            os.kill(pid, 15)
        except ProcessLookupError:
            pass


def wait_for_server(base_url: str, timeout: float | None = None, process: subprocess.Popen[str] | None = None) -> None:
    """Wait until a server lists its models. Raises RuntimeError where its process ended, TimeoutError after a while."""
    began = time.monotonic()
    while True:
        try:
            if http_request(base_url + "/v1/models", api_key="None").status_code == 200:
                return
        except OSError:
            pass
        if process is not None and (code := process.poll()) is not None:
            raise RuntimeError(f"Server process exited with code {code}")
        if timeout is not None and time.monotonic() - began > timeout:
            raise TimeoutError(f"Endpoint {base_url} did not become ready within timeout period")
        time.sleep(0.2)


def get_tokenizer(tokenizer_name: str, *_: Any, **__: Any) -> Any:
    """The tokenizer of ``transformers``."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_name)


def build_regex_from_object(given: Any, whitespace_pattern: str | None = None) -> str:
    """A regular expression for JSON objects of a Pydantic model, a type, or a schema (as a dict or JSON text)."""
    from bough.compat.sglang.schema_regex import regex_of

    schema = json.loads(given) if isinstance(given, str) else schema_of(given)
    return regex_of(schema, r"[ ]?" if whitespace_pattern is None else whitespace_pattern)
