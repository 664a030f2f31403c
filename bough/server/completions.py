"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from msgspec import UNSET

from bough.base.errors import InvalidRequest
from bough.base.messages import Finish, Logprob
from bough.engine.generation import Chunk, GenerateOptions
from bough.server.answers import (
    CompletionChoice,
    CompletionLogprobs,
    Response,
    Tally,
    TokenNames,
    check_finish,
    event,
    finite,
)
from bough.server.constraints import own_names
from bough.server.errors import encode_json
from bough.server.merge import Piece, run_prompts
from bough.server.options import (
    Lengths,
    PromptIds,
    about_request,
    at_least_one,
    default_max_tokens,
    encode_prompts,
    most_tokens,
    openai_options,
    request_rids,
    sequence_rids,
    split_prompt,
    truncation,
)
from bough.server.programs import program_of
from bough.server.schema import UNSUPPORTED_COMPLETION, CompletionRequest, refuse_unsupported
from bough.server.service import Service
from bough.server.thinking import thoughtful
from bough.server.work import Answer, Call

DEFAULT_MAX_TOKENS = 16


@dataclass(slots=True)
class _Choice:
    """One sequence as its chunks arrive.

    ``offset`` counts the characters of the tokens shown so far; ``echoed`` says that the prompt was shown.
    """

    index: int
    prompt: PromptIds
    echoed: bool
    offset: int = 0
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    finish: Finish | None = None


@dataclass(slots=True)
class _Job:
    """A completions request, ready to run. Choices are prompt-major."""

    call: Call
    body: CompletionRequest
    prompts: list[PromptIds]
    options: list[GenerateOptions]
    envelope: Response
    names: TokenNames
    choices: list[_Choice]
    tally: Tally = field(default_factory=Tally)

    def run(self) -> AsyncGenerator[Piece, None]:
        work = [(prompt.ids, options) for prompt, options in zip(self.prompts, self.options, strict=True)]
        return run_prompts(self.call.engine, self.call.service.metrics, work, self.call.started)

    def take(self, prompt: int, chunk: Chunk) -> _Choice:
        """The choice that ``chunk`` belongs to, with its bookkeeping done. Raises what bad ends mean."""
        choice = self.choices[prompt * self.options[0].n + chunk.index]
        self.tally.add(prompt, chunk)
        choice.prompt_logprobs += chunk.prompt_logprobs or ()
        if chunk.finish is not None:
            check_finish(chunk.finish, self.tally.usage())
            choice.finish = chunk.finish
            self.envelope.note(chunk.finish)
        return choice


async def completions(call: Call, body: CompletionRequest) -> Answer:
    service, engine = call.service, call.engine
    n = _check(body, service)
    service.check_model(body.model)
    given = split_prompt(body.prompt, service.limits)
    if len(given) * n > service.limits.sequences:
        raise InvalidRequest(
            f"{len(given)} prompts with n = {n} are more than {service.limits.sequences} sequences", param="n"
        )
    prompts = await encode_prompts(
        engine, service, given, add_special=body.add_special_tokens is not False, param="prompt",
        bound=truncation(body, service, body.max_tokens),
    )  # fmt: skip
    response_id, rids = request_rids(body.rid, body.request_id, "cmpl-", len(prompts))
    program = program_of(call.program, body.program)
    options = []
    for prompt, rid in zip(prompts, rids, strict=True):
        made = replace(openai_options(service, engine, body, _lengths(service, body, prompt), rid, program), n=n)
        if body.add_special_tokens is not False:
            made = replace(made, prompt_text=prompt.text)
        options.append(thoughtful(made, body, call, prompt.ids))
    work = zip((prompt.ids for prompt in prompts), options, strict=True)
    service.admit(call.flight, sequence_rids(options), most_tokens(service, work))
    envelope = Response(
        id=response_id, object="text_completion", created=int(time.time()),
        model=options[0].namespace.adapter or service.model_name, choices=[],
        **about_request(body, service.limits),
    )  # fmt: skip
    names = TokenNames(engine.tokenizer, bool(body.return_tokens_as_token_ids))
    choices = [_Choice(i * n + j, prompt, not body.echo) for i, prompt in enumerate(prompts) for j in range(n)]
    job = _Job(call, body, prompts, options, envelope, names, choices)
    return _stream(job) if body.stream else await _complete(job)


