"""An engine in this process: programs run on its event loop and share its memory."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest, Unavailable
from bough.base.messages import ControlOp, Namespace
from bough.base.params import SamplingParams
from bough.base.program import Program
from bough.lang.backends.base import AsyncBackend, Generated
from bough.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from bough.lang.config import global_config
from bough.lang.errors import BackendError
from bough.lang.model_template import model_template, without_lead
from bough.lang.params import SglSamplingParams, apply_dtype
from bough.lang.scoring import rows_from, scored_prompts
from bough.lang.templates import get_chat_template_by_model_path

if TYPE_CHECKING:
    from bough.lang.executor import StreamExecutor

_BACKENDS: weakref.WeakKeyDictionary[Any, EngineBackend] = weakref.WeakKeyDictionary()


@runtime_checkable
class EngineLike(Protocol):
    """What is used of :class:`bough.Engine`."""

    hello: Any
    loop: asyncio.AbstractEventLoop
    asynchronous: Any

    def chunks(self, prompt: Any, params: Any = None, **sampling: Any) -> AsyncGenerator[Any, None]: ...


def is_engine(given: Any) -> bool:
    return isinstance(given, EngineLike)


class EngineBackend(AsyncBackend):
    """``engine``, which stays its owner's to close."""

    knows_programs = True
    keeps_budgets = True
    takes_adapters = True

    def __init__(self, engine: EngineLike) -> None:
        super().__init__()
        self.engine = engine
        self.loop = engine.loop
        own = self._wait(model_template(self._render))
        self.chat_template = own or get_chat_template_by_model_path(self.get_model_name())

    @classmethod
    def of(cls, engine: EngineLike) -> EngineBackend:
        """The backend of an engine, always the same."""
        if engine not in _BACKENDS:
            _BACKENDS[engine] = cls(engine)
        return _BACKENDS[engine]

    def get_model_name(self) -> str:
        return str(self.engine.hello.model.name)

    def flush_cache(self) -> None:
        self._wait(self.engine.asynchronous.client.control("flush_cache"))

    def cache_prefix(self, prefix_str: str) -> None:
        self._wait(self._prefill(prefix_str))

    def end_program(self, s: StreamExecutor | list[StreamExecutor]) -> None:
        self.tell_end(s)

    async def aend_program(self, program: str, how: Literal["cancel", "end"]) -> None:
        op: ControlOp = "cancel_program" if how == "cancel" else "end_program"
        with suppress(Unavailable):  # an engine that is gone has forgotten it
            await self.engine.asynchronous.client.control(op, tenant="", program=program)

    async def acommit_lazy_operations(self, s: StreamExecutor) -> None:
        await self._prefill(s.text_)

    async def agenerate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Generated:
        texts = [""] * sampling_params.n
        metas: list[dict[str, Any]] = [{} for _ in texts]
        seen = [0] * sampling_params.n
        async with aclosing(self._open(s, sampling_params)) as chunks:
            async for chunk in chunks:
                i = chunk.index
                if s.current is not None:
                    s.current.under_way += chunk.n_generated - int(metas[i].get("completion_tokens", 0))
                texts[i] += chunk.text
                seen[i] += len(chunk.logprobs or ())
                news = self._meta(chunk, sampling_params, seen[i])
                news["output_token_logprobs"] = [
                    *metas[i].get("output_token_logprobs", ()), *news.get("output_token_logprobs", ())
                ]  # fmt: skip
                metas[i] = news
        for meta in metas:
            if not sampling_params.return_logprob:
                del meta["output_token_logprobs"]
        return (texts[0], metas[0]) if sampling_params.n == 1 else (texts, metas)

    async def agenerate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> AsyncIterator[tuple[str, Any]]:
        seen = 0
        async with aclosing(self._open(s, sampling_params)) as chunks:
            async for chunk in chunks:
                seen += len(chunk.logprobs or ())
                yield chunk.text, self._meta(chunk, sampling_params, seen)

    async def aselect(
        self, s: StreamExecutor, choices: list[str], temperature: float, choices_method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        assert temperature <= 1e-5
        _refuse_media(s)
        inner = self.engine.asynchronous
        ids = [await inner.tokenize(text) for text in [s.text_, *(s.text_ + c for c in choices)]]
        prompts, starts = scored_prompts(ids[0], ids[1:], choices_method)
        # Begun together, they are admitted together and share their prefix within one step.
        program = self._program(s)
        rows = await asyncio.gather(*(self._score(p, start, program) for p, start in zip(prompts, starts)))
        usage = [{"prompt_tokens": len(p), "cached_tokens": cached} for p, (_, cached) in zip(prompts, rows)]
        return rows_from(choices_method, choices, [r for r, _ in rows], [[] for _ in rows], usage)

    async def _score(self, ids: Sequence[int], start: int, program: dict[str, Any]) -> tuple[list[Any], int]:
        """(rows of the positions of ``ids`` from ``start`` on, tokens that came from the cache)."""
        params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0, logprob_start=start)
        found: list[Any] = []
        cached = 0
        async with aclosing(self.engine.chunks(ids, params, **program)) as chunks:
            async for chunk in chunks:
                _check(chunk.finish)
                cached = chunk.n_cached
                found += chunk.prompt_logprobs or ()
        unknown = len(ids) - start - len(found)  # the first token of all has no logprob
        token_text = self.engine.asynchronous.tokenizer.token_text
        head = [(None, token, token_text(token)) for token in ids[start : start + unknown]]
        return head + [(f.logprob, f.token, token_text(f.token)) for f in found], cached

    async def _prefill(self, text: str) -> None:
        ids = await self.engine.asynchronous.tokenize(text)
        if ids:
            await self._score(ids, len(ids), {})

    def _open(self, s: StreamExecutor, params: SglSamplingParams) -> AsyncGenerator[Any, None]:
        _refuse_media(s)
        apply_dtype(params)
        logprobs = (params.top_logprobs_num or 0) if params.return_logprob else None
        prompt_from = params.logprob_start_len
        of_prompt = logprobs is not None and prompt_from is not None and prompt_from >= 0
        sampling = SamplingParams(
            max_tokens=params.max_new_tokens, min_tokens=params.min_new_tokens, temperature=params.temperature,
            top_p=params.top_p, top_k=params.top_k, min_p=params.min_p,
            frequency_penalty=params.frequency_penalty, presence_penalty=params.presence_penalty,
            ignore_eos=params.ignore_eos, stop=_strings(params.stop), stop_regex=_strings(params.stop_regex),
            stop_token_ids=tuple(params.stop_token_ids or ()), logprobs=logprobs,
            prompt_logprobs=logprobs if of_prompt else None, logprob_start=prompt_from or 0 if of_prompt else 0,
        )  # fmt: skip
        return self._checked(
            self.engine.chunks(
                s.text_,
                sampling,
                n=params.n,
                constraint=_constraint(params),
                skip_special_tokens=global_config.skip_special_tokens_in_output,
                **self._program(s),
            )  # fmt: skip
        )

    async def _checked(self, chunks: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        async with aclosing(chunks):
            async for chunk in chunks:
                _check(chunk.finish)
                yield chunk

    def _program(self, s: StreamExecutor) -> dict[str, Any]:
        named: dict[str, Any] = {"program": Program(**s.envelope())}
        if s.lora_path is not None:
            named["namespace"] = Namespace(adapter=s.lora_path)
        return named

    def _meta(self, chunk: Any, params: SglSamplingParams, logprobs_seen: int) -> dict[str, Any]:
        """What /generate says beside the text; logprobs are those of this chunk."""
        meta: dict[str, Any] = {
            "finish_reason": None if chunk.finish is None else _finish_reason(chunk),
            "prompt_tokens": chunk.n_prompt,
            "completion_tokens": chunk.n_generated,
            "cached_tokens": chunk.n_cached,
        }
        if params.return_logprob:
            text = self.engine.asynchronous.tokenizer.token_text if params.return_text_in_logprobs else _no_text
            rows = chunk.logprobs or ()
            meta["output_token_logprobs"] = [(r.logprob, r.token, text(r.token)) for r in rows]
            meta["output_token_logprobs_length"] = logprobs_seen
            if params.top_logprobs_num:
                meta["output_top_logprobs"] = [[(p, t, text(t)) for t, p in r.top] for r in rows]
        return meta

    async def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str | None:
        inner = self.engine.asynchronous
        try:
            ids = await inner.render_chat(messages, add_generation_prompt=add_generation_prompt)
        except InvalidRequest:
            return None
        ids = without_lead(ids, await inner.tokenize("a"), await inner.tokenize("a", False))
        return str(inner.tokenizer.decode(ids, skip_special=False))


def _strings(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _constraint(params: SglSamplingParams) -> Constraint | None:
    if params.regex is not None:
        return Constraint(kind="regex", text=params.regex)
    if params.json_schema is not None:
        return Constraint(kind="json_schema", text=params.json_schema)
    return None


def _check(finish: Any) -> None:
    if finish is not None and finish.kind not in ("stop", "length"):
        raise BackendError(finish.message or f"the request ended with: {finish.kind}", finish.status)


def _finish_reason(chunk: Any) -> dict[str, Any]:
    if chunk.finish.kind == "length":
        return {"type": "length", "length": chunk.n_generated}
    return {"type": "stop", "matched": chunk.finish.matched}


def _no_text(token: int) -> None:
    return None


def _refuse_media(s: StreamExecutor) -> None:
    if s.images_:
        raise InvalidRequest("this engine takes no images or videos", param="image_data", code="unsupported_media")
