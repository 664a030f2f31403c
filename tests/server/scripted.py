"""A deterministic engine without a model, and a real HTTP server around it, for the tests of the HTTP side.

The next token of a sequence is a function of its prompt, its seed and its position, so that every test can
compute what a request must answer.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import numpy as np
import tokenizers
import uvloop
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from bough.base.config import Config, ModelConfig, ServeConfig
from bough.base.limits import Limits
from bough.base.messages import (
    PROTOCOL,
    Abort,
    Control,
    ControlReply,
    Finish,
    Hello,
    Logprob,
    ModelInfo,
    Output,
    Outputs,
    Request,
    Stats,
    ToEngine,
    Waits,
)
from bough.engine.async_engine import AsyncEngine
from bough.engine.client import StreamClient
from bough.engine.stream import OutputStream
from bough.server.app import create_app
from bough.server.process import make_server
from bough.server.service import Service
from bough.text.chat_template import ChatTemplate
from bough.text.detokenizer import IncrementalDetokenizer
from bough.text.stop import StopMatcher
from bough.text.tokenizer import Tokenizer
from bough.text.vocabulary import Vocabulary

T = TypeVar("T")

MODEL = "scripted"
CONTEXT = 4096
PATIENCE = 120.0
"""Most seconds for what takes none, where other processes have the machine meanwhile."""
EOS = "<|end|>"
WORDS = ("the ", "cat ", "sat ", "on ", "a ", "mat, ", "then ", "it ", "ran. ", "é", "日", "\n")
TEMPLATE = (
    "{% if tools %}<|tools|>{% for t in tools %}{{ t.function.name }} {% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or () %}{{ c.function | tojson }}{% endfor %}"
    "{% if not loop.last or add_generation_prompt %}<|end|>{% endif %}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def make_tokenizer() -> Tokenizer:
    """Bytes, a few words, and the special tokens of ``TEMPLATE``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    names = (EOS, "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|tools|>")
    fast.add_special_tokens([AddedToken(name, special=True) for name in names])
    end = fast.token_to_id(EOS)
    assert end is not None
    return Tokenizer(Vocabulary(fast, (end,), None, None))


@functools.cache
def alphabet() -> tuple[int, ...]:
    """Ids that scripts are made of: bytes of ``WORDS`` that are complete characters on their own."""
    return tuple(make_tokenizer().encode("abcdefghijklmnopqrstuvwxyz .,", add_special=False))


def script(prompt: list[int], seed: int | None, index: int) -> int:
    """The token at ``index`` behind ``prompt``: the end of the sequence at position 24, ordinary text before."""
    key = zlib.crc32(repr((prompt, seed)).encode())
    if index == 24:
        return make_tokenizer().eos_ids[0]
    return alphabet()[(key + index * (1 + key % 11)) % len(alphabet())]


def pooled_vector(prompt: list[int], size: int) -> NDArray[np.float32]:
    """What a pooled request gets: how often the ids of each residue occur, so that like texts have like vectors."""
    return np.bincount(np.array(prompt) % size, minlength=size).astype("<f4")


def expected_text(prompt: list[int], n: int, seed: int | None = None) -> str:
    """What a sequence of at most ``n`` tokens reads, without stop strings."""
    tokens = [script(prompt, seed, i) for i in range(min(n, 24))]
    return make_tokenizer().decode(tokens)


@dataclass
class _Sequence:
    request: Request
    name: str
    prompt: list[int]
    n_cached: int
    matcher: StopMatcher
    index: int = 0
    tokens: list[int] = field(default_factory=list)


