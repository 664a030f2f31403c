"""What a tenant may have in flight at one time, and that the others notice nothing of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.base.errors import InvalidRequest
from bough.base.limits import Limits
from bough.server.errors import QuotaExceeded
from bough.server.quotas import Held, Quota

from .scripted import PATIENCE, Running, running_server, wait_for

KEYS = """
[keys.a]
key = "sk-a"
[keys.a2]
key = "sk-a2"
tenant = "a"
[keys.b]
key = "sk-b"
[keys.c]
key = "sk-c"
[keys.d]
key = "sk-d"
[tenants.a]
requests = 3
[tenants.b]
tokens = 1000
[tenants.c]
queue_share = 0.5
"""
ENDLESS: dict[str, Any] = {"prompt": "hello", "max_tokens": 600, "ignore_eos": True, "stream": True}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return path


@pytest.fixture
def server(path: Path, tmp_path: Path) -> Iterator[Running]:
    limits = Limits(queue_requests=8)
    with running_server(0.01, api_key_file=str(path), limits=limits, files=str(tmp_path / "files")) as running:
        yield running


def post(server: Running, key: str, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    headers = {"x-api-key": f"sk-{key}"}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=PATIENCE)


@contextmanager
def open_streams(server: Running, key: str, *bodies: dict[str, Any]) -> Iterator[None]:
    """Streams that have begun, until the block ends."""
    with httpx.Client(base_url=server.url, headers={"x-api-key": f"sk-{key}"}, timeout=PATIENCE) as client:
        with ExitStack() as stack:
            for body in bodies:
                answer = stack.enter_context(client.stream("POST", "/v1/completions", json=body))
                assert answer.status_code == 200
            yield
    wait_for(lambda: not server.client.running)


def refused(answer: httpx.Response) -> bool:
    error = answer.json()["error"]
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1 and error["type"] == "rate_limit_error"
    return bool(error["code"] == "quota_exceeded")


SHORT = {"prompt": "a", "max_tokens": 1}


def test_requests(server: Running) -> None:
    with open_streams(server, "a", {**ENDLESS, "n": 2}):
        assert post(server, "a", SHORT).status_code == 200
        assert refused(post(server, "a", {**SHORT, "n": 2}))
        assert refused(post(server, "a2", {**SHORT, "prompt": ["a", "b"]}))
        assert refused(post(server, "a", {"text": ["a", "b"]}, "/generate"))
        assert refused(post(server, "a", {"input": ["a", "b"]}, "/v1/embeddings"))
        chat: Any = {"messages": [{"role": "user", "content": "a"}], "n": 2}
        with (
            pytest.raises(openai.RateLimitError),
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-a2", max_retries=0) as client,
        ):
            client.chat.completions.create(model="scripted", **chat)
        assert post(server, "d", {**SHORT, "n": 5}).status_code == 200
    assert post(server, "a", {**SHORT, "n": 3}).status_code == 200
    never = post(server, "a", {**SHORT, "n": 4})
    assert never.status_code == 400 and never.json()["error"]["code"] == "quota_too_small"


def test_tokens(server: Running) -> None:
    """Of the prompt and of the longest answer, for each answer."""
    n = len("hello")
    with open_streams(server, "b", ENDLESS):
        assert post(server, "b", {**SHORT, "prompt": "hello", "max_tokens": 400 - 2 * n}).status_code == 200
        assert refused(post(server, "b", {**SHORT, "prompt": "hello", "max_tokens": 401 - 2 * n}))
        assert refused(post(server, "b", {**SHORT, "max_tokens": 201, "n": 2}))
        assert refused(post(server, "b", {"input": "x" * 396}, "/v1/embeddings"))
        assert post(server, "a", {**SHORT, "max_tokens": 4000}).status_code == 200
    assert post(server, "b", {**SHORT, "max_tokens": 999}).status_code == 200
    assert post(server, "b", {**SHORT, "max_tokens": 1000}).status_code == 400


def test_share_of_the_queue(server: Running) -> None:
    with open_streams(server, "c", {**ENDLESS, "n": 4}):
        assert refused(post(server, "c", SHORT))
        assert post(server, "d", {**SHORT, "n": 4}).status_code == 200


def test_requests_of_a_batch_wait(server: Running) -> None:
    lines = "".join(
        json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {**SHORT, "n": 2}}) + "\n"
        for i in range(3)
    )
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-a", timeout=PATIENCE) as client:
        with open_streams(server, "a", {**ENDLESS, "n": 2}):
            file = client.files.create(file=("x.jsonl", lines.encode()), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            rejected = server.service.metrics.rejected
            wait_for(lambda: next(iter(rejected.collect())).samples[0].value >= 3)
        wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
        counts = client.batches.retrieve(batch.id).request_counts
        assert counts is not None and (counts.completed, counts.failed) == (3, 0)


def test_quotas_are_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.server.auth.RELOAD_SECONDS", 0.0)
    with running_server(api_key_file=str(path)) as server:
        assert post(server, "a", {**SHORT, "n": 4}).status_code == 400
        path.write_text(KEYS.replace("requests = 3", "requests = 4"))
        os.utime(path, ns=(1, 1))
        assert post(server, "a", {**SHORT, "n": 4}).status_code == 200


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 60)), max_size=40), st.data())
def test_nobody_ever_holds_more_than_the_quota(wanted: list[tuple[int, int]], data: st.DataObject) -> None:
    quota, held, taken = Quota(4, 100, 0.5), Held(), []
    for sequences, tokens in wanted:
        try:
            held.check(quota, sequences, tokens, 10)
        except InvalidRequest:
            assert sequences > 4 or tokens > 100
            continue
        except QuotaExceeded:
            assert held.sequences + sequences > 4 or held.tokens + tokens > 100
            if taken:
                gone = taken.pop(data.draw(st.integers(0, len(taken) - 1)))
                held.sequences -= gone[0]
                held.tokens -= gone[1]
            continue
        taken.append((sequences, tokens))
        held.sequences += sequences
        held.tokens += tokens
        assert held.sequences == sum(s for s, _ in taken) <= 4 and held.tokens == sum(t for _, t in taken) <= 100
