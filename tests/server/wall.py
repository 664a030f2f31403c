"""The wall of bad inputs: every field of every endpoint against every kind of bad value, and garbage below HTTP.

``run_wall(url)`` throws it at any server by its URL while victims stream beside it, and reports what came
back. The server under test must answer each input with something other than a 500, and the victims' texts
must not change.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlparse

MISSING = object()
NAN, INFINITY, SURROGATE, BAD_UTF8, HUGE = "\0nan\0", "\0inf\0", "\0surrogate\0", "\0utf8\0", "\0huge\0"
"""Stand for what a JSON encoder would not write."""

_RAW = {NAN: b"NaN", INFINITY: b"Infinity", SURROGATE: b'"\\ud800"', BAD_UTF8: b'"\xff\xfe"', HUGE: b"1e309"}


@dataclass(frozen=True)
class Attack:
    """One input: a body for ``path``, or bytes for the bare socket."""

    name: str
    path: str = ""
    body: bytes = b""
    raw: bytes | None = None


def values() -> dict[str, Any]:
    """The bad values by name. Large ones are shared, so that the wall stays small in memory."""
    return {
        "missing": MISSING, "null": None, "true": True, "false": False, "zero": 0, "minus one": -1, "one": 1,
        "half": 0.5, "limit": 20, "over the limit": 129, "2^31": 1 << 31, "2^63": 1 << 63, "2^64": 1 << 64,
        "-2^63-1": -(1 << 63) - 1, "10^400": 10**400, "10^4000": 10**4000, "1e308": 1e308,
        "NaN": NAN, "inf": INFINITY, "1e309": HUGE,
        "empty text": "", "text": "x", "number as text": "7", "long text": "y" * 20000, "NUL": "a\0b",
        "surrogate": SURROGATE, "bad UTF-8": BAD_UTF8, "empty list": [], "empty object": {}, "list": [1, "a", None],
        "list of lists": [[1], [2]], "list of bad ids": [-1, 1 << 40], "many items": [1] * 100_000,
        "deep list": _nested(40), "object": {"a": 1}, "bad map": {"x": "y", "-5": 1, "1e9": 2},
    }  # fmt: skip


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


_SAMPLING = (
    "model", "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "stop", "stop_regex", "stop_token_ids", "no_stop_trim",
    "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "allowed_token_ids", "bad_words",
    "prompt_logprobs", "logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids", "stream",
    "stream_options", "timeout", "priority", "rid", "request_id", "cache_salt", "extra_key", "echo", "logprobs",
    "response_format", "user", "metadata", "unknown_field",
)  # fmt: skip
_COMPLETION = (*_SAMPLING, "prompt", "best_of", "suffix", "add_special_tokens")
_CHAT = (
    *_SAMPLING, "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "add_generation_prompt",
    "continue_final_message", "chat_template_kwargs", "audio", "modalities",
)  # fmt: skip
_NATIVE = (
    "text", "input_ids", "sampling_params", "stream", "rid", "return_logprob", "logprob_start_len",
    "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs", "priority", "timeout", "extra_key",
    "cache_salt", "image_data", "lora_path",
)  # fmt: skip
_NATIVE_SAMPLING = (
    "max_new_tokens", "min_new_tokens", "n", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k",
    "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos", "skip_special_tokens",
    "no_stop_trim", "logit_bias", "sampling_seed", "allowed_token_ids", "bad_words", "regex", "json_schema",
)  # fmt: skip
_POOLING = ("model", "rid", "priority", "timeout", "cache_salt", "truncate_prompt_tokens", "add_special_tokens")
_ANTHROPIC = (
    "messages", "max_tokens", "system", "tools", "tool_choice", "thinking", "stop_sequences", "temperature", "top_k",
    "metadata", "output_config", "stream",
)  # fmt: skip
_RESPONSES = (
    "input", "instructions", "previous_response_id", "max_output_tokens", "max_tool_calls", "top_logprobs", "tools",
    "tool_choice", "parallel_tool_calls", "text", "reasoning", "include", "store", "truncation", "metadata",
    "prompt_cache_options", "prompt_cache_retention",
)  # fmt: skip
_ITEMS: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "hi", "id": "msg_1"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "id": "fco_1", "call_id": "c", "output": "3"},
    {"type": "item_reference", "id": "msg_1"},
)
_OLLAMA = ("model", "messages", "stream", "format", "options", "think", "tools", "logprobs", "top_logprobs")

_BASES: tuple[tuple[str, dict[str, Any], tuple[str, ...], str | None], ...] = (
    ("/v1/completions", {"prompt": "hello", "max_tokens": 1}, _COMPLETION, None),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}, _CHAT, None),
    ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 1}}, _NATIVE, None),
    ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 1}}, _NATIVE_SAMPLING, "sampling_params"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
     ("role", "content", "name", "tool_calls"), "messages"),
    ("/tokenize", {"prompt": "hello"}, ("prompt", "messages", "add_special_tokens", "model", "tools"), None),
    ("/detokenize", {"tokens": [1, 2]}, ("tokens", "skip_special_tokens", "model"), None),
    ("/v1/embeddings", {"input": "hello"}, (*_POOLING, "input", "encoding_format", "dimensions"), None),
    ("/encode", {"text": "hello"}, ("text", "input_ids", "dimensions"), None),
    ("/v1/score", {"text_1": "a", "text_2": "b"}, ("text_1", "text_2", "queries", "query", "items"), None),
    ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1]},
     ("query", "items", "label_token_ids", "apply_softmax", "item_first"), None),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}, ("query", "documents", "top_n", "return_documents"), None),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}, _ANTHROPIC, None),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
     ("role", "content"), "messages"),
    ("/api/chat", {"messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 1}}, _OLLAMA, None),
    ("/api/chat", {"messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 1}},
     ("role", "content", "tool_calls", "images", "thinking", "tool_name"), "messages"),
    ("/api/generate", {"prompt": "hi", "options": {"num_predict": 1}}, ("prompt", "system", "raw", "context"), None),
    ("/api/generate", {"prompt": "hi", "options": {"num_predict": 1}},
     ("num_predict", "temperature", "top_k", "seed", "stop", "typical_p", "mirostat"), "options"),
    ("/api/embed", {"input": "hi"}, ("input", "truncate", "dimensions"), None),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 1}, _RESPONSES, None),
    *(
        ("/v1/responses", {"input": [item, {"role": "user", "content": "hi"}], "max_output_tokens": 1,
                           "truncation": "auto"}, tuple(item), "input")
        for item in _ITEMS
    ),
    ("/abort_request", {"rid": "nobody"}, ("rid",), None),
)  # fmt: skip


def field_attacks() -> Iterator[Attack]:
    """Each field of each endpoint with each bad value, everything else being right."""
    bad = values()
    for path, base, names, inside in _BASES:
        for name in names:
            for kind, value in bad.items():
                target = dict(base)
                if inside is None:
                    _set(target, name, value)
                elif isinstance(base[inside], list):
                    first, *others = base[inside]
                    target[inside] = [_with(first, name, value), *others]
                else:
                    target[inside] = _with(base[inside], name, value)
                yield Attack(f"{path} {inside or ''} {name}: {kind}", path, encode(target))


def _set(target: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        target.pop(name, None)
    else:
        target[name] = value


def _with(base: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    changed = dict(base)
    _set(changed, name, value)
    return changed


def encode(body: Any) -> bytes:
    """JSON, or what a hostile client would send in its place."""
    text = json.dumps(body).encode()
    for marker, raw in _RAW.items():
        text = text.replace(json.dumps(marker).encode(), raw)
    return text


def body_attacks() -> Iterator[Attack]:
    """Bodies that are wrong as a whole."""
    bodies = {
        "empty": b"", "null": b"null", "list": b"[]", "number": b"1", "text": b'"x"', "open object": b'{"prompt": "a"',
        "trailing": b'{"prompt": "a"} x', "two objects": b"{}{}", "byte order mark": b"\xef\xbb\xbf{}",
        "UTF-16": '{"prompt": "a"}'.encode("utf-16"), "NUL": b"\0\0\0", "bad UTF-8": b'{"prompt": "\xff"}',
        "100000 open lists": b"[" * 100_000, "100000 open objects": b'{"a":' * 100_000,
        "deep unknown": b'{"prompt": "a", "q": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        "mixed nesting": b'{"q": ' + b'[{"a":' * 200 + b"1" + b"}]" * 200 + b"}",
        "brackets in text": b'{"prompt": "' + b"[{" * 5000 + b'", "max_tokens": 1}',
        "escaped quotes": b'{"prompt": "\\"[[[\\\\", "max_tokens": 1}',
        "duplicate keys": b'{"prompt": "a", "prompt": 5}', "half a surrogate": b'{"prompt": "\\ud83d"}',
        "single quotes": b"{'prompt': 'a'}", "comment": b'{"prompt": "a" /* x */}', "long key": b'{"' + b"k" * 100_000
        + b'": 1}', "digits": b'{"max_tokens": ' + b"9" * 100_000 + b"}", "exponent": b'{"n": 1e99999999}',
        "a million commas": b"[" + b"," * 1_000_000, "10^5 keys": b"{" + b",".join(
            b'"k%d":1' % i for i in range(100_000)) + b"}",
    }  # fmt: skip
    for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"):
        for name, body in bodies.items():
            yield Attack(f"{path} body: {name}", path, body)


def raw_attacks() -> Iterator[Attack]:
    """What is not, or only half, HTTP."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    body = b'{"prompt": "a", "max_tokens": 1}'
    raws = {
        "nothing": b"", "newlines": b"\r\n" * 100, "noise": bytes(range(256)) * 20, "TLS": b"\x16\x03\x01\x02\x00\x01",
        "HTTP/0.9": b"GET /\r\n", "HTTP/9.9": b"GET / HTTP/9.9\r\n\r\n", "no path": b"GET HTTP/1.1\r\n\r\n",
        "bad method": b"G\x00T / HTTP/1.1\r\n\r\n", "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "websocket": b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        "length not a number": head + b"Content-Length: abc\r\n\r\n" + body,
        "length negative": head + b"Content-Length: -5\r\n\r\n" + body,
        "length huge": head + b"Content-Length: 99999999999999999999\r\n\r\n" + body,
        "length over the limit": head + b"Content-Length: 999999999\r\n\r\n" + body,
        "length twice": head + b"Content-Length: 5\r\nContent-Length: 32\r\n\r\n" + body,
        "length short": head + b"Content-Length: 5\r\n\r\n" + body,
        "length long": head + b"Content-Length: 500\r\n\r\n" + body,
        "length and chunked": head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "chunk size not hex": head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
        "chunk size huge": head + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nabc\r\n",
        "chunk negative": head + b"Transfer-Encoding: chunked\r\n\r\n-1\r\nabc\r\n",
        "chunks of one byte": head + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"1\r\n%c\r\n" % c for c in body) + b"0\r\n\r\n",
        "many chunks": head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 50_000 + b"0\r\n\r\n",
        "unknown coding": head + b"Transfer-Encoding: gzip\r\n\r\n" + body,
        "gzip body": head + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\n\x1f\x8b\x08",
        "form": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-www-form-urlencoded\r\n"
        b"Content-Length: 3\r\n\r\na=b",
        "long path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        "long header": b"GET /health HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        "endless header": b"GET /health HTTP/1.1\r\nX: " + b"a" * 200_000,
        "many headers": b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % i for i in range(5000)) + b"\r\n",
        "header without name": b"GET /health HTTP/1.1\r\n: x\r\n\r\n",
        "header with NUL": b"GET /health HTTP/1.1\r\nX: a\0b\r\n\r\n",
        "header folded": b"GET /health HTTP/1.1\r\nX: a\r\n b\r\n\r\n",
        "path not ASCII": b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        "path escaped": b"GET /%2e%2e/%00/%ff HTTP/1.1\r\nHost: x\r\n\r\n",
        "path absolute": b"GET http://evil/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        "double slash": b"GET //v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        "expect": head + b"Expect: 100-continue\r\nContent-Length: 32\r\n\r\n" + body,
        "pipelined": (head + b"Content-Length: 32\r\n\r\n" + body) * 20,
        "garbage behind": head + b"Content-Length: 32\r\n\r\n" + body + b"\xff" * 5000,
        "bad request id": b"GET /health HTTP/1.1\r\nX-Request-Id: " + b"\xff" * 50 + b"\r\n\r\n",
        "half a head": b"POST /v1/comp", "half a body": head + b"Content-Length: 32\r\n\r\n" + body[:10],
        "TRACE": b"TRACE / HTTP/1.1\r\nHost: x\r\n\r\n", "CONNECT": b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    }  # fmt: skip
    for name, raw in raws.items():
        yield Attack(f"raw: {name}", raw=raw)


