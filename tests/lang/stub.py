"""A server that speaks /generate by fixed rules and remembers what it was sent."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = " alpha beta gamma delta epsilon zeta".split(" ")[1:]


def answer_to(text: str, params: dict[str, Any]) -> str:
    """A text that depends on the prompt's length and what was asked for."""
    if params.get("regex") == r"[-+]?[0-9]+[ \n]*":
        return str(len(text))
    if params.get("json_schema"):
        return '{"name": "Ada", "age": 36}'
    return " " + " ".join(WORDS[(len(text) + i) % len(WORDS)] for i in range(min(3, params["max_new_tokens"])))


def tokens(text: str) -> list[str]:
    """Words with the blank before them."""
    found: list[str] = []
    for c in text:
        if c in " \n" or not found:
            found.append(c)
        else:
            found[-1] += c
    return found


class Stub(ThreadingHTTPServer):
    """Answers and records requests. ``replies`` are given before what the rules say; ``about`` is told of the model.

    A prompt that ends with FAIL is answered with 400.
    """

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, model_path: str = "stub-model", **about: Any) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.about = {"model_path": model_path, **about}
        self.replies: deque[str] = deque()
        self.requests: list[list[Any]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def taken(self) -> list[list[Any]]:
        """The requests so far, [method, path, authorization, body]; forgets them."""
        with self.lock:
            taken, self.requests = self.requests, []
        return taken


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def log_message(self, *_: Any) -> None: ...

    def _record(self) -> Any:
        length = int(self.headers.get("content-length") or 0)
        data = self.rfile.read(length)
        body = json.loads(data) if data else None
        with self.server.lock:
            self.server.requests.append([self.command, self.path, self.headers.get("authorization"), body])
        return body

    def _send(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._record()
        if self.path in ("/get_model_info", "/model_info"):
            self._send(self.server.about)
        else:
            self._send({"path": self.path})

    def do_POST(self) -> None:
        body = self._record()
        if self.path != "/generate":
            self._send({"error": {"message": "Not Found"}}, 200 if self.path == "/flush_cache" else 404)
            return
        texts = body.get("text")
        single = isinstance(texts, str)
        prompts = [texts] if single else texts if texts is not None else body["input_ids"]
        if any(isinstance(p, str) and p.endswith("FAIL") for p in prompts):
            self._send({"error": {"message": "told to fail"}}, 400)
        elif body.get("stream"):
            self._stream(prompts[0], body)
        else:
            answers = [_answer(p, body) for p in prompts for _ in range(body["sampling_params"].get("n", 1))]
            if self.server.replies and body["sampling_params"]["max_new_tokens"]:
                answers[0]["text"] = self.server.replies.popleft()
            self._send(answers[0] if len(answers) == 1 and single else answers)

    def _stream(self, prompt: str, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        text, events = "", []
        for i, token in enumerate(tokens(answer_to(prompt, body["sampling_params"]))):
            text += token
            meta: dict[str, Any] = {"id": "x", "completion_tokens": i + 1, "finish_reason": None}
            if body.get("return_logprob"):
                meta |= {"output_token_logprobs": [[-0.5, i, token]], "output_token_logprobs_length": i + 1}
            events.append(json.dumps({"text": text, "meta_info": meta}))
        for event in [*events, "[DONE]"]:
            data = f"data: {event}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")


def _answer(prompt: Any, body: dict[str, Any]) -> dict[str, Any]:
    params = body["sampling_params"]
    meta: dict[str, Any] = {"id": "x", "prompt_tokens": len(tokens(prompt) if isinstance(prompt, str) else prompt)}
    text = answer_to(prompt, params) if isinstance(prompt, str) and params["max_new_tokens"] else ""
    if body.get("return_logprob"):
        start = body.get("logprob_start_len") or 0
        words = tokens(prompt)[start:] if isinstance(prompt, str) else [f"t{i}" for i in prompt]
        rows = [[-((len(w) * 7 + i * 3) % 11) / 4 - 0.25, len(w), w] for i, w in enumerate(words)]
        if not isinstance(prompt, str):
            rows[0][0] = None
        meta |= {"input_token_logprobs": rows, "output_token_logprobs": [[-1.0, 1, "z"]]}
    meta["completion_tokens"] = len(tokens(text))
    return {"text": text, "meta_info": meta}


@contextmanager
def serving(model_path: str = "stub-model", **about: Any) -> Iterator[Stub]:
    server = Stub(model_path, **about)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
