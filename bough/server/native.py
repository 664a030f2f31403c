"""POST and PUT /generate, in SGLang's format: cumulative text, logprobs as (logprob, id, text) triples."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from msgspec import UnsetType

from bough.base.errors import InvalidRequest
from bough.base.messages import Finish, Logprob, Namespace
from bough.base.params import SamplingParams
from bough.engine.async_engine import AsyncEngine
from bough.engine.generation import Chunk, GenerateOptions
from bough.server.answers import finite
from bough.server.constraints import native_constraint
from bough.server.errors import encode_json, finish_error
from bough.server.merge import run_prompts
from bough.server.options import (
    PromptIds,
    at_least_one,
    bad_words_of,
    begun,
    default_max_tokens,
    encode_prompts,
    most_tokens,
    new_id,
    salt_of,
    sequence_rids,
    strings,
    timeout_of,
    top_k_of,
)
from bough.server.programs import granted, lease_of, program_of
from bough.server.schema import (
    CONSTRAINTS,
    UNSUPPORTED_NATIVE,
    UNSUPPORTED_NATIVE_SAMPLING,
    GenerateRequest,
    NativeSampling,
    refuse_constraints,
    refuse_unsupported,
)
from bough.server.service import Service
from bough.server.texts import Kept
from bough.server.thinking import thoughtful
from bough.server.work import Answer, Call

T = TypeVar("T")
Triple = tuple[float | None, int, str | None]

DEFAULT_MAX_NEW_TOKENS = 128

PER_PROMPT = (
    "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "extra_key", "cache_salt",
    "lora_path", "program", "lease",
)  # fmt: skip
"""Fields that may be a list of one value for each prompt."""


@dataclass(slots=True)
class _Sequence:
    """One sequence as its chunks arrive. Logprobs are dropped once they were sent to a streaming client."""

    prompt: PromptIds
    options: GenerateOptions
    rid: str
    texts: list[str] = field(default_factory=list)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    logprobs_seen: int = 0
    last: Chunk | None = None

    def take(self, chunk: Chunk) -> None:
        self.last = chunk
        self.logprobs += chunk.logprobs or ()
        self.logprobs_seen += len(chunk.logprobs or ())
        self.prompt_logprobs += chunk.prompt_logprobs or ()
        if not self.options.unseen:
            self.text += chunk.text
            self.tokens += chunk.tokens


@dataclass(slots=True)
class _Job:
    """A /generate request, ready to run. ``sequences`` are prompt-major."""

    call: Call
    body: GenerateRequest
    sequences: list[_Sequence]
    work: list[tuple[Sequence[int], GenerateOptions]]
    single: bool
    kept: Kept | None = None

    def find(self, prompt: int, chunk: Chunk) -> int:
        return prompt * self.work[0][1].n + chunk.index


async def generate(call: Call, body: GenerateRequest) -> Answer:
    refuse_unsupported(body, UNSUPPORTED_NATIVE)
    refuse_constraints(body, CONSTRAINTS, "json_schema, regex, ebnf or structural_tag in sampling_params")
    if body.modalities not in (None, [], ["text"]):
        raise InvalidRequest("modalities other than text are not supported yet by this version", param="modalities")
    body.program = body.program or program_of(call.program, None)
    given, batch = _prompts(body, call.service)
    param = "text" if body.input_ids is None else "input_ids"
    if body.prefix is not None:
        given = [*begun(call.service, call.principal.tenant, body.prefix, given, param)]
    prompts = await encode_prompts(call.engine, call.service, given, add_special=True, param=param)
    _check_lists(body, len(prompts))
    work, sequences = [], []
    rids = _rids(body, len(prompts))
    for i, prompt in enumerate(prompts):
        options = _options(call.service, call.engine, body, i, prompt, rids[i])
        options = thoughtful(options, body, call, prompt.ids, bool(body.require_reasoning))
        work.append((prompt.ids, options))
        for rid in sequence_rids([options]):
            sequences.append(_Sequence(prompt, options, rid))
    if len({options.n for _, options in work}) > 1:
        raise InvalidRequest("n must be the same for all prompts of a batch", param="n")
    if len(sequences) > call.service.limits.sequences:
        raise InvalidRequest(f"the request has more than {call.service.limits.sequences} sequences", param="n")
    call.service.admit(call.flight, [s.rid for s in sequences], most_tokens(call.service, work))
    job = _Job(call, body, sequences, [(ids, o) for ids, o in work], not batch and len(sequences) == 1)
    return _stream(job) if body.stream else await _complete(job)


def _prompts(body: GenerateRequest, service: Service) -> tuple[list[str | list[int]], bool]:
    """(prompts, whether the client sent a batch)."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("either text or input_ids is needed, and not both", param="text")
    if isinstance(body.text, str):
        return [body.text], False
    items: list[Any] = body.text if body.text is not None else body.input_ids or []
    param = "text" if body.input_ids is None else "input_ids"
    if not items:
        raise InvalidRequest(f"{param} is empty", param=param)
    kinds = {type(item) for item in items}
    if kinds == {int}:
        return [items], False
    if len(kinds) > 1:
        raise InvalidRequest("input_ids must be a flat list of integers or a list of such lists", param="input_ids")
    if len(items) > service.limits.batch_prompts:
        raise InvalidRequest(f"at most {service.limits.batch_prompts} prompts are allowed in one request", param=param)
    return items, True


