"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, UnsetType, structs

from bough.base.errors import InvalidRequest
from bough.base.limits import Limits
from bough.base.messages import Finish, Logprob
from bough.base.program import Lease
from bough.engine.async_engine import AsyncEngine
from bough.engine.generation import Chunk, GenerateOptions
from bough.server.answers import (
    ChatChoice,
    ChatChunkChoice,
    Delta,
    Response,
    Tally,
    TokenNames,
    Usage,
    check_finish,
    event,
)
from bough.server.constraints import field_of, own_names
from bough.server.errors import encode_json
from bough.server.merge import run_prompts
from bough.server.messages import normalise_messages
from bough.server.options import (
    Lengths,
    about_request,
    check_ids,
    default_max_tokens,
    kept,
    most_tokens,
    openai_options,
    request_rids,
    sequence_rids,
    truncation,
)
from bough.server.programs import cache_lease, program_of
from bough.server.reply import Reply, message_of
from bough.server.schema import UNSUPPORTED_CHAT, ChatRequest, TokenizeRequest, refuse_unsupported
from bough.server.service import Service
from bough.server.shape import answer_shape
from bough.server.work import Answer, Call
from bough.text.memory import Bound
from bough.text.tools.families import JSON
from bough.text.tools.prompt import tell_tools, write_history


@dataclass(slots=True)
class _Job:
    """A chat request, ready to run."""

    call: Call
    ids: list[int]
    options: GenerateOptions
    envelope: Response
    names: TokenNames
    top: int
    echo: str
    """What every answer begins with before anything is generated."""
    replies: list[Reply]
    own_names: AbstractContextManager[None]
    """What is wrong with the constraint names the field that it came from."""
    enforced: bool
    """The grammar lets no call pass whose arguments are no JSON."""
    tally: Tally = field(default_factory=Tally)

    def usage(self) -> Usage:
        self.tally.reasoning = {i: reply.reasoning_tokens for i, reply in enumerate(self.replies)}
        return self.tally.usage()

    def warnings(self) -> list[str]:
        """What of the constraint was not enforced."""
        return [] if isinstance(self.envelope.warnings, UnsetType) else self.envelope.warnings

    def program(self) -> dict[str, Any] | None:
        """What program and lease were granted."""
        return None if isinstance(self.envelope.program, UnsetType) else self.envelope.program


@dataclass(slots=True)
class ChatStream:
    """A chat that other endpoints translate: its choices' news, the usage so far, what was not enforced, and granted.

    ``model`` is the name of what answers. ``enforced``: the model can write no call whose arguments are no JSON.
    """

    usage: Callable[[], Usage]
    warnings: Callable[[], list[str]]
    program: Callable[[], dict[str, Any] | None]
    pieces: AsyncGenerator[list[ChatChunkChoice], None]
    enforced: bool
    model: str


async def render(
    engine: AsyncEngine, service: Service, body: ChatRequest | TokenizeRequest, bound: Bound | None = None
) -> list[int]:
    """Prompt ids of the request's messages, or at least those that ``bound`` wants.

    Raises InvalidRequest for what the template cannot render.
    """
    messages = normalise_messages(body.messages or [], service.limits)
    options = dict(body.chat_template_kwargs or {})
    if isinstance(body, ChatRequest):
        for name in ("reasoning_effort", "verbosity", "documents"):
            if (value := getattr(body, name)) is not None:
                options.setdefault(name, value)
        if body.thinking is not None:
            for name in ("enable_thinking", "thinking"):
                options.setdefault(name, body.thinking.type == "enabled")
    tools = service.tools.use(body).shown
    if engine.template is not None and not engine.template.reads_tools:
        family = service.form.tools or JSON
        messages = write_history(messages, family)
        if tools:
            messages, tools = tell_tools(messages, tools, family), None
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    return await engine.render_chat(
        messages,
        tools=tools,
        add_generation_prompt=not continued and body.add_generation_prompt is not False,
        continue_final_message=continued,
        options=options,
        bound=bound,
    )


async def chat(call: Call, body: ChatRequest) -> Answer:
    job = await _open(call, body)
    return _stream(job, body) if body.stream else await _complete(job, body)


async def open_chat(call: Call, body: ChatRequest, *, cut: bool = False) -> ChatStream:
    """Begin ``body`` on behalf of another endpoint. Raises what is wrong with it.

    ``cut`` lowers ``max_tokens`` to what the context leaves, for APIs in which it is a bound and not a promise.
    """
    job = await _open(call, body, cut)
    return ChatStream(job.usage, job.warnings, job.program, _pieces(job, body), job.enforced, job.envelope.model)