class ScriptedClient(StreamClient):
    """Steps every few milliseconds: one token for each running sequence.

    Attributes:
        step_seconds: pause between steps.
        frozen: no steps and no heartbeats, as in an engine that hangs.
        waiting_limit: with this many sequences, further ones are refused as the real queue refuses them.
        faults: rid -> finish that ends it at its third token; ``fault_next`` is for the next request, whatever its rid.
        answers: rid -> text that it generates, in place of what its prompt says; ``answer_next`` as above.
        aborted: rids that were aborted, in order.
        turns: how often it was about to step; time as the server's loop sees it, in units of ``step_seconds``.
    """

    def __init__(self, limits: Limits, step_seconds: float = 0.001, labels: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.labels = labels
        self.limits = limits
        self.step_seconds = step_seconds
        self.frozen = False
        self.waiting_limit = 1 << 30
        self.faults: dict[str, Finish] = {}
        self.fault_next: Finish | None = None
        self.answers: dict[str, str] = {}
        self.answer_next: str | None = None
        self.aborted: list[str] = []
        self.seen: list[Request] = []
        self._names: list[str] = []
        self.running: dict[str, _Sequence] = {}
        self._prompts: list[list[int]] = []
        self.turns = 0
        self._steps = self._generated = self._n_prompt = self._n_cached = self._finished = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> Hello:
        tokenizer = make_tokenizer()
        model = ModelInfo(
            name=MODEL, path="/models/scripted", architecture="scripted", vocab_size=tokenizer.vocab_size,
            context_length=CONTEXT, eos_ids=tokenizer.eos_ids, dtype="float32", n_parameters=0,
            labels=self.labels,
        )  # fmt: skip
        hello = Hello(PROTOCOL, 1, model, 1 << 20, 1, self.limits)
        self._dispatch(hello)
        self._task = asyncio.create_task(self._run())
        return hello

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._give_up(RuntimeError("closed"))

    def submit(self, *requests: Request) -> OutputStream:
        self.seen += requests
        self._names = [request.rid for request in requests]
        return super().submit(*requests)

    def die(self) -> None:
        """As if the engine process had been killed."""
        self.running.clear()
        self._lose("the engine died")

    def revive(self) -> None:
        assert self.hello is not None
        self._dispatch(self.hello)

    def _post(self, message: ToEngine) -> bool:
        if isinstance(message, Request):
            self._admit(message)
        elif isinstance(message, Abort):
            for rid in message.rids:
                self._abort(rid)
        elif isinstance(message, Control):
            asyncio.get_running_loop().call_soon(self._dispatch, self._obey(message))
        return True

    def _obey(self, command: Control) -> ControlReply:
        if "program" in command.args:
            return ControlReply(command.id, False, "there is no such program", {"status": 404})
        if command.op == "flush_cache":
            self._prompts.clear()
        kept = sum(len(s.prompt) + len(s.tokens) for s in self.running.values())
        return ControlReply(command.id, True, info={"kept": kept})

    def _admit(self, request: Request) -> None:
        name = self._names.pop(0)  # the client numbers what it sends by itself
        if self.fault_next is not None:
            self.faults[name], self.fault_next = self.fault_next, None
        if self.answer_next is not None:
            self.answers[name], self.answer_next = self.answer_next, None
        prompt = request.prompt.tolist()
        if len(self.running) >= self.waiting_limit:
            finish = Finish("error", message="the queue is full", status=429)
            asyncio.get_running_loop().call_soon(
                self._dispatch, Outputs([Output(request.rid, 0, [], len(prompt), 0, finish)])
            )
            return
        cached = max((_common(prompt, old) for old in self._prompts), default=0)
        cached = min(cached, len(prompt) - 1)
        self._prompts.append(prompt)
        del self._prompts[:-8]
        p = request.params
        matcher = StopMatcher(p.stop, p.stop_regex, p.min_tokens, IncrementalDetokenizer(make_tokenizer()))
        self.running[request.rid] = _Sequence(request, name, prompt, cached, matcher)
        self._n_prompt += len(prompt)
        self._n_cached += cached

    def _abort(self, rid: str) -> None:
        sequence = self.running.pop(rid, None)
        if sequence is not None:
            self.aborted.append(sequence.name)
            output = self._output(sequence, [], Finish("abort", message="aborted"))
            asyncio.get_running_loop().call_soon(self._dispatch, Outputs([output]))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.step_seconds)
            self.turns += 1
            if self.frozen or not self.alive:
                continue
            outputs = [self._step(s) for s in list(self.running.values())]
            if outputs:
                self._steps += 1
                self._dispatch(Outputs(outputs))
            self._dispatch(self._stats(len(outputs)))

    def _step(self, s: _Sequence) -> Output:
        p = s.request.params
        n = len(s.tokens)
        if s.request.pooling is not None:
            size = len(self.labels) if s.request.pooling.kind == "classify" else 16
            output = self._end(s, [], Finish("stop"), None)
            return msgspec.structs.replace(output, pooled=pooled_vector(s.prompt, size).tobytes())
        prompt_logprobs = self._prompt_logprobs(s) if n == 0 else None
        if p.max_tokens == 0:
            return self._end(s, [], Finish("length"), prompt_logprobs)
        if n == 2 and (fault := self.faults.get(s.name)) is not None:
            return self._end(s, [], fault, prompt_logprobs)
        token = script(s.prompt, p.seed, n)
        if (answer := self.answers.get(s.name)) is not None:
            ids = make_tokenizer().encode(answer, add_special=False)
            token = ids[n] if n < len(ids) else make_tokenizer().eos_ids[0]
        s.tokens.append(token)
        self._generated += 1
        finish = None
        match = s.matcher.push(token)
        if token in make_tokenizer().eos_ids and not p.ignore_eos:
            finish = Finish("stop")
        elif token in p.stop_token_ids:
            finish = Finish("stop", token)
        elif match is not None:
            finish = Finish("stop", match.pattern)
        elif len(s.tokens) == (CONTEXT - len(s.prompt) if p.max_tokens is None else p.max_tokens):
            finish = Finish("length")
        if finish is not None:
            return self._end(s, [token], finish, prompt_logprobs)
        return self._output(s, [token], None, prompt_logprobs)

    def _end(self, s: _Sequence, tokens: list[int], finish: Finish, prompt_logprobs: list[Logprob] | None) -> Output:
        del self.running[s.request.rid]
        self._finished += 1
        return self._output(s, tokens, finish, prompt_logprobs)

    def _output(
        self, s: _Sequence, tokens: list[int], finish: Finish | None, prompt_logprobs: list[Logprob] | None = None
    ) -> Output:
        p = s.request.params
        logprobs = None if p.logprobs is None else [_logprob(t, p.logprobs, p.logprob_token_ids) for t in tokens]
        output = Output(s.request.rid, s.index, tokens, len(s.prompt), s.n_cached, finish, logprobs, prompt_logprobs)
        s.index += len(tokens)
        return output

    def _prompt_logprobs(self, s: _Sequence) -> list[Logprob] | None:
        p = s.request.params
        if p.prompt_logprobs is None:
            return None
        return [_logprob(t, p.prompt_logprobs, p.logprob_token_ids) for t in s.prompt[max(1, p.logprob_start) :]]

    def _stats(self, tokens: int) -> Stats:
        used = sum(len(s.prompt) + len(s.tokens) for s in self.running.values())
        return Stats(
            steps=self._steps, waiting=0, running=len(self.running), pool_tokens=1 << 20,
            free_tokens=(1 << 20) - used, tree_tokens=0, locked_tokens=used, prompt_tokens=self._n_prompt,
            cached_tokens=self._n_cached, computed_tokens=self._n_prompt - self._n_cached,
            generated_tokens=self._generated, evicted_tokens=0, retracted=0, finished=self._finished,
            aborted=len(self.aborted), rejected=0, bad_messages=0, step_seconds=[0.001] if tokens else [],
            device_seconds=[0.001] if tokens else [], step_tokens=[tokens] if tokens else [],
            waits=Waits(ended=3, worth=2, seconds=0.5),
        )  # fmt: skip


