"""The backends of other providers: what fails there and may pass, several answers, typed answers, and limits."""

from __future__ import annotations

import enum
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import pytest

import bough as sgl
from bough.lang.errors import BackendError
from bough.lang.http import retry_after
from bough.lang.types import Answer
from bough.lang.wrapping import WRAPPER_TOKENS

from .test_cut_streams import DONE, answering, chunk

GONE = 0
"""In the place of a status: the connection ends without an answer."""
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "input_tokens": 3, "output_tokens": 2}


class _Handler(BaseHTTPRequestHandler):
    """Both APIs; refuses with the statuses that it is given, one for each request, before it answers."""

    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_: Any) -> None: ...

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        status = self.server.refusals.pop() if self.server.refusals else 200
        text = json.dumps({"x": 1, "tool": "answer", "arguments": {"answer": "fine"}, **self.server.said})
        if status == GONE:
            self.close_connection = True
            return
        answer: dict[str, Any] = {"error": {"type": "busy", "message": "not now"}}
        headers = {} if status == 200 else self.server.headers
        if status == 200:
            answer = {
                "id": "x", "object": "chat.completion", "created": 1, "model": "m", "usage": USAGE, "type": "message",
                "role": "assistant", "content": [{"type": "text", "text": text}], "stop_reason": "end_turn",
                "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
            }  # fmt: skip
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def provider() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.asked, server.refusals, server.headers, server.said = [], [], {}, {}
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(params=["OpenAI", "Anthropic", "LiteLLM"])
def backend(request: pytest.FixtureRequest, provider: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "OpenAI":
        return sgl.OpenAI("m", base_url=provider.url, api_key="none")
    if request.param == "Anthropic":
        pytest.importorskip("anthropic")
        return sgl.Anthropic("m", base_url=provider.url, api_key="none")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network for prices
    pytest.importorskip("litellm")
    return sgl.LiteLLM("openai/m", base_url=provider.url, api_key="none")


@sgl.function(retry=sgl.Retry(attempts=3, delay=0.0))
def ask(s: Any, **options: Any) -> None:
    s += sgl.user("x") + sgl.assistant(sgl.gen("a", max_tokens=9, **options))


@pytest.mark.filterwarnings("ignore")
def test_what_may_pass_is_tried_again(provider: Any, backend: Any) -> None:
    provider.refusals = [503, 429]
    state = ask.run(backend=backend)
    assert state.error() is None and len(provider.asked) == 3
    assert state.report().calls[0].attempts == 3
    provider.refusals = [400]
    error = ask.run(backend=backend).error()
    assert isinstance(error, BackendError) and error.status == 400 and len(provider.asked) == 4
    provider.refusals = [GONE] * 3
    error = ask.run(backend=backend).error()
    assert isinstance(error, BackendError) and error.transient


@pytest.mark.filterwarnings("ignore")
def test_a_provider_says_when_to_come_again(provider: Any, backend: Any) -> None:
    patient = ask.options(retry=sgl.Retry(attempts=2, delay=3600.0))
    provider.refusals, provider.headers = [429], {"Retry-After": "0"}
    assert patient.run(backend=backend).error() is None and len(provider.asked) == 2
    provider.refusals, provider.headers = [429], {"Retry-After": "3600"}
    error = patient.options(limits=sgl.Limits(seconds=600)).run(backend=backend).error()
    assert isinstance(error, sgl.LimitExceeded) and "3600 s away" in str(error)
    assert isinstance(error.__cause__, BackendError) and len(provider.asked) == 3


def test_what_a_server_may_say_of_time() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=90))
    assert 80 < (retry_after({"retry-after": soon}) or 0) <= 90
    said: list[tuple[dict[str, str], float | None]] = [
        ({"retry-after": "2.5"}, 2.5),
        ({"retry-after": "-1"}, 0.0),
        ({"retry-after": "Sun, 06 Nov 1994 08:49:37 GMT"}, 0.0),
        ({"retry-after": "2", "retry-after-ms": "1500"}, 1.5),
        ({}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after-ms": "nan"}, None),
    ]
    for headers, seconds in said:
        assert retry_after(headers) == seconds


@pytest.mark.parametrize("backend", ["Anthropic", "LiteLLM"], indirect=True)
@pytest.mark.filterwarnings("ignore")
def test_several_answers_are_several_calls(provider: Any, backend: Any) -> None:
    state = ask.run(n=3, backend=backend)
    assert isinstance(state["a"], list) and len(state["a"]) == len(provider.asked) == 3
    assert [meta["completion_tokens"] for meta in state.get_meta_info("a")] == [2, 2, 2]
    assert state.report().calls[0].generated_tokens == 6


@dataclass
class Point:
    x: int


def schema_of(asked: dict[str, Any]) -> Any:
    if "output_config" in asked:
        return asked["output_config"]["format"]["schema"]
    return asked["response_format"]["json_schema"]["schema"]


@pytest.mark.filterwarnings("ignore")
def test_types_and_tools_are_sent_as_a_schema(provider: Any, backend: Any) -> None:
    def look(at: str) -> str:
        """Look."""
        return at

    @sgl.function
    def act(s: Any) -> None:
        s += sgl.user("x")
        s += sgl.act("a", [look])

    assert ask.run(type=Point, backend=backend)["a"] == Point(1)
    assert act.run(backend=backend)["a"] == "fine"
    typed, step = map(schema_of, provider.asked)
    assert "x" in json.dumps(typed) and "look" in json.dumps(step)


class Sky(enum.Enum):
    BLUE = "blue"
    GREY = "grey"


PLAIN = [
    (int, 7, {"type": "integer"}, "7"),
    (float, 7.5, {"type": "number"}, "7.5"),
    (bool, True, {"type": "boolean"}, "true"),
    (Sky, "grey", {"type": "string", "enum": ["blue", "grey"]}, "grey"),
    (Literal["ja", 1], "1", {"type": "string", "enum": ["ja", "1"]}, "1"),
]


@pytest.mark.filterwarnings("error:Regular")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("wanted", "said", "schema", "text"), PLAIN)
def test_plain_types_are_asked_for_as_objects(
    provider: Any, backend: Any, wanted: Any, said: Any, schema: dict[str, Any], text: str
) -> None:
    provider.said = {"value": said}
    state = ask.run(type=wanted, stop=" ", backend=backend)
    assert state["a"] == Answer(wanted).parse(text) and state.messages()[-1]["content"] == text
    assert schema_of(provider.asked[0])["properties"] == {"value": schema}
    assert provider.asked[0]["max_tokens"] == 9 + WRAPPER_TOKENS and not provider.asked[0].get("stop")


