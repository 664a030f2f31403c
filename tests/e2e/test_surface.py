"""What a stranger can reach, and what the processes do behind its back: one port, and no code from anywhere."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import openai

from .audited import PROOF
from .serving import TINY, Server, running

LISTEN = "0A"


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def listeners(server: Server) -> set[tuple[str, int]]:
    """(hexadecimal address, port) of everything TCP or UDP that any process of the run can be reached at."""
    ours = set().union(*(sockets_of(pid) for pid in (server.process.pid, *server.children.values())))
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in ours and (fields[3] == LISTEN or table.startswith("udp")):
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found


def test_nothing_listens_but_http(served: Server) -> None:
    assert listeners(served) == {("0100007F", served.port)}


def test_the_run_folder_is_private(served: Server) -> None:
    assert stat.S_IMODE(served.run_dir.stat().st_mode) == 0o700
    assert all(path.is_socket() for path in served.run_dir.iterdir())
    # Nothing of it can be seen from outside either: no abstract sockets.
    ours = set().union(*(sockets_of(pid) for pid in (served.process.pid, *served.children.values())))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in ours and len(fields) > 7:
            assert fields[7].startswith(str(served.run_dir)), line


def mixed_load(server: Server) -> None:
    """A little of everything that a client can ask for."""
    body = {"max_tokens": 8, "temperature": 0.8}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "{{ 7 * 7 }} {% for x in y %} __import__('os')"}]
        client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=2, max_tokens=8)
        list(client.chat.completions.create(model="tiny", messages=messages, stream=True, n=2, max_tokens=8))
    for more in (
        {"stop": ["abc"], "stop_regex": "a+b|c{2,3}"}, {"logit_bias": {"5": 3.0}, "bad_words": ["the cat"]},
        {"presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.2, "min_p": 0.1, "top_k": 5},
        {"prompt_logprobs": 2, "echo": True, "allowed_token_ids": [5, 6, 7]}, {"n": 3, "stream": True, "seed": 3},
    ):  # fmt: skip
        assert server.post("/v1/completions", {"prompt": "the cat sat", **body, **more}).status_code == 200, more
    for bad in ({"prompt": "a", "temperature": "x"}, {"prompt": [10**30]}, {"prompt": "a", "stop_regex": "(((("}):
        assert server.post("/v1/completions", bad).status_code == 400
    long = {"text": "the dog sat on the log and " * 500, "sampling_params": {"max_new_tokens": 4}}
    assert server.post("/generate", long).status_code == 200
    assert server.post("/v1/chat/completions", {"messages": messages, "tools": [{
        "type": "function", "function": {"name": "f", "parameters": {"type": "object", "pattern": "(a+)+"}},
    }], "max_tokens": 4}).status_code in (200, 400)  # fmt: skip
    server.post("/tokenize", {"messages": messages})
    server.post("/detokenize", {"tokens": [5, 6, 7]})
    server.post("/abort_request", {"abort_all": True})
    server.post("/flush_cache", None)
    for path in ("/metrics", "/server_info", "/readyz", "/health", "/openapi.json", "/v1/models", "/nothing"):
        server.get(path)


def test_no_code_is_loaded_or_run(long_model: Path, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "tests.e2e.audited", str(tmp_path))
    with running(str(long_model), "--served-name", "tiny", *TINY, command=command) as server:
        mixed_load(server)
        server.quiet()
    for name in ("engine", "api"):
        first, *events = (tmp_path / name).read_text().splitlines()
        assert first.startswith("compile ") and PROOF in first
        assert events == [], name
