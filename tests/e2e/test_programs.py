"""Programs through a real server: what is listed, ends, cancels, tenants, metrics, and the language's own calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import bough as sgl
from tests.tiny import make_tiny_model

from .serving import TINY, Server, running, wait_for

LONG, SHORT = 3000, 300
"""Tokens of answers: one that is not over before somebody can cancel it, and one that ends by itself."""
KEYS = """
[keys.one]
key = "first"
tenant = "one"
[keys.two]
key = "second"
tenant = "two"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_tiny_model(tmp_path_factory.mktemp("roomy"), context_length=2 * LONG)
    with running(str(model), "--served-name", "tiny", "--policy", "program", "--eviction", "program", *TINY) as it:
        yield it


def generate(http: httpx.Client, text: str, tokens: int = 4, **program: Any) -> httpx.Response:
    params = {"max_new_tokens": tokens, "ignore_eos": True}
    return http.post("/generate", json={"text": text, "sampling_params": params, "program": program})


def listed(http: httpx.Client, **query: Any) -> list[str]:
    return [entry["id"] for entry in http.get("/v1/programs", params=query).raise_for_status().json()["data"]]


def sample(http: httpx.Client, name: str) -> float:
    """The value of the one metric that begins with ``name``."""
    (line,) = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
    return float(line.rpartition(" ")[2])


def test_a_program_is_seen_until_it_ends(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        before = sample(http, 'bough_programs_ended_total{policy="program"}')
        prompt = "the cat sat on the mat and " * 4
        for node in ("plan", "act"):
            assert generate(http, prompt, id="seen/by id", node=node, budget=20).status_code == 200
        shown = http.get("/v1/programs/seen/by%20id").raise_for_status().json()
        assert (shown["object"], shown["status"], shown["node"]) == ("program", "idle", "act")
        assert (shown["calls"], shown["running"], shown["waiting"]) == (2, 0, 0)
        assert (shown["generated_tokens"], shown["budget"], shown["seated"]) == (8, 12, True)
        assert 0 < shown["cached_tokens"] < shown["prompt_tokens"] and shown["kept_tokens"] > 0
        assert 0 <= shown["idle"] <= shown["age"] and shown["pause"] >= 0
        ended = http.post("/v1/programs/seen/by%20id/end").raise_for_status().json()
        assert ended == {"id": "seen/by id", "object": "program", "status": "ended"}
        missing = http.get("/v1/programs/seen/by%20id")
        assert missing.status_code == 404 and "no program" in missing.json()["error"]["message"]
        assert http.post("/v1/programs/seen/by%20id/end").status_code == 404
        assert http.post("/v1/programs/never/cancel").status_code == 404
        assert sample(http, 'bough_programs_ended_total{policy="program"}') == before + 1
        assert sample(http, 'bough_program_completion_seconds_count{policy="program"}') >= 1
        assert "seen" not in http.get("/metrics").text, "ids are no labels"


def test_programs_are_listed_in_pages(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for i in range(3):
            generate(http, "x", id=f"page-{i}").raise_for_status()
        newest = [name for name in listed(http) if name.startswith("page")]
        assert newest == ["page-2", "page-1", "page-0"]
        assert listed(http, limit=1, after="page-2") == ["page-1"]
        assert http.get("/v1/programs", params={"limit": 0}).status_code == 400
        for name in newest:
            http.post(f"/v1/programs/{name}/end").raise_for_status()
        assert not [name for name in listed(http) if name.startswith("page")]


def test_a_program_is_cancelled_as_one(server: Server) -> None:
    """All its requests stop, running or waiting; nobody else's do."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    with httpx.Client(base_url=server.url, timeout=60) as http:
        streams = [
            client.completions.create(
                model="tiny", prompt=f"story {i}", max_tokens=LONG if i < 3 else SHORT, stream=True,
                extra_body={"ignore_eos": True, "program": {"id": "whole" if i < 3 else "other"}},
            )
            for i in range(4)
        ]  # fmt: skip
        first = [next(iter(stream)) for stream in streams]
        assert all(event.choices for event in first)
        answered = http.post("/v1/programs/whole/cancel").raise_for_status().json()
        assert answered["status"] == "cancelled"
        for stream in streams[:3]:
            with pytest.raises(openai.APIError, match="cancelled"):
                for _ in stream:
                    pass
        *_, last = streams[3]
        assert last.choices[0].finish_reason == "length"
        assert "whole" not in listed(http)
        http.post("/v1/programs/other/end").raise_for_status()


def test_ends_and_cancels_of_the_language_reach_the_server(server: Server) -> None:
    backend = sgl.RuntimeEndpoint(server.url)
    told: list[str] = []

    @sgl.function
    def twice(s: Any) -> None:
        told.append(s.stream_executor.program.id)
        s += "the cat" + sgl.gen("a", max_tokens=3) + " and" + sgl.gen("b", max_tokens=3)

    with httpx.Client(base_url=server.url, timeout=60) as http:
        ended = sample(http, 'bough_programs_ended_total{policy="program"}')
        assert isinstance(twice.run(backend=backend)["b"], str)
        wait_for(lambda: told[0] not in listed(http))
        assert sample(http, 'bough_programs_ended_total{policy="program"}') == ended + 1
    backend.shutdown()


def test_tenants_see_their_own_programs(tiny_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    with running(str(tiny_model), "--api-key-file", str(keys), *TINY) as server:
        one, two = (
            httpx.Client(base_url=server.url, timeout=60, headers={"authorization": f"Bearer {key}"})
            for key in ("first", "second")
        )
        with one, two:
            assert generate(one, "x", id="p").status_code == 200
            assert listed(one) == ["p"] and listed(two) == []
            assert two.get("/v1/programs/p").status_code == 404 == two.post("/v1/programs/p/cancel").status_code
            assert one.get("/v1/programs/p").json()["id"] == "p"
            assert httpx.get(f"{server.url}/v1/programs").status_code == 401


def test_answers_say_what_was_granted(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    messages: list[Any] = [{"role": "user", "content": "the cat sat on the mat"}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=3, prompt_cache_key="k", extra_body={"program": {"id": "told"}}
    )
    assert answer.usage is not None and answer.model_extra is not None
    told = answer.model_extra["program"]
    assert (told["id"], told["generated"], told["budget"]) == ("told", answer.usage.completion_tokens, None)
    assert told["lease"] == {"answer": "granted", "tokens": answer.usage.prompt_tokens, "seconds": 300.0}
    headers = {"x-bough-program": "told"}
    *_, last = client.completions.create(model="tiny", prompt="x", max_tokens=3, stream=True, extra_headers=headers)
    assert last.model_extra is not None and last.model_extra["program"]["generated"] > 0
    plain = client.chat.completions.create(model="tiny", messages=messages, max_tokens=3)
    assert "program" not in (plain.model_extra or {})


def test_a_breakpoint_is_leased_and_what_follows_is_not(server: Server) -> None:
    kept = [{"type": "text", "text": "a long text " * 20, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    body = {
        "model": "tiny", "max_tokens": 2,
        "messages": [{"role": "user", "content": kept}, {"role": "assistant", "content": "yes"},
                     {"role": "user", "content": "a question that is asked once " * 10}],
    }  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=60) as http:
        before = sample(http, "bough_leased_tokens")
        usage = http.post("/v1/messages", json=body).raise_for_status().json()["usage"]
        prompt = usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0)
        grown = sample(http, "bough_leased_tokens") - before
        assert 100 < grown < prompt - 100
