"""From a parsed request to what the engine takes: prompts as ids, sampling options, ids of sequences."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bough.base.errors import InvalidRequest
from bough.base.limits import Limits
from bough.base.messages import Namespace
from bough.base.params import SamplingParams
from bough.base.program import Lease, Program
from bough.engine.async_engine import AsyncEngine
from bough.engine.generation import GenerateOptions
from bough.server.constraints import constraint_of
from bough.server.schema import Prefix, Sampling
from bough.server.service import Service
from bough.text.bad_words import bad_word_ids
from bough.text.memory import Bound

ALL_TOKENS = 1 << 30
"""SGLang's way to say that top_k keeps all."""


@dataclass(frozen=True, slots=True)
class PromptIds:
    """A prompt as ids, and its text where the client sent text."""

    ids: list[int]
    text: str | None


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def strings(value: str | list[str] | None) -> tuple[str, ...]:
    """A field that is one string or several; empty strings mean nothing and are dropped."""
    if value is None:
        return ()
    return tuple(s for s in ([value] if isinstance(value, str) else value) if s)


def at_least_one(name: str, value: int | None, most: int) -> int:
    """A count with the default 1. Raises InvalidRequest outside [1, most]."""
    if value is None:
        return 1
    if not 1 <= value <= most:
        raise InvalidRequest(f"{name} must be in [1, {most}], not {value}", param=name)
    return value