def _logprob(token: int, top: int, asked: tuple[int, ...]) -> Logprob:
    value = -0.5 - token / 1000
    alternatives = [(token, value), *((t, value - 1 - t / 1000) for t in range(top + 1) if t != token)]
    return Logprob(token, value, 1, alternatives[:top], [(t, -3.0) for t in asked])


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def make_config(**serve: Any) -> Config:
    limits = serve.pop("limits", Limits())
    return Config(model=ModelConfig(served_name=MODEL), serve=replace(ServeConfig(), **serve), limits=limits)


def make_engine(client: ScriptedClient) -> AsyncEngine:
    tokenizer = make_tokenizer()
    return AsyncEngine(client, tokenizer, ChatTemplate({"default": TEMPLATE}, tokenizer))


@dataclass
class Running:
    """A server in a thread of its own. ``run`` executes a coroutine on its loop."""

    service: Service
    client: ScriptedClient
    url: str
    loop: asyncio.AbstractEventLoop
    port: int

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE)

    def call(self, function: Callable[[], T]) -> T:
        async def work() -> T:
            return function()

        return self.run(work())


@contextmanager
def running_server(
    step_seconds: float = 0.001, *, attach: bool = True, labels: tuple[str, ...] = (), **serve: Any
) -> Iterator[Running]:
    """Serve on a free port of the loopback until the block ends."""
    folder = tempfile.TemporaryDirectory(prefix="bough-files-")
    config = make_config(**{"files": folder.name, **serve})
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    port = listener.getsockname()[1]
    ready = threading.Event()
    box: list[Running] = []
    stop: list[Callable[[], None]] = []

    async def main() -> None:
        client = ScriptedClient(config.limits, step_seconds, labels)
        await client.start()
        service = Service(config)
        if attach:
            service.attach(make_engine(client))
        server = make_server(create_app(service), config)
        loop = asyncio.get_running_loop()
        watching = asyncio.create_task(service.watch())

        def end() -> None:
            server.should_exit = True
            server.force_exit = True

        stop.append(end)
        box.append(Running(service, client, f"http://127.0.0.1:{port}", loop, port))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.001)
        ready.set()
        await serving
        watching.cancel()
        engine = service.engine
        await (engine.close() if engine is not None else client.close())

    def thread() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    worker = threading.Thread(target=thread)
    worker.start()
    assert ready.wait(PATIENCE)
    try:
        yield box[0]
    finally:
        box[0].loop.call_soon_threadsafe(stop[0])
        worker.join(10)
        listener.close()
        folder.cleanup()


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait until ``condition`` holds. Fails after ``seconds``."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "the condition did not come true in time"
        threading.Event().wait(0.002)