def _check(body: CompletionRequest, service: Service) -> int:
    """How many sequences a prompt has, of which some may only be candidates. Raises InvalidRequest."""
    refuse_unsupported(body, UNSUPPORTED_COMPLETION)
    n = at_least_one("n", body.n, service.limits.n)
    best_of = n if body.best_of is None else at_least_one("best_of", body.best_of, service.limits.n)
    if best_of < n:
        raise InvalidRequest(f"best_of must be at least n, which is {n}, not {best_of}", param="best_of")
    if best_of > n and body.stream:
        raise InvalidRequest(
            "the best of several can only be chosen when all are there, not in a stream", param="best_of"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs are not available in streams", param="prompt_logprobs")
    return best_of


def _lengths(service: Service, body: CompletionRequest, prompt: PromptIds) -> Lengths:
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = default_max_tokens(DEFAULT_MAX_TOKENS, len(prompt.ids), service)
    logprobs = body.logprobs
    if logprobs is None and body.best_of is not None and body.best_of > (body.n or 1):
        logprobs = 0  # by which the best are chosen
    wanted = [k for k in (body.prompt_logprobs, body.logprobs if body.echo else None) if k is not None]
    if wanted:
        return Lengths(max_tokens, logprobs, max(wanted))
    if max_tokens == 0:  # a forward over the prompt that reports nothing
        return Lengths(0, logprobs, 0, len(prompt.ids))
    return Lengths(max_tokens, logprobs, None)


def _best(job: _Job) -> list[_Choice]:
    """Of each prompt's candidates the n whose tokens are the likeliest on average, the best first."""
    candidates, n = job.options[0].n, job.body.n or 1
    if candidates == n:
        return job.choices
    found: list[_Choice] = []
    for first in range(0, len(job.choices), candidates):
        ranked = sorted(job.choices[first : first + candidates], key=_mean_logprob, reverse=True)
        found += ranked[:n]
    for index, choice in enumerate(found):
        choice.index = index
    return found


def _mean_logprob(choice: _Choice) -> float:
    return sum(entry.logprob for entry in choice.logprobs) / max(1, len(choice.logprobs))


async def _complete(job: _Job) -> bytes:
    body = job.body
    with own_names(job.body):
        async with aclosing(job.run()) as pieces:
            async for prompt, chunk in pieces:
                choice = job.take(prompt, chunk)
                choice.texts.append(chunk.text)
                choice.tokens += chunk.tokens
                choice.logprobs += chunk.logprobs or ()
    answers = []
    for choice in _best(job):
        assert choice.finish is not None
        answer = _answer(job, choice, "".join(choice.texts), choice.tokens, choice.logprobs, choice.finish)
        if body.return_token_ids or body.return_prompt_token_ids:
            answer.prompt_token_ids = choice.prompt.ids
        if body.prompt_logprobs is not None:
            answer.prompt_logprobs = job.names.prompt(
                len(choice.prompt.ids), choice.prompt_logprobs, body.prompt_logprobs
            )
        answers.append(answer)
    job.envelope.choices = answers
    job.envelope.usage = job.tally.usage()
    return encode_json(job.envelope)


async def _stream(job: _Job) -> AsyncGenerator[bytes, None]:
    body, envelope = job.body, job.envelope
    wanted = body.stream_options
    include_usage = wanted is not None and bool(wanted.include_usage)
    continuous = include_usage and wanted is not None and bool(wanted.continuous_usage_stats)
    if include_usage:
        envelope.usage = None
    with own_names(job.body):
        async with aclosing(job.run()) as pieces:
            async for prompt, chunk in pieces:
                choice = job.take(prompt, chunk)
                if not (chunk.text or chunk.tokens or chunk.finish):
                    continue
                first = not choice.tokens and not choice.offset
                answer = _answer(job, choice, chunk.text, chunk.tokens, chunk.logprobs or [], chunk.finish)
                if (body.return_token_ids or body.return_prompt_token_ids) and first:
                    answer.prompt_token_ids = choice.prompt.ids
                choice.tokens += chunk.tokens
                if continuous:
                    envelope.usage = job.tally.usage()
                envelope.choices = [answer]
                yield event(envelope)
    if include_usage:
        envelope.usage = job.tally.usage()
        envelope.choices = []
        yield event(envelope)


def _answer(
    job: _Job, choice: _Choice, text: str, tokens: list[int], logprobs: list[Logprob], finish: Finish | None
) -> CompletionChoice:
    """News of a choice, with the prompt in front where it is to be echoed and was not yet."""
    shown = CompletionLogprobs([], [], [], []) if job.body.logprobs is not None else None
    if not choice.echoed:
        choice.echoed = True
        text = _echo(job, choice) + text
        if shown is not None:
            ids, entries = choice.prompt.ids, choice.prompt_logprobs
            _show(job, choice, shown, ids, [*[None] * (len(ids) - len(entries)), *entries])
    if shown is not None:
        _show(job, choice, shown, tokens, logprobs)
    answer = CompletionChoice(choice.index, text, shown, token_ids=tokens if job.body.return_token_ids else UNSET)
    if finish is not None:
        answer.finish_reason, answer.matched_stop, answer.stop_reason = finish.kind, finish.matched, finish.matched
    return answer


def _echo(job: _Job, choice: _Choice) -> str:
    if choice.prompt.text is not None:
        return choice.prompt.text
    return job.call.engine.tokenizer.decode(choice.prompt.ids, skip_special=job.options[0].skip_special_tokens)


def _show(
    job: _Job,
    choice: _Choice,
    shown: CompletionLogprobs,
    tokens: list[int],
    entries: list[Logprob] | list[Logprob | None],
) -> None:
    """Append ``tokens`` with their logprobs; an entry of None is a token before which there is nothing."""
    names, most = job.names, job.body.logprobs or 0
    for token, entry in zip(tokens, entries, strict=False):
        text = names.text(token)
        shown.tokens.append(text)
        shown.text_offset.append(choice.offset)
        choice.offset += names.length(token)
        if entry is None:
            shown.token_logprobs.append(None)
            shown.top_logprobs.append(None)
            continue
        shown.token_logprobs.append(finite(entry.logprob))
        top = {names.text(t): finite(p) for t, p in reversed([*entry.top[:most], *entry.asked])}
        # The chosen token is always among them. Of tokens with equal text the likelier one is kept.
        top.setdefault(text, finite(entry.logprob))
        shown.top_logprobs.append(top)