def attacks() -> Iterator[Attack]:
    yield from field_attacks()
    yield from body_attacks()
    yield from raw_attacks()


@dataclass
class Report:
    """What came back. ``wrong`` lists every 500, every unreadable error and every hang."""

    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    victims: int = 0
    disturbed: list[str] = field(default_factory=list)


def run_wall(url: str, *, connections: int = 4, timeout: float = 20.0) -> Report:
    """Send every attack to the server at ``url`` while two victims stream; the report."""
    report, lock = Report(), threading.Lock()
    pending = attacks()
    done = threading.Event()
    expected = victim(url, timeout)

    def send() -> None:
        sender = _Sender(url, timeout)
        while True:
            with lock:
                attack = next(pending, None)
            if attack is None:
                sender.close()
                return
            status, complaint = sender.send(attack)
            with lock:
                report.sent += 1
                report.statuses[status] += 1
                if complaint:
                    report.wrong.append(f"{attack.name}: {complaint}")

    def suffer() -> None:
        while not done.is_set():
            text = victim(url, timeout)
            with lock:
                report.victims += 1
                if text != expected:
                    report.disturbed.append(text)

    senders = [threading.Thread(target=send) for _ in range(connections)]
    victims = [threading.Thread(target=suffer) for _ in range(2)]
    for thread in (*senders, *victims):
        thread.start()
    for thread in senders:
        thread.join()
    done.set()
    for thread in victims:
        thread.join()
    return report


