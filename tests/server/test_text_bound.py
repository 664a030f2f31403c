"""What one request may have tokenized at once, over all its texts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bough.base.limits import DEFAULT_LIMITS, Limits

from .scripted import EOS, PATIENCE, running_server

MOST = 1000
SIDE = "x" * 30


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with running_server(limits=Limits(text_chars=MOST), labels=("relevant",)) as server:
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as made:
            yield made


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/tokenize", {"prompt": "x" * (MOST + 1)}, "prompt"),
    ("/tokenize", {"prompt": [SIDE] * 34}, "prompt"),
    ("/tokenize", {"messages": ask("x" * MOST)}, "messages"),
    ("/tokenize", {"messages": ask(EOS * (MOST // len(EOS)))}, "messages"),
    ("/v1/messages/count_tokens", {"model": "scripted", "messages": ask("x" * MOST)}, "messages"),
    ("/v1/chat/completions", {"messages": ask(EOS + "x" * MOST)}, "messages"),
    ("/v1/rerank", {"query": SIDE, "documents": ["x"] * 33}, "query"),
    ("/v1/rerank", {"query": "x", "documents": ["x"] * 20, "instruction": "x" * 50}, "query"),
    ("/v1/rerank", {"query": SIDE, "documents": ["x"] * 33, "max_tokens_per_query": 1}, "query"),
    ("/v1/score", {"text_1": SIDE, "text_2": ["x"] * 33}, "text_1"),
])  # fmt: skip
def test_texts_are_bounded_together(client: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert f"{param}: texts of" in error["message"] and f"at most {MOST} are tokenized" in error["message"]


@pytest.mark.parametrize(("path", "body"), [
    ("/tokenize", {"prompt": [SIDE] * 33}),
    ("/tokenize", {"messages": ask("x" * (MOST - 100))}),
    ("/v1/rerank", {"query": SIDE, "documents": ["x"] * 32}),
    ("/v1/embeddings", {"input": [SIDE] * 34}),
    ("/v1/embeddings", {"input": [SIDE] * 34, "truncate_prompt_tokens": 5}),
])  # fmt: skip
def test_what_is_within_is_served(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    assert client.post(path, json=body).status_code == 200


MEASURED = """
import json, re, sys
import httpx
from pathlib import Path
from bough.base.limits import DEFAULT_LIMITS
from tests.server.scripted import EOS, PATIENCE, running_server

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

n = DEFAULT_LIMITS.text_chars - 64
text = "ab c" * (n // 4)
ask = [{"role": "user", "content": EOS + text}]
found = {}
with running_server(labels=("relevant",)) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
    start = peak()
    for path, body in (
        ("/tokenize", {"prompt": [text[: n // 4]] * 4}),
        ("/tokenize", {"prompt": [text]}),
        ("/v1/messages/count_tokens", {"model": "scripted", "messages": ask}),
        ("/v1/rerank", {"query": "ab c", "documents": [text[: n // 4 - 8]] * 4, "truncate_prompt_tokens": -1}),
    ):
        status = client.post(path, json=body).status_code
        found[f"{path} {len(found)}"] = (status, peak() - start)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_memory_of_the_largest_is_bounded() -> None:
    """Tokens of a character each: what takes most. The bytes are those of the whole process, httpx's among them."""
    run = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert all(status == 200 for status, _ in found.values()), found
    assert max(grown for _, grown in found.values()) < 400 * DEFAULT_LIMITS.text_chars, found
