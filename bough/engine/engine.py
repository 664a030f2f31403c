"""The synchronous engine for scripts and notebooks: :class:`AsyncEngine` on a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence, Sized
from types import TracebackType
from typing import Any, TypeVar, cast, overload

import msgspec
import numpy as np
from tqdm import tqdm

from bough.base.config import Config
from bough.base.errors import BoughError, EngineError, InvalidRequest, Overloaded
from bough.base.messages import Finish, Hello
from bough.base.params import Pooling, PoolingParams, SamplingParams
from bough.base.sglang_flags import translated
from bough.engine.answer_type import as_constraint
from bough.engine.async_engine import AsyncEngine
from bough.engine.generation import Chunk, Embedding, GenerateOptions, Generation

T = TypeVar("T")
Prompt = str | Sequence[int]

PROMPTS_IN_FLIGHT = 1024
"""Prompts of one list that the engine holds at a time; it can only order by shared prefixes what it holds."""
RETRY_SECONDS = 0.05


class Engine:
    """An engine in this process.

    ``Engine("model.gguf", context_length=4096)`` takes the flags of ``bough serve`` as keywords; a complete
    :class:`Config` does as well, and so do SGLang's names (``model_path``, ``mem_fraction_static``). Methods may be
    called from any thread. Close it, or use it in a ``with``.
    Raises ConfigError when the model cannot be served.
    """

    def __init__(self, model: str | Config | None = None, **flags: Any) -> None:
        config = model if isinstance(model, Config) else Config()
        if isinstance(model, str):
            flags["path"] = model
        config = configured(config, flags)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bough-loop", daemon=True)
        self._thread.start()
        try:
            self._engine = self._wait(AsyncEngine.launch(config))
        except BaseException:
            self._end_loop()
            raise
        self._open = True
        atexit.register(self.close)

    @property
    def hello(self) -> Hello:
        """Facts about engine and model."""
        return self._engine.hello

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the engine runs on; :attr:`asynchronous` and :meth:`chunks` may be used on it only."""
        return self._loop

    @property
    def asynchronous(self) -> AsyncEngine:
        """The engine for coroutines."""
        return self._engine

    def chunks(
        self, prompt: Prompt, params: SamplingParams | GenerateOptions | None = None, **sampling: Any
    ) -> AsyncGenerator[Chunk, None]:
        """As :meth:`stream`, for coroutines."""
        return self._engine.stream(prompt, options_of(params, sampling))

    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | GenerateOptions | None = None, **sampling: Any
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        params: SamplingParams | GenerateOptions | None = None,
        *,
        progress: bool = False,
        **sampling: Any,
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: Prompt | list[str] | list[list[int]],
        params: SamplingParams | GenerateOptions | None = None,
        *,
        progress: bool = False,
        **sampling: Any,
    ) -> Generation | list[Generation]:
        """Continue one prompt (text or ids), or each of a list.

        Args:
            prompt: one prompt gives a Generation, a list gives a list in the same order: ``n`` entries for
                each prompt.
            params: sampling options; temperature 1 and the model's whole context by default.
            progress: show a progress bar, for a list.
            sampling: fields of SamplingParams and of GenerateOptions, in addition to ``params``; ``constraint`` may
                also be a JSON Schema or a type, see :func:`bough.engine.answer_type.as_constraint`.

        Raises the matching BoughError for a single prompt. In a list each prompt fails alone: its entry has a
        ``finish`` of kind error, timeout or abort that says why.
        """
        options = options_of(params, sampling)
        if isinstance(prompt, list) and (not prompt or isinstance(prompt[0], Sized)):
            return self._wait(self._generate_all(cast(list[Prompt], prompt), options, progress))
        if options.n != 1:
            raise ValueError("n sequences of one prompt make a list: give the prompt as one too")
        return self._wait(self._engine.generate(cast(Prompt, prompt), options))[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | GenerateOptions | None = None, **sampling: Any
    ) -> Iterator[Chunk]:
        """The chunks of one prompt as they come. Leaving the iterator aborts what is unfinished."""
        chunks = self._engine.stream(prompt, options_of(params, sampling))

        async def following() -> Chunk | None:
            return await anext(chunks, None)

        try:
            while (chunk := self._wait(following())) is not None:
                yield chunk
        finally:
            self._wait(chunks.aclose())

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | GenerateOptions | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> Generation:
        """The model's answer to a conversation, given as in the OpenAI API."""
        prompt = self._wait(self._engine.render_chat(messages, tools))
        return self.generate(prompt, params, **sampling)

    def embed(self, prompts: Sequence[Prompt], pooling: Pooling | None = None) -> list[Embedding]:
        """A vector for each prompt (text or ids), in order, as the model's hidden states give it (not normalised).

        Args:
            prompts: at most as many as the engine takes at a time.
            pooling: ``last``, ``first``, ``mean`` or, for a classifier, ``classify``; by default the model's own.

        Raises the matching BoughError when any of them cannot be done.
        """
        params = None if pooling is None else PoolingParams(kind=pooling)
        return self._wait(self._engine.embed(prompts, params))

    def tokenize(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of ``text``, as :meth:`generate` would take them."""
        return self._wait(self._engine.tokenize(text, add_special))

    def close(self) -> None:
        """Stop the engine and free its memory. Idempotent; also done when the interpreter exits."""
        if self._open:
            self._open = False
            atexit.unregister(self.close)
            self._wait(self._engine.close())
            self._end_loop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def _generate_all(self, prompts: list[Prompt], options: GenerateOptions, progress: bool) -> list[Generation]:
        room = asyncio.Semaphore(max(1, PROMPTS_IN_FLIGHT // options.n))
        with tqdm(total=len(prompts), unit="prompt", disable=not progress) as bar:

            async def one(prompt: Prompt) -> list[Generation]:
                async with room:
                    generations = await self._attempt(prompt, options)
                bar.update()
                return generations

            results = await asyncio.gather(*[one(prompt) for prompt in prompts])
        return [generation for generations in results for generation in generations]

    async def _attempt(self, prompt: Prompt, options: GenerateOptions) -> list[Generation]:
        while True:
            try:
                return await self._engine.collect(prompt, options)
            except Overloaded:  # nobody waits for a quick refusal here
                await asyncio.sleep(RETRY_SECONDS)
            except BoughError as error:
                finish = Finish("error", message=error.message, status=error.status)
                return [Generation(i, "", [], 0, 0, finish) for i in range(options.n)]

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise EngineError("the engine is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _end_loop(self) -> None:
        self._wait(_cancel_others())
        self._wait(self._loop.shutdown_asyncgens())
        self._wait(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    """End what else runs on this loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def configured(config: Config, flags: Mapping[str, Any]) -> Config:
    """``config`` with the fields of its sections that ``flags`` names. Raises TypeError for an unknown name."""
    changed: dict[str, dict[str, Any]] = {}
    for name, value in translated(flags).items():
        for section in dataclasses.fields(config):
            if section.name != "limits" and name in {f.name for f in dataclasses.fields(getattr(config, section.name))}:
                changed.setdefault(section.name, {})[name] = value
                break
        else:
            raise TypeError(f"{name!r} is not an option of the engine")
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in changed.items()}
    )


def options_of(params: SamplingParams | GenerateOptions | None, sampling: Mapping[str, Any]) -> GenerateOptions:
    """Options from either kind of parameters, with the fields that ``sampling`` names changed."""
    options = params if isinstance(params, GenerateOptions) else GenerateOptions(params=params or SamplingParams())
    own = {f.name for f in dataclasses.fields(options)} - {"params"}
    changed = {name: value for name, value in sampling.items() if name in own}
    fields = {name: value for name, value in sampling.items() if name not in own}
    if (wanted := changed.get("constraint")) is not None:
        changed["constraint"] = as_constraint(wanted)
    for name in ("stop", "stop_regex"):
        if isinstance(text := fields.get(name), str):
            fields[name] = (text,)
    params = msgspec.structs.replace(options.params, **fields)
    try:
        params = msgspec.convert(msgspec.to_builtins(params, enc_hook=_plain), SamplingParams)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequest(f"sampling parameters: {error}") from None
    return dataclasses.replace(options, params=params, **changed)


def _plain(value: object) -> object:
    """What stands for one of numpy's numbers."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} is no sampling parameter")
