"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec import UNSET

from bough.base.errors import InvalidRequest
from bough.base.messages import Finish, Logprob
from bough.engine.async_engine import AsyncEngine
from bough.engine.generation import Chunk, GenerateOptions
from bough.server.answers import (
    ChatChoice,
    ChatChunkChoice,
    Delta,
    Message,
    Response,
    Tally,
    TokenNames,
    check_finish,
    event,
)
from bough.server.errors import encode_json
from bough.server.merge import run_prompts
from bough.server.messages import check_tools, normalise_messages
from bough.server.options import Lengths, openai_options, request_rids, sequence_rids
from bough.server.schema import UNSUPPORTED_CHAT, ChatRequest, TokenizeRequest, refuse_unsupported
from bough.server.service import Service
from bough.server.work import Answer, Call


@dataclass(slots=True)
class _Job:
    """A chat request, ready to run."""

    call: Call
    ids: list[int]
    options: GenerateOptions
    envelope: Response
    names: TokenNames
    top: int
    tally: Tally = field(default_factory=Tally)


async def render(engine: AsyncEngine, service: Service, body: ChatRequest | TokenizeRequest) -> list[int]:
    """Prompt ids of the request's messages. Raises InvalidRequest for what the template cannot render."""
    messages = normalise_messages(body.messages or [], service.limits)
    choice = body.tool_choice if isinstance(body, ChatRequest) else None
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    return await engine.render_chat(
        messages,
        tools=check_tools(body.tools, choice),
        add_generation_prompt=not continued and body.add_generation_prompt is not False,
        continue_final_message=continued,
        options=body.chat_template_kwargs or {},
    )


async def chat(call: Call, body: ChatRequest) -> Answer:
    _check(body)
    service = call.service
    service.check_model(body.model)
    ids = await render(call.engine, service, body)
    response_id, rids = request_rids(body.rid, body.request_id, "chatcmpl-", 1)
    top = body.top_logprobs or 0
    lengths = Lengths(
        body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        top if body.logprobs else None,
        body.prompt_logprobs,
    )
    options = openai_options(service, call.engine, body, lengths, rids[0])
    service.admit(call.flight, sequence_rids([options]))
    streaming = bool(body.stream)
    envelope = Response(
        id=response_id,
        object="chat.completion.chunk" if streaming else "chat.completion",
        created=int(time.time()),
        model=service.model_name,
        choices=[],
    )
    names = TokenNames(call.engine.tokenizer, bool(body.return_tokens_as_token_ids))
    job = _Job(call, ids, options, envelope, names, top)
    return _stream(job, body) if streaming else await _complete(job, body)


def _check(body: ChatRequest) -> None:
    refuse_unsupported(body, UNSUPPORTED_CHAT)
    if body.modalities not in (None, [], ["text"]):
        raise InvalidRequest("modalities other than text are not supported yet by this version", param="modalities")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs are not available in streams", param="prompt_logprobs")


async def _complete(job: _Job, body: ChatRequest) -> bytes:
    n, call = job.options.n, job.call
    texts: list[list[str]] = [[] for _ in range(n)]
    tokens: list[list[int]] = [[] for _ in range(n)]
    logprobs: list[list[Logprob]] = [[] for _ in range(n)]
    prompt_logprobs: list[Logprob] = []
    finishes: dict[int, Finish] = {}
    run = run_prompts(call.engine, call.service.metrics, [(job.ids, job.options)], call.started)
    async with aclosing(run) as pieces:
        async for _, chunk in pieces:
            job.tally.add(0, chunk)
            i = chunk.index
            texts[i].append(chunk.text)
            tokens[i] += chunk.tokens
            logprobs[i] += chunk.logprobs or ()
            if i == 0:
                prompt_logprobs += chunk.prompt_logprobs or ()
            if chunk.finish is not None:
                check_finish(chunk.finish)
                finishes[i] = chunk.finish
            job.envelope.warn(chunk.finish)
    job.envelope.choices = [
        ChatChoice(
            i,
            Message("".join(texts[i])),
            check_finish(finishes[i]),
            logprobs=job.names.chat(logprobs[i], job.top) if body.logprobs else None,
            matched_stop=finishes[i].matched,
            stop_reason=finishes[i].matched,
            token_ids=tokens[i] if body.return_token_ids else UNSET,
        )
        for i in range(n)
    ]
    job.envelope.usage = job.tally.usage()
    if body.return_token_ids:
        job.envelope.prompt_token_ids = job.ids
    if body.prompt_logprobs is not None:
        job.envelope.prompt_logprobs = job.names.prompt(len(job.ids), prompt_logprobs, body.prompt_logprobs)
    return encode_json(job.envelope)


async def _stream(job: _Job, body: ChatRequest) -> AsyncGenerator[bytes, None]:
    call, envelope = job.call, job.envelope
    options = body.stream_options
    include_usage = options is not None and bool(options.include_usage)
    continuous = include_usage and options is not None and bool(options.continuous_usage_stats)
    if include_usage:
        envelope.usage = None
    begun = False
    run = run_prompts(call.engine, call.service.metrics, [(job.ids, job.options)], call.started)
    async with aclosing(run) as pieces:
        async for _, chunk in pieces:
            job.tally.add(0, chunk)
            # Raised before anything is sent, an error still has its HTTP status.
            reason = None if chunk.finish is None else check_finish(chunk.finish)
            if continuous:
                envelope.usage = job.tally.usage()
            envelope.warn(chunk.finish)
            choices = _deltas(job, body, chunk, reason)
            if not begun:
                begun = True
                yield _roles(job, body) + _events(envelope, choices)
            elif choices:
                yield _events(envelope, choices)
    if include_usage:
        envelope.usage = job.tally.usage()
        envelope.choices = []
        yield event(envelope)


def _roles(job: _Job, body: ChatRequest) -> bytes:
    """First events: the role of every choice, in order of index, as clients' accumulators need it."""
    first = replace_ids(job.envelope, job.ids) if body.return_token_ids else job.envelope
    return _events(first, [ChatChunkChoice(i, Delta(role="assistant", content="")) for i in range(job.options.n)])


def replace_ids(envelope: Response, ids: list[int]) -> Response:
    return Response(
        id=envelope.id,
        object=envelope.object,
        created=envelope.created,
        model=envelope.model,
        choices=[],
        usage=envelope.usage,
        prompt_token_ids=ids,
    )


def _deltas(job: _Job, body: ChatRequest, chunk: Chunk, reason: str | None) -> list[ChatChunkChoice]:
    choices = []
    with_ids = bool(body.return_token_ids and chunk.tokens)
    if chunk.text or chunk.logprobs or with_ids:
        logprobs = job.names.chat(chunk.logprobs, job.top) if body.logprobs and chunk.logprobs else None
        choices.append(
            ChatChunkChoice(
                chunk.index,
                Delta(content=chunk.text),
                logprobs,
                token_ids=chunk.tokens if with_ids else UNSET,
            )
        )
    if chunk.finish is not None:
        matched = chunk.finish.matched
        choices.append(ChatChunkChoice(chunk.index, Delta(), None, reason, matched, matched))
    return choices


def _events(envelope: Response, choices: list[ChatChunkChoice]) -> bytes:
    events = []
    for choice in choices:
        envelope.choices = [choice]
        events.append(event(envelope))
    return b"".join(events)
