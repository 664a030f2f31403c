"""Programs through a real server: what is listed, ends, cancels, tenants, metrics, and the language's own calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import bough as sgl
from bough.lang import waiting
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


def generate(http: httpx.Client, text: str | list[str], tokens: int = 4, **program: Any) -> httpx.Response:
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


def test_responses_say_what_was_granted(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    envelope: dict[str, Any] = {"program": {"id": "answers", "budget": 9}, "ignore_eos": True}
    asked: dict[str, Any] = {"model": "tiny", "input": "x", "max_output_tokens": 16, "extra_body": envelope}
    first = client.responses.create(**asked, stream=True)
    events: list[Any] = list(first)
    granted = events[-1].response.program
    assert (granted["id"], granted["generated"], granted["budget"]) == ("answers", 9, 0)
    envelope["program"] = {"id": "more", "end": True}
    second: Any = client.responses.create(**asked)
    assert second.program["generated"] == 16


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


@contextmanager
def unread(server: Server, name: str) -> Iterator[tuple[httpx.Client, Future[httpx.Response]]]:
    """The first request of the program ``name`` is being tokenised, with texts that take long."""
    with httpx.Client(base_url=server.url, timeout=60) as http, ThreadPoolExecutor(1) as pool:
        texts = ["the cat sat on the mat and " * 150 + str(i) for i in range(250)]
        coming = pool.submit(generate, http, texts, tokens=1, id=name)

        def seen() -> bool:
            return coming.done() or http.get(f"/v1/programs/{name}").status_code == 200

        wait_for(seen)
        assert not coming.done()
        shown = http.get(f"/v1/programs/{name}").raise_for_status().json()
        assert (shown["status"], shown["calls"], shown["prompt_tokens"]) == ("active", 1, 0)
        assert listed(http, limit=1) == [name]
        yield http, coming


def test_a_program_is_ended_while_its_first_request_is_tokenised(server: Server) -> None:
    with unread(server, "ending") as (http, coming):
        ended = sample(http, 'bough_programs_ended_total{policy="program"}')
        assert http.post("/v1/programs/ending/end").raise_for_status().json()["status"] == "ended"
        assert coming.result().status_code == 200
        assert "ending" not in listed(http)
        assert sample(http, 'bough_programs_ended_total{policy="program"}') == ended + 1


def test_a_program_is_ended_whose_first_request_is_refused(server: Server) -> None:
    with unread(server, "refused") as (http, coming), ThreadPoolExecutor(1) as pool:
        end = pool.submit(http.post, "/v1/programs/refused/end")
        http.post("/v1/programs/refused/cancel").raise_for_status()
        assert end.result().raise_for_status().json()["status"] == "ended"
        assert coming.result().status_code == 400
        assert "refused" not in listed(http)


def test_a_program_is_cancelled_while_its_first_request_is_tokenised(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.post("/v1/programs/early/cancel").status_code == 404
    with unread(server, "stopped") as (http, coming):
        assert http.post("/v1/programs/stopped/cancel").raise_for_status().json()["status"] == "cancelled"
        answered = coming.result()
        assert (answered.status_code, answered.json()["error"]["code"]) == (400, "program_cancelled")
        assert http.get("/v1/programs/stopped").status_code == 404
        late = generate(http, "hello", id="early")
        refused = late.json()["error"]
        assert (late.status_code, refused["param"], refused["code"]) == (400, "program.id", "program_cancelled")


def all_is_told(state: Any) -> None:
    """Wait until whatever the language says of a program that is over has been said."""
    state.sync()
    waiting.wait_for(waiting.settled(waiting.default_loop()), waiting.default_loop())


@pytest.mark.parametrize("kind", ["native", "openai"])
def test_ends_and_cancels_of_the_language_reach_the_server(server: Server, kind: str) -> None:
    backend: Any = sgl.RuntimeEndpoint(server.url)
    if kind == "openai":
        backend = sgl.OpenAI("tiny", is_chat_model=False, base_url=f"{server.url}/v1", api_key="none")
    told: list[str] = []

    @sgl.function
    def twice(s: Any) -> None:
        told.append(s.stream_executor.program.id)
        s += "the cat" + sgl.gen("a", max_tokens=3) + " and" + sgl.gen("b", max_tokens=3)

    with httpx.Client(base_url=server.url, timeout=60) as http:
        ended = sample(http, 'bough_programs_ended_total{policy="program"}')
        state = twice.run(backend=backend)
        assert isinstance(state["b"], str)
        all_is_told(state)
        assert told[0] not in listed(http)
        assert sample(http, 'bough_programs_ended_total{policy="program"}') == ended + 1
    backend.shutdown()


@sgl.function
def long_answers(s: Any, n: int) -> None:
    s += sgl.user("the cat") + sgl.assistant(sgl.gen("a", max_tokens=LONG, ignore_eos=True, n=n))


@pytest.mark.parametrize(
    ("kind", "n", "begun"),
    [
        *(("endpoint", n, begun) for n in (1, 2) for begun in (True, False)),
        ("chat", 2, True),
        ("chat", 1, False),
        ("completions", 1, True),
    ],
)
def test_a_call_that_is_cancelled_counts_what_the_server_generated(
    server: Server, kind: str, n: int, begun: bool
) -> None:
    backend: Any = sgl.RuntimeEndpoint(server.url)
    if kind != "endpoint":
        url = f"{server.url}/v1"
        backend = sgl.OpenAI("tiny", is_chat_model=kind == "chat", base_url=url, api_key="none")
    before = server.quiet()["generated_tokens"]
    state = long_answers.run(n, backend=backend)
    if begun:
        wait_for(lambda: server.stats()["generated_tokens"] > before)
    state.cancel()
    state.sync()
    cost = state.report().total
    assert cost.generated == cost.wasted == server.quiet()["generated_tokens"] - before < n * LONG
    assert not begun or (cost.generated > 0 and cost.computed > 0 and state.report().calls[0].error)
    backend.shutdown()


def test_a_report_counts_all_that_the_server_computed(server: Server) -> None:
    """What is computed before the choices of a select or the branches of a fork, too."""

    @sgl.function
    def choose(s: Any) -> None:
        s += "the dog saw a bird in the tree and then " * 8 + sgl.select("c", ["sat", "ran", "slept on"])
        s += sgl.gen("a", max_tokens=2)
        forks = s.fork(3)
        forks += sgl.gen("b", max_tokens=3)
        forks.join()

    names = [f"bough_programs_{name}_tokens_total" for name in ("prompt", "cached")]
    with httpx.Client(base_url=server.url, timeout=60) as http:
        before = [sample(http, name) for name in names]
        state = choose.run(backend=sgl.RuntimeEndpoint(server.url))
        all_is_told(state)
        prompt, cached = (sample(http, name) - n for name, n in zip(names, before))
    total = state.report().total
    assert (total.computed, total.reused) == (prompt - cached, cached)


def test_what_only_scores_leaves_the_budget_alone(server: Server) -> None:
    @sgl.function(limits=sgl.Limits(tokens=6))
    def choose(s: Any) -> None:
        s += "the cat" + sgl.select("c", ["sat", "ran", "slept", "ate", "saw", "hid", "fled"])
        s += sgl.gen("a", max_tokens=5, ignore_eos=True)

    state = choose.run(backend=sgl.RuntimeEndpoint(server.url))
    assert state.get_meta_info("a")["completion_tokens"] == 5
    body = {"text": "the cat", "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    answer = httpx.post(f"{server.url}/generate", json=body | {"program": {"id": "scorer", "budget": 5}}, timeout=60)
    told = answer.raise_for_status().json()["meta_info"]
    assert len(told["output_token_logprobs"]) == 1 and (told["completion_tokens"], told["program"]["budget"]) == (0, 5)


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
    body = {"model": "tiny", "messages": messages, "stream": False, "options": {"num_predict": 3}}
    ollama = httpx.post(f"{server.url}/api/chat", json=body, headers=headers, timeout=60).raise_for_status().json()
    assert ollama["program"]["generated"] > last.model_extra["program"]["generated"]
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
        answer = http.post("/v1/messages", json=body).raise_for_status().json()
        usage, lease = answer["usage"], answer["program"]["lease"]
        assert usage["cache_creation_input_tokens"] == lease["tokens"] - usage["cache_read_input_tokens"] > 100
        prompt = lease["tokens"] + usage["input_tokens"]
        grown = sample(http, "bough_leased_tokens") - before
        assert 100 < grown == lease["tokens"] < prompt - 100
        streamed = http.post("/v1/messages", json={**body, "stream": True}).raise_for_status().text
        delta = next(json.loads(line[6:]) for line in streamed.splitlines() if '"message_delta"' in line[6:])
        assert delta["delta"]["program"]["lease"]["tokens"] == lease["tokens"]
        assert delta["usage"]["cache_creation_input_tokens"] == 0 < delta["usage"]["cache_read_input_tokens"]


AFTER = "\nObservation: the tool has looked at every page and this is what it says about the cat. "


def two_calls(http: httpx.Client, name: str, path: str, wanted: int) -> tuple[int, int]:
    """(prompt tokens, cached ones) of the second of two calls with a gap between them, that goes on with AFTER.

    Waits in the gap until ``wanted`` tokens more than before were computed ahead.
    """
    metric = "bough_programs_prefetched_tokens_total"
    before = sample(http, metric)
    text = f"the dog {name} and the cat sat on the mat and "
    if path == "/generate":
        body: dict[str, Any] = {"text": text, "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}
        said = http.post(path, json={**body, "program": {"id": name, "after": AFTER}}).raise_for_status().json()["text"]
    else:
        body = {"model": "tiny", "prompt": text, "max_tokens": 6, "ignore_eos": True}
        answer = http.post(path, json={**body, "program": {"id": name, "after": AFTER}}).raise_for_status().json()
        said = answer["choices"][0]["text"]
        assert answer["usage"]["completion_tokens"] == 6 and answer["program"]["generated"] == 6
    wait_for(lambda: sample(http, metric) - before >= wanted)
    follow = {"text": text + said + AFTER + "yes", "sampling_params": {"max_new_tokens": 2}, "program": {"id": name}}
    meta = http.post("/generate", json=follow).raise_for_status().json()["meta_info"]
    return meta["prompt_tokens"], meta["cached_tokens"]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_what_follows_is_computed_in_the_gap(server: Server, path: str) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        used = sample(http, "bough_programs_used_tokens_total")
        n_prompt, cached = two_calls(http, "gap" + path, path, 20)
        assert n_prompt - cached < 8, "all but what was not announced"
        wait_for(lambda: sample(http, "bough_programs_used_tokens_total") - used >= 20)


def test_what_follows_can_be_ids_and_is_checked(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        body = {"input_ids": [5, 6, 7, 8], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        before = sample(http, "bough_programs_prefetched_tokens_total")
        said = http.post("/generate", json={**body, "program": {"id": "ids", "after": [9] * 20}}).json()["output_ids"]
        wait_for(lambda: sample(http, "bough_programs_prefetched_tokens_total") - before >= 20)
        body["input_ids"] = [5, 6, 7, 8, *said, *[9] * 20, 3]
        meta = http.post("/generate", json={**body, "program": {"id": "ids"}}).json()["meta_info"]
        assert meta["cached_tokens"] >= 27
        for program in ({"after": [1 << 30]}, {"after": "x", "end": True}, {"after": 7}, {"after": [-1]}):
            refused = http.post("/generate", json={**body, "program": {"id": "ids", **program}})
            assert refused.status_code == 400, program
        several = {**body, "sampling_params": {"n": 2}, "program": {"id": "ids", "after": "x"}}
        assert http.post("/generate", json=several).status_code == 400
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        answer = http.post("/v1/chat/completions", json={**chat, "program": {"id": "ids", "after": "x"}})
        assert answer.status_code == 400 and "template" in answer.json()["error"]["message"]


def test_the_language_says_what_follows(server: Server) -> None:
    backend = sgl.RuntimeEndpoint(server.url)

    @sgl.function
    def agent(s: Any, question: str, tool: Callable[[], str]) -> None:
        s += question + sgl.gen("call", max_tokens=6, ignore_eos=True)
        assert s["call"] is not None
        s += AFTER + tool()
        s += sgl.gen("answer", max_tokens=3, ignore_eos=True)

    with httpx.Client(base_url=server.url, timeout=60) as http:
        metric = "bough_programs_prefetched_tokens_total"
        before = sample(http, metric)

        def told() -> str:
            wait_for(lambda: sample(http, metric) > before)
            return "rain"

        for answer in ("sun", "snow"):
            agent.run("is it about the cat: ", lambda answer=answer: answer, backend=backend)["answer"]
        sgl.global_config.enable_prefetch = False
        agent.run("what is it about: ", lambda: "wind", backend=backend)["answer"]
        sgl.global_config.enable_prefetch = True
        assert sample(http, metric) == before, "nothing is told before it was seen twice, or where that is off"
        agent.run("and this one: ", told, backend=backend)["answer"]
        assert list(agent.habits._seen.values()) == [(AFTER, 4)]
    backend.shutdown()


def test_what_follows_is_not_computed_where_that_is_off(tiny_model: Path) -> None:
    with running(str(tiny_model), "--served-name", "tiny", "--prefetch", "off", *TINY) as off:
        with httpx.Client(base_url=off.url, timeout=60) as http:
            n_prompt, cached = two_calls(http, "off", "/generate", 0)
            assert n_prompt - cached > 20
            assert sample(http, "bough_programs_prefetched_tokens_total") == 0
