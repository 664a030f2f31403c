"""The backends that speak other APIs, against bough's server through the real clients, and what they send."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import bough as sgl
from bough.lang.backends.base import BaseBackend
from bough.lang.backends.crusoe import CRUSOE_BASE_URL
from bough.lang.errors import BackendError
from bough.lang.http import HttpClient
from bough.lang.model_template import model_template
from bough.lang.templates import chat_template_registry, get_chat_template
from bough.lang.waiting import Signal
from tests.e2e.serving import TINY, Server, running

from .stub import serving


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with running(str(tiny_model), "--served-name", "tiny", *TINY) as server:
        yield server


@sgl.function
def chat(s: Any, question: str) -> None:
    s += sgl.system("be brief") + sgl.user(question) + sgl.assistant(sgl.gen("a", max_tokens=5))


def openai(server: Server, **options: Any) -> sgl.OpenAI:
    return sgl.OpenAI("tiny", base_url=server.url + "/v1", api_key="none", **options)


def test_openai_select_and_dtype(server: Server) -> None:
    """A server of bough is not asked by the tokens of another tokenizer."""

    @sgl.function
    def sky(s: Any) -> None:
        s += "The sky is" + sgl.select("colour", [" blue", " bluegreen", " red"])
        s += " and has this many clouds: " + sgl.gen("n", dtype=int, max_tokens=4)

    backend = openai(server, is_chat_model=False)
    state = sky.run(backend=backend, temperature=0)
    assert state["colour"] in (" blue", " bluegreen", " red") and int(state["n"]) is not None
    assert sorted(state.get_meta_info("colour")["scores"]) == [0, 0, 1]
    backend.shutdown()


def test_openai_chat(server: Server) -> None:
    backend = openai(server)
    state = chat.run("the cat", backend=backend, temperature=0)
    assert state["a"] and backend.token_usage.completion_tokens <= 5
    assert "".join(chat.run("the cat", backend=backend, temperature=0, stream=True).text_iter("a")) == state["a"]
    batch = chat.run_batch([{"question": str(i)} for i in range(4)], backend=backend, temperature=0)
    assert all(isinstance(s["a"], str) for s in batch)

    @sgl.function
    def several(s: Any) -> None:
        s += sgl.user("x") + sgl.assistant(sgl.gen("a", max_tokens=2, n=2))

    assert len(several.run(backend=backend)["a"]) == 2

    @sgl.function
    def typed(s: Any) -> None:
        s += sgl.user("x") + sgl.assistant(sgl.gen("a", max_tokens=60, type=list[bool]))

    reason = typed.run(backend=backend).get_meta_info("a")
    assert reason is None or reason["prompt_tokens"] > 0


def test_openai_chat_needs_the_beginning_of_an_answer(server: Server) -> None:
    @sgl.function
    def late(s: Any) -> None:
        s += sgl.user("x") + sgl.assistant("Well, " + sgl.gen("a"))

    with pytest.raises(sgl.ProgramError, match="must be right after sgl.assistant"):
        late.run(backend=openai(server))["a"]
    with pytest.raises(NotImplementedError):
        raise select_error(server)


def select_error(server: Server) -> BaseException:
    @sgl.function
    def choose(s: Any) -> None:
        s += sgl.user("x") + sgl.assistant(sgl.select("a", ["b", "c"]))

    error = choose.run(backend=openai(server)).error()
    assert error is not None
    return error


def test_openai_completions(server: Server) -> None:
    @sgl.function
    def complete(s: Any) -> None:
        s += "the cat sat" + sgl.gen("a", max_tokens=4) + "and" + sgl.gen("b", max_tokens=2, regex="[a-z]")

    backend = openai(server, is_chat_model=False)
    state = complete.run(backend=backend, temperature=0)
    assert state.text() == "the cat sat" + state["a"] + "and" + state["b"] and len(state["b"]) == 1
    assert "".join(complete.run(backend=backend, temperature=0, stream=True).text_iter("a")) == state["a"]


def test_a_server_of_bough_is_told_what_openai_has_no_words_for(server: Server) -> None:
    @sgl.function
    def asked(s: Any) -> None:
        s += sgl.user("x") + sgl.assistant(
            sgl.gen("a", max_tokens=9, top_k=1, min_p=0.5, ignore_eos=True, min_tokens=2)
        )
        s += sgl.user("y") + sgl.assistant(sgl.gen("b", regex="[0-9]{3}", stop_regex="x+", stop_token_ids=[1]))

    twice = [asked.run(backend=openai(server)) for _ in range(2)]
    assert twice[0]["a"] == twice[1]["a"] and twice[0].get_meta_info("a")["completion_tokens"] == 9
    assert twice[0]["b"].isdigit() and len(twice[0]["b"]) == 3


def test_openai_errors(server: Server) -> None:
    wrong = sgl.OpenAI("other", base_url=server.url + "/v1", api_key="none", max_retries=0)
    error = chat.run("x", backend=wrong).error()
    assert isinstance(error, BackendError) and error.status == 404 and not error.transient


def test_anthropic(server: Server) -> None:
    pytest.importorskip("anthropic")
    backend = sgl.Anthropic("tiny", base_url=server.url, api_key="none")
    state = chat.run("the cat", backend=backend, temperature=0)
    assert isinstance(state["a"], str) and state.messages()[0] == {"role": "system", "content": "be brief"}
    assert state.get_meta_info("a")["completion_tokens"] <= 5
    assert "".join(chat.run("the cat", backend=backend, temperature=0, stream=True).text_iter("a")) == state["a"]


@pytest.mark.filterwarnings("ignore")
def test_litellm(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network for prices
    pytest.importorskip("litellm")
    backend = sgl.LiteLLM("openai/tiny", api_key="none", base_url=server.url + "/v1")
    assert isinstance(chat.run("the cat", backend=backend, temperature=0)["a"], str)


def test_speculation_on_a_chat_model_is_one_call() -> None:
    backend = sgl.FakeBackend({"": "Name: Ada.\nAge: 36.\nrest"}, is_chat_model=True)

    @sgl.function(num_api_spec_tokens=32)
    def form(s: Any) -> None:
        s += sgl.user("who?")
        with s.assistant():
            s += "Name:" + sgl.gen("name", stop=".") + ".\nAge:" + sgl.gen("age", stop=".") + "."

    state = form.run(backend=backend)
    assert (state["name"], state["age"]) == (" Ada", " 36") and len(backend.calls) == 1
    assert backend.calls[0].params is not None and backend.calls[0].params.max_new_tokens == 32
    assert state.messages()[-1]["content"] == "Name: Ada.\nAge: 36."


def test_speculation_on_a_completion_model_reads_ahead() -> None:
    backend = sgl.FakeBackend({"": " Ada.\nAge: 36.\n"})

    @sgl.function(num_api_spec_tokens=32)
    def form(s: Any) -> None:
        s += "Name:" + sgl.gen("name", stop=".") + ".\nAge:" + sgl.gen("age", stop=".") + "."

    state = form.run(backend=backend)
    assert (state["name"], state["age"]) == (" Ada", " 36") and len(backend.calls) == 1


def test_reasoning_is_taken_apart() -> None:
    @sgl.function
    def think(s: Any, model: str) -> None:
        s += sgl.user("u")
        s += sgl.assistant(sgl.separate_reasoning(sgl.gen("a"), model_type=model))

    told = sgl.FakeBackend({"": "<think>\nhm\n</think>\n\nyes"})
    state = think.run("qwen3", backend=told)
    assert (state["a"], state["a_reasoning_content"]) == ("yes", "hm\n") and state.messages()[-1]["content"] == "yes"
    assert think.run("qwen3", backend=sgl.FakeBackend({"": "yes"}))["a_reasoning_content"] == ""
    begun = think.run("deepseek-r1", backend=sgl.FakeBackend({"": "hm</think>yes"}))
    assert (begun["a"], begun["a_reasoning_content"]) == ("yes", "hm")
    with pytest.raises(sgl.ProgramError, match="Unsupported model type"):
        think.run("other", backend=told)["a_reasoning_content"]


@pytest.mark.parametrize("name", ["chatml", "llama-3-instruct", "gemma-it", "llama-2-chat", "vicuna_v1.1", "qwen"])
def test_a_models_own_template_is_learned(name: str) -> None:
    """What is learned from renderings of whole conversations writes the same conversations piece by piece."""
    theirs = chat_template_registry[name]

    async def render(messages: list[dict[str, str]], answer: bool) -> str | None:
        if messages[0]["role"] != "system" and theirs.default_system_prompt:
            messages = [{"role": "system", "content": theirs.default_system_prompt}, *messages]
        return theirs.get_prompt(messages) + (theirs.get_prefix_and_suffix("assistant", messages)[0] if answer else "")

    learned = asyncio.run(model_template(render))
    assert learned is not None
    for roles in ("ua", "uaua", "sua", "suauau", "s"):
        messages = [
            {"role": {"u": "user", "a": "assistant", "s": "system"}[r], "content": f"text {i}"}
            for i, r in enumerate(roles)
        ]
        assert learned.get_prompt(messages) == asyncio.run(render(messages, False)), roles


def test_a_template_that_rewrites_the_past_is_left_alone() -> None:
    async def render(messages: list[dict[str, str]], answer: bool) -> str | None:
        last = len(messages) - 1
        return "".join(("[last]" if i == last else "[old]") + m["content"] for i, m in enumerate(messages))

    async def refuse(messages: list[dict[str, str]], answer: bool) -> str | None:
        return None

    assert asyncio.run(model_template(render)) is None
    assert asyncio.run(model_template(refuse)) is None


def test_the_client_survives_what_servers_do() -> None:
    async def main() -> None:
        with serving() as server:
            http = HttpClient(server.url, api_key="secret")
            body = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
            answers = await asyncio.gather(*(http.request("POST", "/generate", body) for _ in range(100)))
            assert len(answers) == 100
            assert {r[2] for r in server.taken()} == {"Bearer secret"}
            with pytest.raises(BackendError) as caught:
                await http.request("POST", "/nothing", {})
            assert caught.value.status == 404 and caught.value.args[0] == {"error": {"message": "Not Found"}}
            events = [e async for e in http.events("/generate", {**body, "stream": True})]
            assert events[-1]["text"] == answers[0]["text"]
            async with aclosing(http.events("/generate", {**body, "stream": True})) as left:
                await anext(left)
            await http.close()
        with pytest.raises(BackendError, match="no connection"):
            await http.request("GET", "/get_model_info")
        await http.close()

    asyncio.run(main())
    with pytest.raises(ValueError, match="not an http"):
        HttpClient("localhost:3000")


def test_credentials_and_broken_servers() -> None:
    async def main() -> None:
        with serving() as server:
            http = HttpClient(server.url.replace("//", "//me:pass%20word@"))
            await http.request("GET", "/get_model_info")
            [(_, _, said, _)] = server.taken()
            assert said == "Basic " + base64.b64encode(b"me:pass word").decode()
            await http.close()
            await http.request("GET", "/get_model_info")  # a closed client opens again
            await http.close()

        async def gibberish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\ntoo short")
            writer.close()

        async with await asyncio.start_server(gibberish, "127.0.0.1", 0) as broken:
            http = HttpClient(f"http://127.0.0.1:{broken.sockets[0].getsockname()[1]}")
            with pytest.raises(BackendError, match="broke off") as caught:
                await http.request("GET", "/get_model_info")
            assert caught.value.transient
            await http.close()

    asyncio.run(main())


def test_crusoe(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="CRUSOE_API_KEY"):
        sgl.Crusoe("tiny")
    monkeypatch.setenv("CRUSOE_API_KEY", "secret")
    assert str(sgl.Crusoe("tiny").client.base_url) == CRUSOE_BASE_URL
    backend = sgl.Crusoe("tiny", base_url=server.url + "/v1")
    assert backend.client.api_key == "secret"
    assert isinstance(chat.run("the cat", backend=backend, temperature=0)["a"], str)


async def _azure(request: web.Request) -> web.StreamResponse:
    """Azure's addresses and key, in front of a server that speaks OpenAI's API."""
    assert request.match_info["deployment"] == "tiny" and request.query["api-version"] == "2024-10-21"
    if request.headers.get("api-key") != "secret":
        return web.json_response({"error": {"code": "401", "message": "Access denied"}}, status=401)
    async with aiohttp.ClientSession() as session:
        async with session.post(request.app[UPSTREAM] + "/v1/chat/completions", json=await request.json()) as answer:
            return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")


UPSTREAM = web.AppKey("upstream", str)


def test_azure(server: Server) -> None:
    async def main() -> None:
        app = web.Application()
        app[UPSTREAM] = server.url
        app.router.add_post("/openai/deployments/{deployment}/chat/completions", _azure)
        async with TestServer(app) as azure:
            options = {"azure_endpoint": str(azure.make_url("")), "api_version": "2024-10-21", "max_retries": 0}
            backend = sgl.OpenAI("tiny", is_azure=True, api_key="secret", **options)
            state = await chat.arun("the cat", backend=backend, temperature=0)
            assert isinstance(state["a"], str) and backend.token_usage.completion_tokens > 0
            wrong = sgl.OpenAI("tiny", is_azure=True, api_key="wrong", **options)
            error = (await chat.arun("the cat", backend=wrong)).error()
            assert isinstance(error, BackendError) and error.status == 401

    asyncio.run(main())


def test_runtime(tiny_model: Path) -> None:
    with pytest.warns(UserWarning, match="'tp_size': one engine is one worker, of one device; it is left out"):
        runtime = sgl.Runtime(
            model_path=str(tiny_model), max_total_tokens=512, prefetch="off", tp_size=2, disable_radix_cache=True
        )  # fmt: skip
    try:
        assert runtime.pid is not None and runtime.endpoint.request("GET", "/health") is not None
        assert isinstance(chat.run("the cat", backend=runtime, temperature=0)["a"], str)
        params = {"temperature": 0, "max_new_tokens": 4}
        whole = json.loads(runtime.generate("the cat", params))["text"]

        async def streamed() -> str:
            return "".join([text async for text in runtime.async_generate("the cat", params)])

        assert asyncio.run(streamed()) == whole
        info = asyncio.run(runtime.get_server_info())
        config = info["config"]
        assert info["model"]["path"] == runtime.endpoint.get_model_name()
        assert (config["kv"]["pool_tokens"], config["kv"]["cache"], config["schedule"]["prefetch"]) == (
            512,
            "none",
            "off",
        )
    finally:
        runtime.shutdown()
    runtime.shutdown()
    assert runtime.pid is None
    with pytest.raises(RuntimeError, match="Initialization failed"):
        sgl.Runtime(model_path=str(tiny_model / "nothing"))


def test_a_backend_that_only_generates() -> None:
    class Minimal(BaseBackend):
        def generate(self, s: Any, sampling_params: Any) -> Any:
            return "yes", {}

    @sgl.function
    def choose(s: Any) -> None:
        s += "x" + sgl.gen("a") + sgl.select("b", ["c", "d"])

    state = choose.run(backend=Minimal())
    assert state["a"] == "yes" and Minimal().get_model_name() == ""
    error = state.error()
    assert isinstance(error, NotImplementedError) and str(error) == "Minimal does not select"


def test_envelopes_reach_servers_that_read_them() -> None:
    class Told(sgl.FakeBackend):
        async def agenerate(self, s: Any, sampling_params: Any) -> Any:
            told.append(s.envelope())
            return await super().agenerate(s, sampling_params)

    told: list[dict[str, Any]] = []

    @sgl.function(limits=sgl.Limits(tokens=100, seconds=60))
    def program(s: Any) -> None:
        s += "x" + sgl.gen("a")
        forks = s.fork(2)
        forks += "y" + sgl.gen("f") + sgl.gen("g")
        forks.join()

    state = program.run(backend=Told())
    first, *branches = told
    assert len({t["id"] for t in told}) == 1 and len({t["node"] for t in told}) == 5
    assert "parent" not in first and "fork" not in first and first["budget"] == 100 and 0 < first["deadline"] <= 60
    heads = [t for t in branches if "fork" in t]
    assert len(heads) == 2 and len({t["fork"] for t in heads}) == 1
    assert all(t["width"] == 2 and t["parent"] == first["node"] for t in heads)
    assert {t["parent"] for t in branches if "fork" not in t} == {t["node"] for t in heads}
    assert json.dumps(told) and state.error() is None


def test_what_is_known_to_follow_is_declared() -> None:
    """Where the body is over, the queue holds all calls that will come."""

    class Told(sgl.FakeBackend):
        async def agenerate(self, s: Any, sampling_params: Any) -> Any:
            await over.reached()
            told.append(s.envelope())
            return await super().agenerate(s, sampling_params)

    told: list[dict[str, Any]] = []
    over = Signal()

    @sgl.function
    def program(s: Any) -> None:
        s += "x" + sgl.gen("a") + "y" + sgl.gen("b") + sgl.select("c", ["d"]) + sgl.gen("e")

    state = program.run(backend=Told())
    over.set()
    state.sync()
    assert [t["next_uses"] for t in told] == [3, 2, 0]


@pytest.mark.parametrize("answer", ["7", "never"])
def test_what_may_be_asked_again_is_not_the_last(answer: str) -> None:
    """The program ends once, and no call is told that none follows while one may."""

    class Told(sgl.FakeBackend):
        async def agenerate(self, s: Any, sampling_params: Any) -> Any:
            await over.reached()
            told.append(s.envelope())
            if len(told) == 1:
                raise BackendError("later", 503, retry_after=0)
            return await super().agenerate(s, sampling_params)

        def end_program(self, s: Any) -> None:
            told.append({"id": s.program.id, "ended": True})

    told: list[dict[str, Any]] = []
    over = Signal()

    @sgl.function
    def program(s: Any) -> None:
        s += "x" + sgl.gen("a", type=int, reask=2)

    state = program.run(backend=Told({"x": ["bad", answer]}))
    over.set()
    assert (state.error() is None) == (answer == "7")
    calls, ended = told[:-1], told[-1]
    assert len({t["id"] for t in told}) == 1 and ended["ended"] and not any("end" in t or "ended" in t for t in calls)
    last = {} if answer == "7" else {"next_uses": 0}  # the last of all attempts is known to be that
    assert [t.get("next_uses") for t in calls] == [None] * (len(calls) - 1) + [last.get("next_uses")]


def test_steps_of_a_tool_loop_are_not_the_last_call() -> None:
    class Told(sgl.FakeBackend):
        async def agenerate(self, s: Any, sampling_params: Any) -> Any:
            await over.reached()
            told.append(s.envelope().get("next_uses"))
            return await super().agenerate(s, sampling_params)

    def double(n: int) -> int:
        return 2 * n

    told: list[int | None] = []
    over = Signal()

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("?") + sgl.act("a", [double], max_steps=2, type=int) + sgl.user("more") + sgl.gen("b")

    step, said = '{"tool": "double", "arguments": {"n": 2}}', '{"tool": "answer", "arguments": {"answer": 4}}'
    state = program.run(backend=Told({"ASSISTANT:$": [step, step, said]}))
    over.set()
    assert (state["a"], state.error()) == (4, None)
    assert told == [None, None, 1, 0]


def test_named_templates() -> None:
    assert get_chat_template("llama-2-chat").get_prompt(
        [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    ) == "[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST]"  # fmt: skip
    assert len(chat_template_registry) == 27