def split_prompt(
    prompt: str | Sequence[int | str | list[int]], limits: Limits, param: str = "prompt"
) -> list[str | list[int]]:
    """The single prompts of the field ``param``, in order. Raises InvalidRequest for mixtures and empty lists."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest(f"{param} is empty", param=param)
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [[item for item in prompt if isinstance(item, int)]]
    if len(kinds) > 1:
        raise InvalidRequest(f"{param} must be text, ids, a list of texts or a list of lists of ids", param=param)
    if len(prompt) > limits.batch_prompts:
        raise InvalidRequest(f"at most {limits.batch_prompts} prompts are allowed in one request", param=param)
    return [item for item in prompt if not isinstance(item, int)]


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequest for ids outside the vocabulary, of which numpy could not even hold some."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        raise InvalidRequest(f"{param} holds out-of-vocabulary ids; ids must be in [0, {vocab_size})", param=param)


async def encode_prompts(
    engine: AsyncEngine,
    service: Service,
    prompts: list[str | list[int]],
    *,
    add_special: bool,
    param: str,
    bound: Bound | None = None,
) -> list[PromptIds]:
    """Each prompt as ids, cut as ``bound`` says, which is that all must fit into the context unless given."""
    bound = bound or Bound(service.hello.model.context_length)
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = kept(await engine.tokenize(prompt, add_special, bound), bound)
            # The text of a prompt that may have been cut is what its ids say.
            encoded.append(PromptIds(ids, prompt if bound.keep == "whole" else None))
        else:
            check_ids(prompt, service.hello.model.vocab_size, param)
            encoded.append(PromptIds(kept(prompt, bound), None))
        if not encoded[-1].ids:
            raise InvalidRequest(f"{param} is empty", param=param)
    return encoded


def begun(service: Service, tenant: str, prefix: Prefix, prompts: Sequence[str | list[int]], param: str) -> list[str]:
    """``prompts``, each behind the text that ``prefix`` names. Raises UnknownText where that is not kept any more."""
    before = service.texts.find(tenant, prefix)
    if len(before) * len(prompts) > service.limits.body_bytes:
        raise InvalidRequest(f"prefix and prompts are longer than {service.limits.body_bytes} together", param="prefix")
    texts = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise InvalidRequest(f"prefix stands before texts; {param} has ids", param="prefix")
        texts.append(before + prompt)
    return texts


def default_max_tokens(default: int, n_prompt: int, service: Service) -> int | None:
    """A default length that never makes a fitting prompt too long."""
    room = service.hello.model.context_length - n_prompt
    return min(default, room) if room > 0 else None


def top_k_of(value: int | None) -> int:
    """-1 for every spelling of "all": null, -1, vLLM's 0 and SGLang's 2^30."""
    return -1 if value is None or value in (-1, 0) or value >= ALL_TOKENS else value


def salt_of(extra_key: str | None, cache_salt: str | None) -> str:
    """One salt from the two fields that clients know, such that no two pairs give the same one."""
    if extra_key and cache_salt:
        return f"{len(extra_key)}:{extra_key}:{cache_salt}"
    return extra_key or cache_salt or ""


def timeout_of(asked: float | None, service: Service) -> float | None:
    """The shorter of the client's and the server's timeout. Raises InvalidRequest unless positive and finite."""
    if asked is not None and not (math.isfinite(asked) and asked > 0):
        raise InvalidRequest("timeout must be a positive number of seconds", param="timeout")
    limit = service.config.serve.request_timeout
    return limit if asked is None else asked if limit is None else min(asked, limit)


def bad_words_of(engine: AsyncEngine, words: list[str] | None, limits: Limits) -> tuple[tuple[int, ...], ...]:
    """Token sequences that ``words`` forbid. Raises InvalidRequest for too many or too long ones."""
    if not words:
        return ()
    if len(words) > limits.bad_words or any(not 0 < len(w) <= limits.stop_chars for w in words):
        raise InvalidRequest(
            f"bad_words may have {limits.bad_words} entries of 1 to {limits.stop_chars} characters", param="bad_words"
        )
    return tuple(bad_word_ids(engine.tokenizer, words))


@dataclass(frozen=True, slots=True)
class Lengths:
    """What differs between the endpoints that share :class:`Sampling`."""

    max_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    logprob_start: int = 0


def truncation(body: Sampling, service: Service, max_tokens: int | None) -> Bound:
    """What ``truncate_prompt_tokens``, which is vLLM's, leaves of a prompt; -1 leaves room for ``max_tokens``.

    Raises InvalidRequest for other lengths below 1.
    """
    length, context = body.truncate_prompt_tokens, service.hello.model.context_length
    if length is None:
        return Bound(context)
    if length == -1:
        length = max(1, context - (max_tokens or 1))
    if length < 1:
        raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens")
    return Bound(length, "begin" if body.truncation_side == "right" else "end")


def kept(ids: list[int], bound: Bound) -> list[int]:
    """Those of ``ids`` that ``bound`` leaves."""
    if bound.keep == "whole" or len(ids) <= bound.most:
        return ids
    return ids[: bound.most] if bound.keep == "begin" else ids[-bound.most :]


def check_metadata(metadata: dict[str, str] | None, limits: Limits) -> None:
    """Raises InvalidRequest for more than OpenAI allows."""
    most = limits.metadata, limits.metadata_key_chars, limits.metadata_value_chars
    items = (metadata or {}).items()
    if len(items) > most[0] or any(len(key) > most[1] or len(value) > most[2] for key, value in items):
        raise InvalidRequest(
            f"metadata may have {most[0]} entries with keys of {most[1]} and values of {most[2]} characters",
            param="metadata",
        )


def about_request(body: Sampling, limits: Limits) -> dict[str, Any]:
    """What an answer repeats of its request: its metadata, and the service tier in which it was served."""
    check_metadata(body.metadata, limits)
    about: dict[str, Any] = {}
    if body.metadata is not None:
        about["metadata"] = body.metadata
    if body.service_tier is not None:
        about["service_tier"] = "default"
    return about


def openai_options(
    service: Service,
    engine: AsyncEngine,
    body: Sampling,
    lengths: Lengths,
    rid: str,
    program: Program | None = None,
    lease: Lease | None = None,
) -> GenerateOptions:
    """Options of one prompt of an OpenAI request. Ranges are checked by the engine's one gate."""
    params = SamplingParams(
        max_tokens=lengths.max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=top_k_of(body.top_k),
        min_p=body.min_p or 0.0,
        seed=body.seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=body.logit_bias or {},
        stop=strings(body.stop),
        stop_regex=strings(body.stop_regex),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=bad_words_of(engine, body.bad_words, service.limits),
        logprobs=lengths.logprobs,
        prompt_logprobs=lengths.prompt_logprobs,
        logprob_start=lengths.logprob_start,
        logprob_token_ids=tuple(body.logprob_token_ids or ()),
    )
    return GenerateOptions(
        params=params,
        n=at_least_one("n", body.n, service.limits.n),
        include_stop=bool(body.no_stop_trim or body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        namespace=Namespace(
            adapter=service.adapter(body.model, body.lora_path), salt=salt_of(body.extra_key, body.cache_salt)
        ),
        priority=body.priority or 0,
        timeout=timeout_of(body.timeout, service),
        rid=rid,
        constraint=constraint_of(body, service.limits),
        interval=at_least_one("stream_interval", body.stream_interval, service.limits.stream_buffer_tokens),
        program=program,
        lease=lease,
    )


def sequence_rids(options: Sequence[GenerateOptions]) -> list[str]:
    """Ids of all sequences, as the engine will name them."""
    rids = []
    for o in options:
        assert o.rid is not None
        rids += [o.rid] if o.n == 1 else [f"{o.rid}-{i}" for i in range(o.n)]
    return rids


def most_tokens(service: Service, work: Iterable[tuple[list[int], GenerateOptions]]) -> int:
    """Tokens that the prompts of ``work`` and the longest answers to them come to."""
    most = service.hello.model.context_length
    return sum(
        options.n * min(most, len(ids) + (most if options.params.max_tokens is None else options.params.max_tokens))
        for ids, options in work
    )


def request_rids(
    rid: str | list[str] | None, request_id: str | None, prefix: str, n_prompts: int
) -> tuple[str, list[str]]:
    """(id of the response, one rid per prompt) from what the client sent, or new ones."""
    if isinstance(rid, list):
        if len(rid) != n_prompts:
            raise InvalidRequest(f"rid has {len(rid)} entries for {n_prompts} prompts", param="rid")
        return (rid[0] if rid else new_id(prefix)), rid
    response = rid or (f"{prefix}{request_id}" if request_id else new_id(prefix))
    return response, [response] if n_prompts == 1 else [f"{response}-p{i}" for i in range(n_prompts)]
