"""Google's own client package, pointed at a server in this process that speaks its protocol."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import bough as sgl

vertexai: Any = pytest.importorskip("vertexai", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")  # of that package, which is old in places

ANSWER = {
    "candidates": [{"content": {"role": "model", "parts": [{"text": "Oslo"}]}, "finishReason": "STOP"}],
    "usageMetadata": {"promptTokenCount": 3, "candidatesTokenCount": 1, "totalTokenCount": 4},
}


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path.partition("?")[0].rpartition("/")[2], body))
        said = json.loads(json.dumps(ANSWER))
        if "responseMimeType" in body["generationConfig"]:
            said["candidates"][0]["content"]["parts"] = [{"text": '{"value": 7, "n": 7}'}]
        answer = json.dumps([said, said] if "stream" in self.path else said).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """What the server is asked: the end of the path, and the body."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    nobody = importlib.import_module("google.auth.credentials").AnonymousCredentials()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    vertexai.init(project="p", location="us-central1", api_endpoint=endpoint, api_transport="rest", credentials=nobody)
    monkeypatch.setenv("GCP_PROJECT_ID", "p")
    monkeypatch.setenv("GCP_LOCATION", "us-central1")
    yield server.asked
    server.shutdown()
    thread.join()
    server.server_close()


@sgl.function
def capital(s: Any) -> None:
    s += sgl.system("Be short.")
    s += sgl.user("The capital of Norway?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=5, temperature=0.5, stop="."))


@sgl.function
def plain(s: Any) -> None:
    s += "The capital of Norway is " + sgl.gen("answer")


def test_messages_and_texts_are_sent(asked: list[tuple[str, dict[str, Any]]]) -> None:
    backend = sgl.VertexAI("gemini-pro")
    assert backend.get_model_name() == "gemini-pro"
    assert capital.run(backend=backend)["answer"] == "Oslo" == plain.run(backend=backend)["answer"]
    (path, chat), (_, text) = asked
    assert path == "gemini-pro:generateContent"
    assert chat["contents"] == [
        {"role": "user", "parts": [{"text": "System prompt: Be short."}]},
        {"role": "model", "parts": [{"text": "Understood."}]},
        {"role": "user", "parts": [{"text": "The capital of Norway?"}]},
    ]
    wanted = {"temperature": 0.5, "maxOutputTokens": 5, "stopSequences": ["."], "topP": 1.0}
    assert wanted.items() <= chat["generationConfig"].items()
    assert text["contents"] == [{"role": "user", "parts": [{"text": "The capital of Norway is "}]}]


def test_streams(asked: list[tuple[str, dict[str, Any]]]) -> None:
    state = plain.run(backend=sgl.VertexAI("gemini-pro", safety_settings=None), stream=True)
    assert list(state.text_iter("answer")) == ["Oslo", "Oslo"]
    assert state.error() is None and asked[0][0] == "gemini-pro:streamGenerateContent"


def test_several_answers_are_several_calls(asked: list[tuple[str, dict[str, Any]]]) -> None:
    state = plain.run(n=3, backend=sgl.VertexAI("gemini-pro"))
    assert state["answer"] == ["Oslo"] * 3 and len(asked) == 3
    assert state.report().total.generated == 3 and state.report().total.computed == 9


@dataclass
class Room:
    n: int
    name: str | None = None


def test_types_are_sent_as_a_schema(asked: list[tuple[str, dict[str, Any]]]) -> None:
    @sgl.function
    def typed(s: Any, wanted: Any) -> None:
        s += "q" + sgl.gen("answer", type=wanted)

    backend = sgl.VertexAI("gemini-pro")
    assert typed.run(int, backend=backend)["answer"] == 7
    assert typed.run(Room, backend=backend)["answer"] == Room(7)
    plain_value, room = (body["generationConfig"] for _, body in asked)
    assert plain_value["responseSchema"]["required"] == ["value"]
    assert room["responseMimeType"] == "application/json" and "responseSchema" not in room  # which may be null