def _rids(body: GenerateRequest, n_prompts: int) -> list[str]:
    if isinstance(body.rid, list):
        if len(body.rid) != n_prompts:
            raise InvalidRequest(f"rid has {len(body.rid)} entries for {n_prompts} prompts", param="rid")
        return body.rid
    rid = body.rid or new_id("")
    return [rid] if n_prompts == 1 else [f"{rid}-p{i}" for i in range(n_prompts)]


def _check_lists(body: GenerateRequest, n_prompts: int) -> None:
    """Raises InvalidRequest for a list of values that has not one for each prompt."""
    for name in PER_PROMPT:
        value = getattr(body, name)
        if isinstance(value, list) and len(value) != n_prompts:
            raise InvalidRequest(f"{name} has {len(value)} entries for {n_prompts} prompts", param=name)


def _each(value: T | list[T] | None, i: int) -> T | None:
    """The i-th prompt's value of a field that is one value or a list of one per prompt."""
    return value[i] if isinstance(value, list) else value


def _options(
    service: Service, engine: AsyncEngine, body: GenerateRequest, i: int, prompt: PromptIds, rid: str
) -> GenerateOptions:
    """Options of the i-th prompt."""
    sampling = _each(body.sampling_params, i) or NativeSampling()
    refuse_unsupported(sampling, UNSUPPORTED_NATIVE_SAMPLING)
    params = _params(service, engine, sampling, prompt)
    unseen = params.max_tokens == 0
    if _each(body.return_logprob, i):
        params = _with_logprobs(params, body, i, len(prompt.ids))
    elif unseen:  # a forward over the prompt that reports nothing
        params = msgspec.structs.replace(params, prompt_logprobs=0, logprob_start=len(prompt.ids))
    adapters = [name or "" for name in body.lora_path] if isinstance(body.lora_path, list) else body.lora_path
    options = GenerateOptions(
        params=params,
        n=at_least_one("n", sampling.n, service.limits.n),
        include_stop=bool(sampling.no_stop_trim),
        skip_special_tokens=sampling.skip_special_tokens is not False,
        namespace=Namespace(
            adapter=service.adapter(None, _each(adapters, i)),
            salt=salt_of(_each(body.extra_key, i), _each(body.cache_salt, i)),
        ),
        priority=body.priority or 0,
        timeout=timeout_of(body.timeout, service),
        rid=rid,
        constraint=native_constraint(sampling, service.limits),
        interval=at_least_one("stream_interval", sampling.stream_interval, service.limits.stream_buffer_tokens),
        program=_each(body.program, i),
        lease=lease_of(_each(body.lease, i)),
        unseen=unseen,
        prompt_text=prompt.text,
    )
    return options


