"""OpenAI's API, and every server that speaks it."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bough.lang.backends.aborting import aborting
from bough.lang.backends.base import AsyncBackend, Generated
from bough.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from bough.lang.errors import BackendError, Unsupported
from bough.lang.http import CUT, retry_after
from bough.lang.params import SglSamplingParams, apply_dtype
from bough.lang.templates import ChatTemplate, get_chat_template_by_model_path
from bough.lang.waiting import Connection
from bough.lang.wrapping import in_one_piece, unwrapped, wrap

if TYPE_CHECKING:
    from bough.lang.executor import StreamExecutor

INSTRUCT_MODEL_NAMES = ["gpt-3.5-turbo-instruct"]
BIASED_TOKENS = 299
"""OpenAI takes no more entries of logit_bias."""


@dataclass
class TokenUsage:
    """Tokens that a backend was used for."""

    prompt_tokens: int
    completion_tokens: int

    def reset(self) -> None:
        self.prompt_tokens = self.completion_tokens = 0

    def add(self, usage: Any) -> dict[str, int]:
        """Count the usage of an answer; the same as meta information."""
        if usage is None:
            return {}
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        return _counts(usage)


def _counts(usage: Any) -> dict[str, int]:
    details = getattr(usage, "prompt_tokens_details", None)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": getattr(details, "cached_tokens", None) or 0,
    }


class OpenAI(AsyncBackend):
    """A model behind OpenAI's chat completions, or completions where ``is_chat_model`` is False.

    On a chat model a gen must directly follow the beginning of an assistant's message, unless its program has
    ``num_api_spec_tokens``. A server of bough is told of programs. The adapter of a gen is asked for as a model.

    Args:
        chat_template: says what text a program sees around messages; the API is sent the messages.
        is_azure: use Azure's client.
        args, kwargs: of :class:`openai.AsyncOpenAI`: ``api_key``, ``base_url`` and others.
    """

    takes_adapters = True

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: ChatTemplate | None = None,
        is_azure: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        import openai

        kwargs.setdefault("max_retries", 0)  # programs repeat what may pass
        kind: Any = openai.AsyncAzureOpenAI if is_azure else openai.AsyncOpenAI
        self._connection = Connection(lambda: kind(*args, **kwargs))
        self.model_name = model_name
        self.chat_template = chat_template or get_chat_template_by_model_path(model_name)
        self.is_chat_model = model_name not in INSTRUCT_MODEL_NAMES if is_chat_model is None else is_chat_model
        self.chat_prefix = self.chat_template.get_prefix_and_suffix("assistant", [{"role": "user", "content": ""}])[0]
        self.token_usage = TokenUsage(0, 0)
        self._elsewhere = "api.openai.com" not in str(self.client.base_url) and not is_azure
        self._told: bool | None = None if self._elsewhere else False

    @property
    def client(self) -> Any:
        """OpenAI's client."""
        return self._connection.client

    def shutdown(self) -> None:
        """Close the connections; there are no calls after this."""
        self._connection.close()

    def get_model_name(self) -> str:
        return self.model_name

    def end_program(self, s: StreamExecutor | list[StreamExecutor]) -> None:
        if self._told:
            self.tell_end(s)

    async def aend_program(self, program: str, how: Literal["cancel", "end"]) -> None:
        with suppress(BackendError):  # the server forgets programs by itself
            await self._call(self.client.post(f"/programs/{program}/{how}", cast_to=object))

    async def agenerate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Generated:
        if await self._is_told():
            apply_dtype(sampling_params)
        elif sampling_params.dtype is not None:
            return await self._of_dtype(s, sampling_params)
        wrapped = await self._wrapped(s, sampling_params)
        kwargs = await self._kwargs(s, sampling_params)
        answer = await self._answer(s, kwargs)
        return self._texts(answer, unwrapped if wrapped else str), self._meta(s, answer)

    async def _answer(self, s: StreamExecutor, kwargs: dict[str, Any], **prompt: Any) -> Any:
        """The answer to a request. When cancelled, a server of bough is asked what it had generated."""
        name = uuid.uuid4().hex
        if self._told:
            kwargs["extra_body"]["rid"] = name
        request = self._call(self._api.create(**(prompt or self._prompt(s)), **kwargs))
        if not self._told:
            return await request

        async def abort() -> bool:
            url = str(self.client.base_url).rstrip("/").removesuffix("/v1") + "/abort_request"
            found = await self._call(self.client.post(url, body={"rid": name}, cast_to=object))
            return bool(found["aborted"])

        def told(work: asyncio.Task[Any]) -> None:
            error = work.exception()
            usage = work.result().usage if error is None else _usage_of(error)
            if s.current is not None:
                s.current.follow(self.token_usage.add(usage))

        return await aborting(request, abort, told)

    async def agenerate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> AsyncIterator[tuple[str, Any]]:
        if await self._is_told():
            apply_dtype(sampling_params)
        elif sampling_params.dtype is not None:
            raise ValueError(f"Unknown dtype: {sampling_params.dtype}")
        wrapped = await self._wrapped(s, sampling_params)
        pieces = self._pieces(s, await self._kwargs(s, sampling_params))
        async for piece in in_one_piece(pieces) if wrapped else pieces:
            yield piece

    async def _pieces(self, s: StreamExecutor, kwargs: dict[str, Any]) -> AsyncIterator[tuple[str, Any]]:
        options = {"include_usage": True, **({"continuous_usage_stats": True} if self._told else {})}
        kwargs |= {"stream": True, "stream_options": options}
        complete = False
        with _translated():
            async with await self._api.create(**self._prompt(s), **kwargs) as events:
                async for event in events:
                    usage, text = event.usage, ""
                    meta: dict[str, Any] = {}
                    if event.choices:
                        choice = event.choices[0]
                        complete = complete or choice.finish_reason is not None
                        text = (choice.delta.content if self.is_chat_model else choice.text) or ""
                    if usage is not None:
                        complete = complete or not event.choices  # it is the last event
                        meta = _counts(usage) if self._told and event.choices else self._meta(s, event)
                    yield text, meta
        if not complete:
            raise BackendError(CUT)

    async def aselect(
        self, s: StreamExecutor, choices: list[str], temperature: float, choices_method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        """``choices_method`` means nothing here: the model takes one token of the choices that are left at a time."""
        if self.is_chat_model:
            raise Unsupported(
                "select/choices is not supported for chat models. "
                "Please try to use a non-chat model such as gpt-3.5-turbo-instruct"
            )
        if await self._is_told():  # it takes the same tokens, and its tokenizer is not known here
            longest = max(len(choice.encode()) for choice in choices)
            pattern = "|".join(map(re.escape, choices))
            params = SglSamplingParams(max_new_tokens=longest + 1, temperature=temperature, regex=pattern)
            text, meta = await self.agenerate(s, params)
            return ChoicesDecision(str(text), {**meta, "scores": [int(choice == text) for choice in choices]})
        encode = self._tokenizer().encode
        ids = [encode(choice) for choice in choices]
        prompt, scores = encode(s.text_), [0] * len(choices)
        left = [i for i in range(len(choices)) if ids[i]]
        for step in range(max(len(i) for i in ids)):
            answer = await self._call(
                self.client.completions.create(
                    model=s.lora_path or self.model_name,
                    prompt=prompt,
                    max_tokens=1,
                    temperature=temperature,
                    logit_bias={str(ids[i][step]): 100 for i in left},
                )  # fmt: skip
            )
            self.token_usage.add(answer.usage)
            token = encode(answer.choices[0].text)[0]
            hit = [i for i in left if ids[i][step] == token]
            assert hit, "the model wrote none of the tokens that it was confined to"
            for i in hit:
                scores[i] += 1
            left = [i for i in hit if step < len(ids[i]) - 1]
            if len(left) <= 1:
                break
            prompt.append(token)
        return ChoicesDecision(choices[int(np.argmax(scores))], {"scores": scores})

    @property
    def _api(self) -> Any:
        return self.client.chat.completions if self.is_chat_model else self.client.completions

    def _prompt(self, s: StreamExecutor) -> dict[str, Any]:
        if not self.is_chat_model:
            return {"prompt": s.text_}
        if s.num_api_spec_tokens is None and not s.text_.endswith(self.chat_prefix):
            raise RuntimeError(
                "This use case is not supported if api speculative execution is off. "
                "For OpenAI chat models, sgl.gen must be right after sgl.assistant. "
                "Example of adding api speculative execution: @function(num_api_spec_tokens=128)."
            )
        return {"messages": s.messages_}

    async def _wrapped(self, s: StreamExecutor, params: SglSamplingParams) -> bool:
        return self.is_chat_model and not await self._is_told() and wrap(s, params)

    async def _kwargs(self, s: StreamExecutor, params: SglSamplingParams) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        told = await self._is_told()
        if told:
            extra["program"] = s.envelope()
            if self.is_chat_model:
                extra["program"].pop("after", None)  # behind the template's own text, which the server adds
                if s.lease is not None and s.lease[1]:
                    extra["prompt_cache_options"] = {"ttl": s.lease[0], "messages": s.lease[1]}
            extra |= params.to_openai_extras()
            params.regex = None
        kwargs = params.to_openai_kwargs()
        # Reasoning models count their thoughts, and the name of the bound says so.
        named = self.model_name.startswith("o3") or "o1" in self.model_name
        kwargs.pop("max_tokens" if named else "max_completion_tokens")
        if kwargs["stop"] is None:
            del kwargs["stop"]
        if params.json_schema is not None:
            schema = {"name": "answer", "schema": json.loads(params.json_schema), "strict": True}
            if self.is_chat_model:
                kwargs["response_format"] = {"type": "json_schema", "json_schema": schema}
            elif told:
                extra["json_schema"] = params.json_schema
        return {"model": s.lora_path or self.model_name, **kwargs, **({"extra_body": extra} if extra else {})}

    async def _is_told(self) -> bool:
        """Whether the server is bough's, and so takes envelopes."""
        if self._told is None:
            try:
                listed = await self._call(self.client.models.list())
                self._told = any(model.owned_by == "bough" for model in listed.data)
            except BackendError as error:
                if error.transient:  # which the call itself will say, and the next one asks again
                    return False
                self._told = False
            except Exception:  # a server without a list of models
                self._told = False
        return self._told

    async def _of_dtype(self, s: StreamExecutor, params: SglSamplingParams) -> Generated:
        assert not self.is_chat_model, "constrained type not supported on chat model"
        kwargs, before, quote = await self._kwargs(s, params), s.text_, ""
        if params.dtype in (str, "str", "string"):
            before, quote = before + '"', '"'
            kwargs["stop"] = '"'
        elif params.dtype in (int, "int"):
            kwargs |= {"stop": [" "], "logit_bias": self._digits()}
        else:
            raise ValueError(f"Unknown dtype: {params.dtype}")
        answer = await self._answer(s, kwargs, prompt=before)
        texts = self._texts(answer)
        meta = self.token_usage.add(answer.usage)
        return ([quote + t + quote for t in texts] if isinstance(texts, list) else quote + texts + quote), meta

    def _texts(self, answer: Any, read: Callable[[str], str] = str) -> str | list[str]:
        texts = [read((c.message.content if self.is_chat_model else c.text) or "") for c in answer.choices]
        return texts[0] if len(texts) == 1 else texts

    def _meta(self, s: StreamExecutor, answer: Any) -> dict[str, Any]:
        """What ``answer``, or the last event of one, says was used and granted; it has answered a lease."""
        s.lease = None
        program = getattr(answer, "program", None)
        return self.token_usage.add(answer.usage) | ({"program": program} if program else {})

    async def _call(self, request: Any) -> Any:
        with _translated():
            return await request

    def _tokenizer(self) -> Any:
        import tiktoken

        try:
            return tiktoken.encoding_for_model(self.model_name)
        except KeyError:
            return tiktoken.get_encoding("cl100k_base")

    def _digits(self) -> dict[str, int]:
        """A bias that leaves only numbers, blanks and the end."""
        tokenizer = self._tokenizer()
        ids = [i for i in range(tokenizer.n_vocab) if _is_number(tokenizer, i)]
        return {str(i): 100 for i in [*ids[:BIASED_TOKENS], tokenizer.eot_token]}


def _usage_of(error: BaseException) -> Any:
    """What a request that was aborted had used; None where its error does not say."""
    from openai.types import CompletionUsage

    said = getattr(error.__cause__, "body", None)
    usage = said.get("usage") if isinstance(said, dict) else None
    return usage and CompletionUsage.model_validate(usage)


@contextmanager
def _translated() -> Iterator[None]:
    """What the client raises in here as a BackendError."""
    import openai

    try:
        yield
    except openai.APIStatusError as error:
        raise BackendError(error.message, error.status_code, retry_after(error.response.headers)) from error
    except openai.APIConnectionError as error:
        raise BackendError(str(error)) from error


def _is_number(tokenizer: Any, token: int) -> bool:
    try:
        text = tokenizer.decode_single_token_bytes(token)
    except KeyError:
        return False
    return bool(text.isdigit() or text == b" ")