async def _open(call: Call, body: ChatRequest, cut: bool = False) -> _Job:
    service = call.service
    _check(body, service.limits)
    service.check_model(body.model)
    use = service.tools.use(body)
    bound = truncation(body, service, body.max_completion_tokens or body.max_tokens)
    if body.input_ids:
        check_ids(body.input_ids, service.hello.model.vocab_size, "input_ids")
        for word in ("echo", "continue_final_message"):
            if getattr(body, word):
                raise InvalidRequest(f"{word} is about the last message; input_ids are the whole prompt", param=word)
        ids = body.input_ids
        body = structs.replace(body, messages=[])
    else:
        ids = await render(call.engine, service, body, bound)
    ids = kept(ids, bound)
    if cut and body.max_tokens is not None:
        body.max_tokens = default_max_tokens(body.max_tokens, len(ids), service)
    shape = answer_shape(service, call.engine.tokenizer, body, use, ids)
    response_id, rids = request_rids(body.rid, body.request_id, "chatcmpl-", 1)
    top = body.top_logprobs or 0
    lengths = Lengths(
        body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        top if body.logprobs else None,
        body.prompt_logprobs,
    )
    program = program_of(call.program, body.program)
    if program is not None and program.after:
        raise InvalidRequest(
            "what follows an answer in a chat is for its template to say; program.after is for /generate and "
            "/v1/completions",
            param="program.after",
        )
    options = openai_options(service, call.engine, body, lengths, rids[0], program, await _lease(call, body, ids))
    asked = options.constraint
    if use.mode == "required" and asked is not None and asked.kind not in ("json_schema", "json_object"):
        name = field_of(body)
        raise InvalidRequest(f"{name} and a tool_choice that requires a call exclude each other", param=name)
    options = shape.options(options)
    own = own_names(body) if options.constraint is asked else use.own_names(field_of(body))
    service.admit(call.flight, sequence_rids([options]), most_tokens(service, [(ids, options)]))
    prompt_text = call.engine.tokenizer.decode(ids, skip_special=False) if body.return_prompt_text else UNSET
    envelope = Response(
        id=response_id,
        object="chat.completion.chunk" if body.stream else "chat.completion",
        created=int(time.time()),
        model=options.namespace.adapter or service.model_name,
        choices=[],
        prompt_text=prompt_text,
        **about_request(body, service.limits),
    )
    names = TokenNames(call.engine.tokenizer, bool(body.return_tokens_as_token_ids))
    replies = [shape.reply(asked is not None) for _ in range(options.n)]
    # A grammar of tags knows the first format of the family, and the parser reads all.
    covered = use.mode == "required" or (service.form.tools is not None and len(service.form.tools.triggers) == 1)
    enforced = covered and options.constraint is not asked
    return _Job(call, ids, options, envelope, names, top, _echo(body), replies, _own_names(body, own), enforced)


@contextmanager
def _own_names(body: ChatRequest, of_constraint: AbstractContextManager[None]) -> Iterator[None]:
    """Has errors name the field that the client set, of the length as of the constraint."""
    try:
        with of_constraint:
            yield
    except InvalidRequest as error:
        if error.param == "max_tokens" and body.max_completion_tokens is not None:
            error.param = "max_completion_tokens"
        raise


async def _lease(call: Call, body: ChatRequest, ids: list[int]) -> Lease | None:
    """What of the prompt ``ids`` is to be kept: all, or what the messages before the last breakpoint begin with."""
    lease, n = cache_lease(body), (body.prompt_cache_options or {}).get("messages")
    if lease is None or not isinstance(n, int) or not 0 < n < len(body.messages):
        return lease
    before = structs.replace(
        body, messages=body.messages[:n], add_generation_prompt=False, continue_final_message=False
    )
    try:
        begin = await render(call.engine, call.service, before)
    except InvalidRequest:  # not every template takes the beginning of a conversation
        return lease
    same = next((i for i, (a, b) in enumerate(zip(begin, ids)) if a != b), min(len(begin), len(ids)))
    return structs.replace(lease, upto=same) if same else None


def _echo(body: ChatRequest) -> str:
    """The text of the last message where the client wants it repeated; of an assistant's only, as in vLLM."""
    if not body.echo or body.messages[-1].get("role") != "assistant":
        return ""
    content = body.messages[-1].get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