def _with_logprobs(params: SamplingParams, body: GenerateRequest, i: int, n_prompt: int) -> SamplingParams:
    top = _each(body.top_logprobs_num, i) or 0
    start = _each(body.logprob_start_len, i)
    asked = body.token_ids_logprob or []
    ids = [t for t in asked if isinstance(t, int)]
    if len(ids) != len(asked):
        lists = [t for t in asked if isinstance(t, list)]
        if ids or i >= len(lists):
            raise InvalidRequest(
                "token_ids_logprob must be a list of ids or one such list per prompt", param="token_ids_logprob"
            )
        ids = lists[i]
    if start is not None and start < -1:
        raise InvalidRequest(
            "logprob_start_len must be -1 (none of the prompt) or a position", param="logprob_start_len"
        )
    params = msgspec.structs.replace(params, logprobs=top, logprob_token_ids=tuple(ids))
    if start is not None and start >= 0:
        params = msgspec.structs.replace(params, prompt_logprobs=top, logprob_start=start)
    # One row of logprobs behind the prompt is promised even where nothing is to be generated.
    return msgspec.structs.replace(params, max_tokens=1, min_tokens=0) if params.max_tokens == 0 else params


def _params(service: Service, engine: AsyncEngine, s: NativeSampling, prompt: PromptIds) -> SamplingParams:
    max_tokens = s.max_new_tokens
    if isinstance(max_tokens, UnsetType):
        max_tokens = default_max_tokens(DEFAULT_MAX_NEW_TOKENS, len(prompt.ids), service)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=s.min_new_tokens or 0,
        temperature=1.0 if s.temperature is None else s.temperature,
        top_p=1.0 if s.top_p is None else s.top_p,
        top_k=top_k_of(s.top_k),
        min_p=s.min_p or 0.0,
        seed=s.sampling_seed if s.sampling_seed is not None else s.seed,
        presence_penalty=s.presence_penalty or 0.0,
        frequency_penalty=s.frequency_penalty or 0.0,
        repetition_penalty=1.0 if s.repetition_penalty is None else s.repetition_penalty,
        logit_bias=s.logit_bias or {},
        stop=strings(s.stop),
        stop_regex=strings(s.stop_regex),
        stop_token_ids=tuple(s.stop_token_ids or ()),
        ignore_eos=bool(s.ignore_eos),
        allowed_token_ids=tuple(s.allowed_token_ids or ()),
        bad_words=bad_words_of(engine, s.bad_words, service.limits),
    )


async def _complete(job: _Job) -> bytes:
    async with aclosing(_run(job)) as pieces:
        async for prompt, chunk in pieces:
            job.sequences[job.find(prompt, chunk)].take(chunk)
            _check_finish(job, chunk.finish)
    answers = [_answer(job, sequence) for sequence in job.sequences]
    return encode_json(answers[0] if job.single else answers)


async def _stream(job: _Job) -> AsyncGenerator[bytes, None]:
    async with aclosing(_run(job)) as pieces:
        async for prompt, chunk in pieces:
            index = job.find(prompt, chunk)
            sequence = job.sequences[index]
            sequence.take(chunk)
            _check_finish(job, chunk.finish)
            if not (chunk.text or chunk.tokens or chunk.finish):
                continue
            answer = _answer(job, sequence)
            sequence.logprobs = []
            if not job.single:
                answer["index"] = index
            yield b"data: %b\n\n" % encode_json(answer)


def _run(job: _Job) -> AsyncGenerator[tuple[int, Chunk], None]:
    return run_prompts(job.call.engine, job.call.service.metrics, job.work, job.call.started)


def _check_finish(job: _Job, finish: Finish | None) -> None:
    # An abort is an ordinary end here, asked for by /abort_request; unless the server itself is ending.
    if finish is not None and finish.kind not in ("stop", "length"):
        if finish.kind != "abort" or job.call.service.draining:
            raise finish_error(finish)