def victim(url: str, timeout: float) -> str:
    """The text of one greedy stream, read event by event."""
    where = urlparse(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=timeout)
    body = {"prompt": "The victim walks along the wall and", "max_tokens": 24, "temperature": 0, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = f"{response.status} "
    for line in response:
        if line.startswith(b"data: {"):
            text += json.loads(line[6:])["choices"][0]["text"]
        elif line.startswith(b"data: [DONE]"):
            text += " done"
    connection.close()
    return text


class _Sender:
    """One keep-alive connection, opened again whenever the server has closed it."""

    def __init__(self, url: str, timeout: float) -> None:
        where = urlparse(url)
        self._host, self._port, self._timeout = where.hostname or "", where.port or 80, timeout
        self._connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)

    def close(self) -> None:
        self._connection.close()

    def send(self, attack: Attack) -> tuple[int, str]:
        """(status, what is wrong with the answer); status 0 where the connection was just closed."""
        try:
            return self._raw(attack.raw) if attack.raw is not None else self._post(attack)
        except TimeoutError:
            return 0, "no answer in time"
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            # The server may close the connection on what it cannot read; anything else it must answer.
            return 0, "" if attack.raw is not None else f"connection lost: {error!r}"

    def _post(self, attack: Attack) -> tuple[int, str]:
        self._connection.request("POST", attack.path, attack.body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        return _judge(response.status, response.read())

    def _raw(self, raw: bytes) -> tuple[int, str]:
        with socket.create_connection((self._host, self._port), self._timeout) as sock:
            try:
                sock.sendall(raw)
                sock.shutdown(socket.SHUT_WR)
                answer = b""
                while data := sock.recv(65536):
                    answer += data
            except (ConnectionError, BrokenPipeError):
                return 0, ""
        if not answer.startswith(b"HTTP/1.1 "):
            return 0, "" if not answer else f"not HTTP: {answer[:50]!r}"
        status = int(answer[9:12])
        return status, "status 500" if b"HTTP/1.1 500" in answer else ""


def _judge(status: int, body: bytes) -> tuple[int, str]:
    if status >= 500 and status != 503:
        return status, f"status {status}: {body[:200]!r}"
    if status == 422:
        return status, "status 422"
    if status >= 400:
        try:
            error = json.loads(body)["error"]
        except (ValueError, KeyError):
            return status, f"unreadable error: {body[:200]!r}"
        if isinstance(error, str):  # as Ollama words it
            error = {"message": error}
        if not error["message"] or "Traceback" in error["message"] or " at 0x" in error["message"]:
            return status, f"bad message: {error['message'][:200]!r}"
    elif b'"error"' in body[:4096] and b"data: " in body[:64]:
        return status, f"error within a stream: {body[:200]!r}"
    return status, ""
