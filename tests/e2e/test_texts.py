"""What goes over the wire: a program's text is sent once, however many calls and branches go on from it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

import bough as sgl

from .serving import Server

LONG = "the cat sat on the mat and the dog saw it. " * 60


class Wire:
    """A way to a server that counts the bytes that go there."""

    def __init__(self, port: int) -> None:
        self.sent = 0
        self._port = port
        self._pairs: list[threading.Thread] = []
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listening.accept()[0]
            except OSError:
                return
            self._pairs.append(threading.Thread(target=self._join, args=(near,), daemon=True))
            self._pairs[-1].start()

    def _join(self, near: socket.socket) -> None:
        with near, socket.create_connection(("127.0.0.1", self._port)) as far:
            back = threading.Thread(target=self._carry, args=(far, near, False), daemon=True)
            back.start()
            self._carry(near, far, True)
            back.join()

    def _carry(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                self.sent += len(data) if counted else 0
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:  # the other end went away
            for end in (source, target):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Every client has closed its connections."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for pair in self._pairs:
            pair.join()


@contextmanager
def wired(server: Server) -> Iterator[tuple[Wire, sgl.RuntimeEndpoint]]:
    wire = Wire(server.port)
    backend = sgl.RuntimeEndpoint(wire.url)
    try:
        yield wire, backend
    finally:
        backend.shutdown()
        wire.close()


@sgl.function
def branches(s: Any, text: str, width: int) -> None:
    s += text
    forks = s.fork(width)
    for i, fork in enumerate(forks):
        fork += f" {i}:" + sgl.gen("said", max_tokens=4, ignore_eos=True)
    forks.join()


@sgl.function
def turns(s: Any, text: str, n: int) -> None:
    s += text
    for i in range(n):
        s += f" turn {i}:" + sgl.gen(f"said{i}", max_tokens=4, ignore_eos=True)


@sgl.function
def chosen(s: Any, text: str) -> None:
    s += text + sgl.select("first", ["the cat", "the dog", "the mat"])
    s += " or" + sgl.select("second", ["the cat", "the dog", "the mat"])


def bytes_of(wire: Wire, program: Any, **arguments: Any) -> tuple[int, Any]:
    before = wire.sent
    state = program.run(**arguments, temperature=0)
    for _ in state.text_iter():
        pass
    assert state.error() is None, state.error()
    return wire.sent - before, state


def test_branches_send_their_prefix_once(served: Server) -> None:
    with wired(served) as (wire, backend):
        narrow, _ = bytes_of(wire, branches, text=LONG, width=2, backend=backend)
        wide, state = bytes_of(wire, branches, text=LONG, width=32, backend=backend)
        longer, _ = bytes_of(wire, branches, text=LONG * 2, width=32, backend=backend)
    assert len(state["said"]) == 32
    first = state.report().calls[0]
    assert (first.kind, first.generated_tokens) == ("prefill", 0) and first.prompt_tokens > 500
    assert len(LONG) < narrow < len(LONG) + 6000
    assert wide - narrow < 30 * 1500, "a branch costs its request, whatever stands before it"
    assert longer - wide < 1.2 * len(LONG), "twice the prefix is sent once more, not 32 times"


@pytest.mark.parametrize("stream", [False, True])
def test_turns_send_what_is_new(served: Server, stream: bool) -> None:
    with wired(served) as (wire, backend):
        sent, state = bytes_of(wire, turns, text=LONG, n=8, backend=backend, stream=stream)
    assert len(LONG) < sent < len(LONG) + 8 * 1500
    whole = sgl.RuntimeEndpoint(served.url)
    whole.knows_programs = False
    assert turns.run(text=LONG, n=8, backend=whole, temperature=0).text() == state.text(), "the texts are the same"
    whole.shutdown()


def test_choices_send_no_text_again(served: Server) -> None:
    with wired(served) as (wire, backend):
        sent, state = bytes_of(wire, chosen, text=LONG, backend=backend)
        assert sent < len(LONG) + 6000
    whole = sgl.RuntimeEndpoint(served.url)
    whole.keeps_texts = False
    _, again = bytes_of(wire, chosen, text=LONG, backend=whole)
    assert (state["first"], state["second"]) == (again["first"], again["second"])
    whole.shutdown()


def test_a_last_select_sends_no_text_again(served: Server) -> None:
    @sgl.function
    def classified(s: Any) -> None:
        s += LONG + sgl.select("class", ["the cat", "the dog", "the mat"] * 4)

    with wired(served) as (wire, backend):
        sent, _ = bytes_of(wire, classified, backend=backend)
    assert len(LONG) < sent < len(LONG) + 8000


def test_answers_that_are_asked_again_send_no_text_again(served: Server) -> None:
    """They are one program to the server as well, whose tokens it counts on."""

    @sgl.function
    def asked(s: Any) -> None:
        s += LONG + sgl.gen("n", type=str, reask=2, validate=lambda value: False, max_tokens=4, ignore_eos=True)

    with wired(served) as (wire, backend):
        before = wire.sent
        state = asked.run(backend=backend, temperature=0)
        assert isinstance(state.error(), sgl.InvalidAnswer)
        assert len(LONG) < wire.sent - before < len(LONG) + 6000


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_forgot_gets_the_text_again(served: Server, stream: bool) -> None:
    """The program's texts go while it runs; it does not notice."""

    @sgl.function
    def interrupted(s: Any) -> None:
        s += LONG + sgl.gen("a", max_tokens=4, ignore_eos=True)
        assert s["a"] is not None
        httpx.post(f"{served.url}/v1/programs/{s.stream_executor.program.id}/end").raise_for_status()
        s += " and" + sgl.gen("b", max_tokens=4, ignore_eos=True)

    with wired(served) as (wire, backend):
        sent, state = bytes_of(wire, interrupted, backend=backend, stream=stream)
        assert 2 * len(LONG) < sent < 2 * len(LONG) + 6000
        assert "b" in state