def test_a_plain_value_is_streamed_in_one_piece() -> None:
    with answering([chunk('{"val'), chunk('ue": 7}', "stop"), DONE]) as url:
        client = sgl.OpenAI("m", base_url=url + "/v1", api_key="none")
        state = ask.run(type=int, backend=client, stream=True)
        assert list(state.text_iter("a")) == ["7"] and state["a"] == 7 and "{" not in state.text()
        client.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_wrong_plain_values_are_asked_for_again(provider: Any, backend: Any) -> None:
    limited = ask.options(limits=sgl.Limits(tokens=100))
    state = limited.run(type=int, reask=1, backend=backend)  # an object without the value
    assert isinstance(state.error(), sgl.InvalidAnswer) and len(provider.asked) == 2
    assert [asked["max_tokens"] for asked in provider.asked] == [9, 9]
    assert "That is not valid" in json.dumps(provider.asked[1]["messages"])


@sgl.function(num_api_spec_tokens=16)
def form(s: Any, turns: int = 1) -> None:
    for i in range(turns):
        s += sgl.user("q")
        s += sgl.assistant(sgl.gen(f"a{i}", stop=".") + ". " + sgl.gen(f"b{i}", stop="."))


def test_turns_that_are_asked_for_as_a_whole_are_calls_like_others() -> None:
    def backend() -> sgl.FakeBackend:
        return sgl.FakeBackend({"q": "one two. three."}, is_chat_model=True)

    state = form.run(3, backend=backend())
    assert state["b2"] == "three" and state.report().total.calls == 3
    assert state.report().total.generated == 9
    limited = backend()
    state = form.options(limits=sgl.Limits(calls=2)).run(3, backend=limited)
    assert isinstance(state.error(), sgl.LimitExceeded) and len(limited.calls) == 2
    limited = backend()
    state = form.options(limits=sgl.Limits(tokens=4)).run(3, backend=limited)
    assert isinstance(state.error(), sgl.LimitExceeded)
    assert [call.params.max_new_tokens for call in limited.calls if call.params is not None] == [4, 1]


@pytest.mark.parametrize("chat", [True, False])
def test_what_is_generated_ahead_is_tried_again(chat: bool) -> None:
    failures = [BackendError("busy", 503), BackendError("busy", 503)]

    class Busy(sgl.FakeBackend):
        async def agenerate(self, s: Any, sampling_params: Any) -> Any:
            if failures:
                raise failures.pop()
            return await super().agenerate(s, sampling_params)

    backend = Busy({"q": "one two. three."}, is_chat_model=chat)
    state = form.options(retry=sgl.Retry(attempts=3, delay=0.0)).run(backend=backend)
    assert (state["a0"], state["b0"]) == ("one two", "three") and state.report().calls[0].attempts == 3


def test_answers_that_fit_no_turn_are_wasted() -> None:
    backend = sgl.FakeBackend({"q": "no end"}, is_chat_model=True)
    state = form.run(backend=backend)
    state.sync()
    assert [call.wasted_tokens for call in state.report().calls] == [2, 2, 2]