def _check(body: ChatRequest, limits: Limits) -> None:
    refuse_unsupported(body, UNSUPPORTED_CHAT)
    if body.modalities not in (None, [], ["text"]):
        raise InvalidRequest("modalities other than text are not supported yet by this version", param="modalities")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if not 0 <= (body.top_logprobs or 0) <= limits.logprobs:
        raise InvalidRequest(
            f"top_logprobs must be in [0, {limits.logprobs}], not {body.top_logprobs}", param="top_logprobs"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs are not available in streams", param="prompt_logprobs")


async def _complete(job: _Job, body: ChatRequest) -> bytes:
    n, call = job.options.n, job.call
    deltas = [[Delta(content=job.echo)] if job.echo else [] for _ in range(n)]
    tokens: list[list[int]] = [[] for _ in range(n)]
    logprobs: list[list[Logprob]] = [[] for _ in range(n)]
    prompt_logprobs: list[Logprob] = []
    finishes: dict[int, Finish] = {}
    run = run_prompts(call.engine, call.service.metrics, [(job.ids, job.options)], call.started)
    with job.own_names:
        async with aclosing(run) as pieces:
            async for _, chunk in pieces:
                job.tally.add(0, chunk)
                i = chunk.index
                deltas[i] += job.replies[i].take(chunk)
                tokens[i] += chunk.tokens
                logprobs[i] += chunk.logprobs or ()
                if i == 0:
                    prompt_logprobs += chunk.prompt_logprobs or ()
                if chunk.finish is not None:
                    check_finish(chunk.finish, job.usage())
                    finishes[i] = chunk.finish
                job.envelope.note(chunk.finish)
    job.envelope.choices = [
        ChatChoice(
            i,
            message_of(deltas[i]),
            job.replies[i].reason(finishes[i]),
            logprobs=job.names.chat(logprobs[i], job.top) if body.logprobs else None,
            matched_stop=finishes[i].matched,
            stop_reason=finishes[i].matched,
            token_ids=tokens[i] if body.return_token_ids else UNSET,
            parse_error=job.replies[i].trouble or UNSET,
        )
        for i in range(n)
    ]
    job.envelope.usage = job.usage()
    if body.return_token_ids or body.return_prompt_token_ids:
        job.envelope.prompt_token_ids = job.ids
    if body.prompt_logprobs is not None:
        job.envelope.prompt_logprobs = job.names.prompt(len(job.ids), prompt_logprobs, body.prompt_logprobs)
    return encode_json(job.envelope)


async def _stream(job: _Job, body: ChatRequest) -> AsyncGenerator[bytes, None]:
    envelope, options = job.envelope, body.stream_options
    include_usage = options is not None and bool(options.include_usage)
    continuous = include_usage and options is not None and bool(options.continuous_usage_stats)
    if include_usage:
        envelope.usage = None
    if body.return_token_ids or body.return_prompt_token_ids:
        envelope.prompt_token_ids = job.ids
    async with aclosing(_pieces(job, body)) as pieces:
        async for choices in pieces:
            if continuous:
                envelope.usage = job.usage()
            # Whatever comes first are the roles of all, which alone tell of the prompt.
            head = _events(envelope, choices[: job.options.n])
            envelope.prompt_token_ids = envelope.prompt_text = UNSET
            yield head + _events(envelope, choices[job.options.n :])
    if include_usage:
        envelope.usage = job.usage()
        envelope.choices = []
        yield event(envelope)


async def _pieces(job: _Job, body: ChatRequest) -> AsyncGenerator[list[ChatChunkChoice], None]:
    """News of the choices; first of all the role of every one, in order of index, as clients' accumulators need it."""
    call = job.call
    begun = False
    run = run_prompts(call.engine, call.service.metrics, [(job.ids, job.options)], call.started)
    with job.own_names:
        async with aclosing(run) as pieces:
            async for _, chunk in pieces:
                job.tally.add(0, chunk)
                job.envelope.note(chunk.finish)
                choices = _deltas(job, body, chunk)
                if not begun:
                    begun = True
                    role = Delta(role="assistant", content=job.echo)
                    choices = [*(ChatChunkChoice(i, role) for i in range(job.options.n)), *choices]
                if choices:
                    yield choices


def _deltas(job: _Job, body: ChatRequest, chunk: Chunk) -> list[ChatChunkChoice]:
    """What ``chunk`` adds to its choice. Raises what an end that is not a good one means."""
    reply = job.replies[chunk.index]
    deltas = reply.take(chunk)
    # Raised before anything is sent, an error still has its HTTP status.
    reason = None if chunk.finish is None else reply.reason(chunk.finish)
    with_ids = bool(body.return_token_ids and chunk.tokens)
    if not deltas and (chunk.logprobs or with_ids):
        deltas = [Delta(content="")]
    choices = [ChatChunkChoice(chunk.index, delta) for delta in deltas]
    if choices:
        if body.logprobs and chunk.logprobs:
            choices[0].logprobs = job.names.chat(chunk.logprobs, job.top)
        choices[0].token_ids = chunk.tokens if with_ids else UNSET
    if chunk.finish is not None:
        matched, trouble = chunk.finish.matched, reply.trouble or UNSET
        choices.append(ChatChunkChoice(chunk.index, Delta(), None, reason, matched, matched, parse_error=trouble))
    return choices


def _events(envelope: Response, choices: list[ChatChunkChoice]) -> bytes:
    events = []
    for choice in choices:
        envelope.choices = [choice]
        events.append(event(envelope))
    return b"".join(events)