def test_an_attempt_that_ends_late_is_not_gone_on_from(served: Server) -> None:
    """The text is sent again where the server keeps another than the one that the program has."""

    @sgl.function
    def overtaken(s: Any) -> None:
        s += LONG + sgl.gen("a", max_tokens=4, ignore_eos=True)
        call = s["a"] and s.stream_executor.calls[-1]
        program = {"id": s.stream_executor.program.id, "node": call.node}
        late = {"text": LONG + "late", "program": program, "sampling_params": {"max_new_tokens": 0}}
        httpx.post(f"{served.url}/generate", json=late).raise_for_status()
        s += " and" + sgl.gen("b", max_tokens=1, return_logprob=True, logprob_start_len=0)

    with wired(served) as (wire, backend):
        sent, state = bytes_of(wire, overtaken, backend=backend)
        assert 2 * len(LONG) < sent < 2 * len(LONG) + 6000
        ids = [row[1] for row in state.get_meta_info("b")["input_token_logprobs"]]
        whole = backend.request("POST", "/tokenize", {"prompt": LONG + state["a"] + " and"})["tokens"]
        assert ids == whole[-len(ids) :]


def test_what_a_prefix_may_not_be(served: Server) -> None:
    with httpx.Client(base_url=served.url, timeout=60) as http:
        program = {"id": "kept", "node": "n0"}
        body = {"sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        first = http.post("/generate", json={**body, "text": "the cat", "program": program}).raise_for_status().json()
        kept = first["meta_info"]["program"]["text"]
        assert kept == len("the cat" + first["text"])
        prefix = {"program": "kept", "node": "n0"}
        after = http.post("/generate", json={**body, "text": " sat", "prefix": prefix, "return_prompt_token_ids": True})
        ids = http.post("/tokenize", json={"prompt": "the cat" + first["text"] + " sat"}).json()["tokens"]
        assert after.raise_for_status().json()["prompt_token_ids"] == ids
        assert http.post("/tokenize", json={"prompt": " sat", "prefix": prefix}).json()["tokens"] == ids
        for wrong in ({"chars": kept + 1}, {"chars": -1}, {"node": 7}, {"colour": "red"}):
            answer = http.post("/generate", json={**body, "text": "x", "prefix": {**prefix, **wrong}})
            assert answer.status_code == 400, wrong
        ids_behind = http.post("/generate", json={**body, "input_ids": [5], "prefix": prefix})
        assert ids_behind.status_code == 400 and "ids" in ids_behind.json()["error"]["message"]
        many = {**body, "text": ["x"] * 1024, "prefix": prefix, "sampling_params": {"max_new_tokens": 1}}
        long = {"text": LONG * 4, "program": {"id": "kept", "node": "n1"}, "sampling_params": {"max_new_tokens": 0}}
        assert http.post("/generate", json=long).raise_for_status().json()["meta_info"]["program"]["text"] == 4 * len(
            LONG
        )
        assert http.post("/generate", json={**many, "prefix": {**prefix, "node": "n1"}}).status_code == 400
        missing = http.post("/generate", json={**body, "text": "x", "prefix": {**prefix, "node": "n9"}})
        assert (missing.status_code, missing.json()["code"]) == (404, "unknown_text")
        last = {**body, "text": " end", "prefix": prefix, "program": {"id": "kept", "node": "n2", "end": True}}
        assert "text" not in http.post("/generate", json=last).raise_for_status().json()["meta_info"]["program"]
        assert http.post("/generate", json={**body, "text": "x", "prefix": prefix}).status_code == 404
