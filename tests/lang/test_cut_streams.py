"""Streams whose body ends as if all were well, before the answer is complete: what dying servers and proxies send."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

import bough as sgl
from bough.lang.errors import BackendError
from bough.lang.http import HttpClient

from .openai_stub import Replying

DONE = "[DONE]"


class _Handler(Replying):
    def do_GET(self) -> None:
        self._send(json.dumps({"model_path": "model", "object": "list", "data": []}).encode(), "application/json")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        events = self.server.answers.pop(0)
        lines = [
            f"event: {e['type']}\ndata: {json.dumps(e)}" if "type" in e else f"data: {json.dumps(e)}"
            for e in events
            if e != DONE
        ]
        self._send(
            "".join(f"{line}\n\n" for line in [*lines, *["data: [DONE]"] * events.count(DONE)]).encode(),
            "text/event-stream",
        )


@contextmanager
def answering(*answers: list[Any]) -> Iterator[str]:
    """The address of a server that streams one of ``answers`` after the other."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.answers = list(answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@sgl.function(retry=sgl.Retry(attempts=2, delay=0.0))
def chat(s: Any) -> None:
    s += sgl.user("x")
    s += sgl.assistant(sgl.gen("a", max_tokens=9))


def endpoint(url: str) -> Any:
    return sgl.RuntimeEndpoint(url)


def openai(url: str) -> Any:
    return sgl.OpenAI("model", base_url=url + "/v1", api_key="none", max_retries=0)


def anthropic(url: str) -> Any:
    pytest.importorskip("anthropic")
    return sgl.Anthropic("model", base_url=url, api_key="none", max_retries=0)


def generated(text: str, reason: Any = None) -> dict[str, Any]:
    return {"text": text, "meta_info": {"completion_tokens": 1, "finish_reason": reason}}


def chunk(text: str, reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def block(text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}


STOPPED = [
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
    {"type": "message_stop"},
]
CASES = [
    pytest.param(endpoint, [generated("hel")], [generated("hel"), generated("hello"), DONE], id="generate"),
    pytest.param(endpoint, [generated("hel")], [generated("hel"), generated("hello", {"type": "stop"})], id="no-done"),
    pytest.param(openai, [chunk("hel")], [chunk("hel"), chunk("lo", "stop"), DONE], id="openai"),
    pytest.param(anthropic, [block("hel")], [block("hel"), block("lo"), *STOPPED], id="anthropic"),
]


@pytest.mark.parametrize(("backend", "cut", "whole"), CASES)
def test_a_stream_that_is_cut_is_no_answer(backend: Any, cut: list[Any], whole: list[Any]) -> None:
    with answering(cut, [], whole, [], []) as url:
        client = backend(url)
        state = chat.run(backend=client, stream=True)
        heard: list[str] = []
        with pytest.raises(sgl.ProgramError, match="ended before the answer was complete"):
            heard.extend(state.text_iter("a"))
        error = state.error()
        assert isinstance(error, BackendError) and error.transient
        assert state.report().total.wasted == 1  # the piece that was shown
        assert chat.run(backend=client, stream=True)["a"] == "hello"  # at the second attempt
        assert isinstance(chat.run(backend=client, stream=True).error(), BackendError)
        client.shutdown()


def test_events_end_with_done() -> None:
    async def main() -> None:
        with answering([generated("a")]) as url:
            http, heard = HttpClient(url), []
            with pytest.raises(BackendError, match="ended before"):
                async for event in http.events("/generate", {}):
                    heard.append(event["text"])
            assert heard == ["a"]
            await http.close()

    asyncio.run(main())
