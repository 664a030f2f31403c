"""The text-level engine: prompts in, text out, over any client."""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from bough.base.config import Config
from bough.base.errors import BoughError, EngineError, InvalidRequest, Unavailable
from bough.base.messages import Hello, Logprob, Namespace, Prefetch, Request
from bough.base.params import PoolingParams, SamplingParams
from bough.base.plan import Ints
from bough.base.validate import INT64, check_texts, validate_request
from bough.engine.ahead import Following
from bough.engine.client import EngineClient
from bough.engine.generation import Chunk, Embedding, GenerateOptions, Generation, tenant_rid
from bough.engine.ipc_client import IpcClient
from bough.engine.local_client import LocalClient
from bough.engine.openmp import wait_briefly
from bough.engine.text import SequenceText, error_of, load_text
from bough.engine.text_threads import TextThreads
from bough.text.chat_template import ChatTemplate
from bough.text.marking import MarkedText
from bough.text.memory import PIECE, Bound, Steps, TextMemory, check_size
from bough.text.tokenizer import Tokenizer
from bough.weights.fetch import present

T = TypeVar("T")

LONG_TEXT = 2048
"""Characters from which on a text is tokenized off the event loop."""


class AsyncEngine:
    """Generates text with the engine behind ``client``, which is started. Belongs to one event loop.

    Attributes:
        client: the id-level client; owned, so closed with this object.
        tokenizer: the model's.
        template: the model's chat template, None where it has none.
    """

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.template = template
        self._tenant = ""
        self._threads = TextThreads()
        self._texts = TextMemory(tokenizer)
        self._prefetches: set[asyncio.Task[None]] = set()

    @classmethod
    async def launch(cls, config: Config) -> AsyncEngine:
        """Build an engine in this process. Raises ConfigError where that is impossible."""
        wait_briefly()
        from bough.engine.build import build

        sources: list[Path | Mapping[str, Any]] = []

        def build_core() -> Any:
            core = build(config)
            sources.append(core.tokenizer_source)
            return core

        client = LocalClient(build_core)
        try:
            await client.start()
            tokenizer, template = await asyncio.to_thread(load_text, sources[0])
        except BaseException:
            await client.close()
            raise
        return cls(client, tokenizer, template)

    @classmethod
    async def connect(cls, run_dir: str | Path, model: str | None) -> AsyncEngine:
        """Wait for the engine process of ``run_dir`` and use it, through all its restarts.

        ``model`` is what it was told to serve. Where that lies on this machine, its text is read while the engine
        loads, which has the last word: which file it is, and why it cannot be served.
        """
        client = IpcClient(Path(run_dir))
        likely = present(model)
        early = None if likely is None else asyncio.create_task(asyncio.to_thread(load_text, likely))
        try:
            path = Path((await client.start()).model.path)
            reading = early if early and likely == path else asyncio.to_thread(load_text, path)
            tokenizer, template = await reading
        except BaseException:
            await client.close()
            raise
        finally:
            if early is not None:
                early.cancel()
                await asyncio.gather(early, return_exceptions=True)
        return cls(client, tokenizer, template)

    @property
    def hello(self) -> Hello:
        """What the engine said of itself and of the model. Raises Unavailable before it did."""
        if self.client.hello is None:
            raise Unavailable("the engine is not ready")
        return self.client.hello

    def for_tenant(self, tenant: str) -> AsyncEngine:
        """This engine as ``tenant`` may use it: its cache and its request ids are apart from all others'."""
        view = copy.copy(self)
        view._tenant = tenant
        return view

    async def close(self) -> None:
        """End every stream; an engine in this process stops, one in another goes on."""
        for task in self._prefetches:
            task.cancel()
        await self.client.close()
        self._threads.close()  # so that nothing of the engine outlives it

    async def tokenize(self, text: str, add_special: bool = True, bound: Bound | None = None) -> list[int]:
        """Ids of ``text``, in which the texts of special tokens act.

        With ``bound``, at least those that matter. Raises InvalidRequest for bad Unicode, and for a text that is found,
        mostly before it is tokenized, to be longer than the context.
        """
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, add_special=add_special)
        return await self._encoded(text, self._steps(text, add_special, bound), bound)

    def _steps(self, text: str, add_special: bool, bound: Bound | None) -> Steps[list[int]]:
        return self._texts.encode(text, add_special=add_special, owner=self._tenant, bound=bound)

    async def _encoded(self, text: str, steps: Steps[list[int]], bound: Bound | None) -> list[int]:
        """The ids of ``text`` that ``steps`` find. Raises InvalidRequest for what cannot fit, before they begin."""
        if len(text) > PIECE and bound is not None:
            await self._threads.run(lambda: check_size(text, self.tokenizer, bound), self._tenant)
        return await self._threads.run_steps(steps, self._tenant)

    async def tokenize_cut(self, text: str, most: int, left: bool = False, add_special: bool = True) -> list[int]:
        """See :meth:`bough.text.tokenizer.Tokenizer.encode_cut`."""
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode_cut(text, most, left=left, add_special=add_special)
        steps = self._texts.encode_cut(text, most, left=left, add_special=add_special, owner=self._tenant)
        return await self._threads.run_steps(steps, self._tenant)

    async def tokenize_pair(
        self, first: str, second: str, most: int | None = None, add_special: bool = True
    ) -> list[int]:
        """See :meth:`bough.text.tokenizer.Tokenizer.encode_pair`."""
        if len(first) + len(second) < LONG_TEXT:
            return self.tokenizer.encode_pair(first, second, most, add_special=add_special)
        steps = self._texts.encode_pair(first, second, most, add_special=add_special)
        return await self._threads.run_steps(steps, self._tenant)

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
        bound: Bound | None = None,
    ) -> list[int]:
        """Ids of a conversation, in which only the template's own special tokens act.

        Arguments and errors are those of :meth:`bough.text.chat_template.ChatTemplate.render`, and ``bound`` is that of
        :meth:`tokenize`.
        """
        template = self.template
        if template is None:
            raise InvalidRequest("this model has no chat template", param="messages", code="no_chat_template")

        def render() -> tuple[MarkedText, str]:
            marked = template.render(
                messages, tools=tools, add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message, options=options,
            )  # fmt: skip
            return marked, marked.text if marked.has_marks else marked.marked

        marked, text = await self._threads.run(render, self._tenant)
        if bound is None or marked.has_marks:
            check_texts(len(text), self.hello.limits, "messages")
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode_chat(marked)
        steps = self._chat_steps(marked) if marked.has_marks else self._steps(text, False, bound)
        return await self._encoded(text, steps, bound)

    def _chat_steps(self, prompt: MarkedText) -> Steps[list[int]]:
        yield len(prompt.marked)
        return self.tokenizer.encode_chat(prompt)

    async def stream(self, prompt: str | Sequence[int] | Ints, options: GenerateOptions) -> AsyncGenerator[Chunk, None]:
        """Generate ``options.n`` sequences; their chunks in order of arrival. Closing it early aborts them.

        Raises before the first chunk what is wrong with the request (InvalidRequest), or why nobody takes it
        (Overloaded, Unavailable). Later misfortune of a sequence is the ``finish`` of its last chunk.
        """
        ids = await self.tokenize(prompt, bound=self._whole) if isinstance(prompt, str) else prompt
        requests = self._requests(ids, options)
        tail = requests[0].prompt[-16:].tolist()
        texts = {r.rid: SequenceText(i, self.tokenizer, tail, options) for i, r in enumerate(requests)}
        named, held = options.program, dict[int, Chunk]()
        following = Following(prompt, options) if named and named.after and self._prefetches_on else None
        outputs = self.client.submit(*requests)
        refusable = True
        try:
            async for output in outputs:
                finish = output.finish
                if refusable and finish is not None and finish.kind == "error" and finish.status != 500:
                    raise error_of(finish)
                refusable = False
                chunk = texts[output.rid].take(output)
                if options.interval > 1:
                    if (earlier := held.pop(chunk.index, None)) is not None:
                        chunk = earlier.then(chunk)
                    if finish is None and len(chunk.tokens) < min(options.interval, chunk.n_generated):
                        held[chunk.index] = chunk
                        continue
                if following is not None and following.take(chunk):
                    self._prefetch(following, requests[0])
                yield chunk
        finally:
            await outputs.aclose()

    async def collect(self, prompt: str | Sequence[int] | Ints, options: GenerateOptions) -> list[Generation]:
        """As :meth:`generate`, but a sequence that ended badly is returned with what it had."""
        chunks: dict[int, list[Chunk]] = {i: [] for i in range(options.n)}
        async with aclosing(self.stream(prompt, options)) as stream:
            async for chunk in stream:
                chunks[chunk.index].append(chunk)
        return [_generation(news) for news in chunks.values()]

    async def generate(self, prompt: str | Sequence[int] | Ints, options: GenerateOptions) -> list[Generation]:
        """All ``options.n`` sequences, finished.

        Raises as :meth:`stream` does, and the matching error when a sequence did not end by itself.
        """
        generations = await self.collect(prompt, options)
        for generation in generations:
            if generation.finish.kind not in ("stop", "length"):
                raise error_of(generation.finish)
        return generations

    async def embed(
        self,
        prompts: Sequence[str | Sequence[int]],
        pooling: PoolingParams | None = None,
        options: GenerateOptions | None = None,
    ) -> list[Embedding]:
        """A vector for each prompt, in order; made as the model's embeddings are unless ``pooling`` says otherwise.

        Of ``options``, the namespace, the priority, the timeout and the rid mean something; several prompts get
        ``rid-pi``. Raises what is wrong with any of them, or the matching error when one did not end well.
        """
        options = options or GenerateOptions()
        pooling = pooling or PoolingParams(kind=self.hello.model.pooling)
        name, namespace = self._identity(options)
        requests = []
        for i, prompt in enumerate(prompts):
            ids = await self.tokenize(prompt, bound=self._whole) if isinstance(prompt, str) else prompt
            requests.append(
                Request(
                    rid=name if len(prompts) == 1 else f"{name}-p{i}",
                    ids=_prompt_bytes(ids, self.hello.model.vocab_size),
                    params=SamplingParams(max_tokens=0),
                    namespace=namespace,
                    priority=options.priority,
                    timeout=options.timeout,
                    pooling=pooling,
                )
            )
            self._check(requests[-1])
        found: dict[str, Embedding] = {}
        outputs = self.client.submit(*requests)
        try:
            async for output in outputs:
                if output.finish is None:
                    continue
                if output.pooled is None:
                    raise error_of(output.finish)
                vector = np.frombuffer(output.pooled, "<f4")
                found[output.rid] = Embedding(vector, output.n_prompt, output.n_cached)
        finally:
            await outputs.aclose()
        return [found[request.rid] for request in requests]

    @property
    def _whole(self) -> Bound:
        """Of a prompt, which has to fit into the context."""
        return Bound(self.hello.model.context_length)

    @property
    def _prefetches_on(self) -> bool:
        return self.hello.schedule.prefetch == "on"

    def _prefetch(self, following: Following, request: Request) -> None:
        """Let the engine compute what comes after the answer to ``request``; nobody waits for that."""

        async def tell() -> None:
            try:
                ids = await following.ids(lambda text, special: self.tokenize(text, special, self._whole))
                program = request.program
                assert program is not None
                message = Prefetch(_prompt_bytes(ids, self.hello.model.vocab_size), request.namespace, program.id)
                self.client.prefetch(message)
            except BoughError:
                pass  # the request that asks for it will be told what is wrong

        task = asyncio.get_running_loop().create_task(tell())
        self._prefetches.add(task)
        task.add_done_callback(self._prefetches.discard)

    def _identity(self, options: GenerateOptions) -> tuple[str, Namespace]:
        """(rid, namespace) of a request as its tenant's."""
        name = tenant_rid(self._tenant, secrets.token_hex(16) if options.rid is None else options.rid)
        namespace = options.namespace
        if self._tenant:
            namespace = msgspec.structs.replace(namespace, tenant=self._tenant)
        return name, namespace

    def _check(self, request: Request) -> None:
        hello = self.hello
        validate_request(
            request, hello.limits, hello.model.vocab_size, hello.model.context_length,
            generates=hello.model.generates, classifies=bool(hello.model.labels),
        )  # fmt: skip

    def _requests(self, ids: Sequence[int] | Ints, options: GenerateOptions) -> list[Request]:
        hello = self.hello
        if not 1 <= options.n <= hello.limits.n:
            raise InvalidRequest(f"n must be in [1, {hello.limits.n}], not {options.n}", param="n")
        prompt = _prompt_bytes(ids, hello.model.vocab_size)
        name, namespace = self._identity(options)
        seed = options.params.seed
        program = options.program
        if program is not None and program.after and options.n > 1:
            raise InvalidRequest("of several answers it is not known which one goes on", param="program.after")
        if program is not None and options.n > 1 and not program.fork:
            program = msgspec.structs.replace(program, fork=options.rid or "n", width=options.n)
        requests = []
        for i in range(options.n):
            params = options.params
            if seed is not None and i:
                params = msgspec.structs.replace(params, seed=(seed + i + INT64) % (2 * INT64) - INT64)
            requests.append(
                Request(
                    rid=name if options.n == 1 else f"{name}-{i}",
                    ids=prompt,
                    params=params,
                    namespace=namespace,
                    priority=options.priority,
                    timeout=options.timeout,
                    constraint=options.constraint,
                    reasoning=options.reasoning,
                    program=program,
                    lease=options.lease,
                    unseen=options.unseen,
                )
            )
        # They differ in nothing but their seed and their id, of which the last is the longest.
        self._check(requests[0])
        if len(requests[-1].rid) > hello.limits.rid_chars:
            raise InvalidRequest(f"the request id must have 1 to {hello.limits.rid_chars} characters", param="rid")
        return requests