def _answer(job: _Job, sequence: _Sequence) -> dict[str, Any]:
    chunk = sequence.last
    assert chunk is not None
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": None if chunk.finish is None else _finish_reason(chunk.finish, sequence),
        "prompt_tokens": chunk.n_prompt,
        "completion_tokens": len(sequence.tokens),
        "cached_tokens": chunk.n_cached,
        "weight_version": "default",
    }
    if chunk.finish is not None:
        meta["e2e_latency"] = time.perf_counter() - job.call.started
        if chunk.finish.grant is not None:
            meta["program"] = granted(chunk.finish.grant) | _kept(job, sequence)
        if chunk.finish.warnings:
            meta["warnings"] = chunk.finish.warnings
    if sequence.options.params.logprobs is not None:
        meta |= _logprobs(job, sequence)
    answer = {"text": sequence.text, "output_ids": sequence.tokens, "meta_info": meta}
    if job.body.return_prompt_token_ids:
        answer["prompt_token_ids"] = sequence.prompt.ids
    return answer


def _kept(job: _Job, sequence: _Sequence) -> dict[str, int | str]:
    """Keep the text for what goes on from it: prompt and answer, or the prompt where there are several answers."""
    program, body, texts = sequence.options.program, job.body, job.call.service.texts
    if program is None:
        return {}
    tenant = job.call.principal.tenant
    if program.end:
        texts.forget(tenant, program.id)
    elif program.node and isinstance(body.text, str):
        if job.kept is None:
            rest = body.text + (sequence.text if job.single else "")
            job.kept = texts.keep(tenant, program.id, program.node, body.prefix, rest)
        return {"text": job.kept.chars, "text_id": job.kept.id}
    return {}


def _finish_reason(finish: Finish, sequence: _Sequence) -> dict[str, Any]:
    if finish.kind == "abort":
        return {"type": "abort", "message": finish.message or "aborted", "status_code": None, "err_type": None}
    if finish.kind == "length" or sequence.options.unseen:
        return {"type": "length", "length": len(sequence.tokens)}
    matched = finish.matched
    if matched is None and sequence.tokens:
        matched = sequence.tokens[-1]
    return {"type": "stop", "matched": matched}


def _logprobs(job: _Job, sequence: _Sequence) -> dict[str, Any]:
    params = sequence.options.params
    tokenizer, with_text = job.call.engine.tokenizer, bool(job.body.return_text_in_logprobs)

    def triple(logprob: float | None, token: int) -> Triple:
        text = tokenizer.token_text(token) if with_text else None
        return (None if logprob is None else finite(logprob), token, text)

    def rows(entries: list[Logprob]) -> list[Triple]:
        return [triple(e.logprob, e.token) for e in entries]

    def lists(entries: list[Logprob], asked: bool) -> list[list[Triple] | None]:
        return [[triple(p, t) for t, p in (e.asked if asked else e.top)] for e in entries]

    ids, given = sequence.prompt.ids, sequence.prompt_logprobs
    first = params.logprob_start if params.prompt_logprobs is not None else len(ids)
    # The engine reports nothing for the first position of a prompt; SGLang reports it as unknown.
    unknown = max(0, len(ids) - len(given) - first)
    result: dict[str, Any] = {
        "input_token_logprobs": [triple(None, t) for t in ids[first : first + unknown]] + rows(given),
        "output_token_logprobs": rows(sequence.logprobs),
        "output_token_logprobs_length": sequence.logprobs_seen,
    }
    if params.logprobs:
        result["input_top_logprobs"] = [None] * unknown + lists(given, False)
        result["output_top_logprobs"] = lists(sequence.logprobs, False)
    if params.logprob_token_ids:
        result["input_token_ids_logprobs"] = [None] * unknown + lists(given, True)
        result["output_token_ids_logprobs"] = lists(sequence.logprobs, True)
    return result
