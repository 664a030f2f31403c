"""A server that speaks OpenAI's API by fixed rules, and a tokenizer of bytes in the place of tiktoken's files."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import patch

import tiktoken

BYTES = tiktoken.Encoding(
    "bytes",
    pat_str=r"[\s\S]",
    mergeable_ranks={bytes([i]): i for i in range(256)},
    special_tokens={"<|endoftext|>": 256},
)


def answer_to(body: dict[str, Any]) -> str:
    """One of the tokens that it is confined to, a number, or the same sentences each time, up to its stops."""
    bias = body.get("logit_bias")
    if bias:
        return chr(min(map(int, bias))) if body.get("max_tokens") == 1 else "42"
    text = " out put. More! z end"
    stops = body.get("stop") or []
    for stop in [stops] if isinstance(stops, str) else stops:
        text = text.partition(stop)[0]
    return text


class Replying(BaseHTTPRequestHandler):
    server: Any

    def log_message(self, *_: Any) -> None: ...

    def _send(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Handler(Replying):
    def do_GET(self) -> None:
        model = {"id": "m", "object": "model", "created": 1, "owned_by": self.server.owner}
        self._send(json.dumps({"object": "list", "data": [model]}).encode(), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.taken.append([self.path, {name: value for name, value in body.items() if value is not None}])
        text, chat = answer_to(body), "chat" in self.path
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        head = {"id": "x", "created": 1, "model": body["model"], "object": "chat.completion" if chat else "completion"}
        if body.get("stream"):
            pieces = [{"delta": {"content": text}} if chat else {"text": text}]
            events = [{**head, "choices": [{"index": 0, "finish_reason": None, **piece}]} for piece in pieces]
            events.append({**head, "choices": [], "usage": usage})
            data = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"
            self._send(data, "text/event-stream")
            return
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choices = [{"index": i, "finish_reason": "stop", **said} for i in range(body.get("n") or 1)]
        self._send(json.dumps({**head, "choices": choices, "usage": usage}).encode(), "application/json")


@contextmanager
def answering(sgl: Any, model: str, owner: str = "somebody") -> Iterator[tuple[Any, list[Any]]]:
    """(the OpenAI backend of ``sgl`` with such a server, whose models are ``owner``'s; what it was sent)."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.taken, server.owner = [], owner
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    home = "sglang.lang.backend.openai" if sgl.__name__ == "sglang" else "bough.lang.backends.openai"
    try:
        with patch("tiktoken.encoding_for_model", lambda name: BYTES):
            url = f"http://127.0.0.1:{server.server_address[1]}/v1"
            backend = importlib.import_module(home).OpenAI(model, base_url=url, api_key="none")
            yield backend, server.taken
            backend.shutdown()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