def _prompt_bytes(ids: Sequence[int] | Ints, vocab_size: int) -> bytes:
    """``ids`` as little-endian int32. Raises InvalidRequest for what does not fit, before it could wrap around."""
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError):
        array = np.empty(0, np.object_)
    if array.size == 0 and len(ids) == 0:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= vocab_size:
        raise InvalidRequest(
            f"the prompt holds out-of-vocabulary ids; ids must be integers in [0, {vocab_size})", param="input_ids"
        )
    return array.astype("<i4").tobytes()


def _generation(chunks: list[Chunk]) -> Generation:
    """What the chunks of one finished sequence add up to."""
    last = chunks[-1]
    if last.finish is None:
        raise EngineError("the engine ended a stream without saying how")
    return Generation(
        index=last.index,
        text="".join(chunk.text for chunk in chunks),
        tokens=[token for chunk in chunks for token in chunk.tokens],
        n_prompt=last.n_prompt,
        n_cached=last.n_cached,
        finish=last.finish,
        logprobs=_concatenated([chunk.logprobs for chunk in chunks]),
        prompt_logprobs=_concatenated([chunk.prompt_logprobs for chunk in chunks]),
    )


def _concatenated(parts: list[list[Logprob] | None]) -> list[Logprob] | None:
    given = [part for part in parts if part is not None]
    return [entry for part in given for entry in part] if given else None
