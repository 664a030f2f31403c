"""The one gate for requests. The HTTP edge and the scheduler call the same function."""

from __future__ import annotations

import math
import re
from collections.abc import Collection

from bough.base.constraint import Reasoning
from bough.base.errors import InvalidRequest
from bough.base.limits import Limits
from bough.base.messages import Request
from bough.base.params import SamplingParams
from bough.base.program import Program

INT64 = 1 << 63

ADAPTER_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def check_texts(n_chars: int, limits: Limits, param: str) -> None:
    """Raises InvalidRequest for texts of ``n_chars`` characters in all, of which every token would be held at once."""
    if n_chars > limits.text_chars:
        raise InvalidRequest(
            f"{param}: texts of {n_chars} characters in all; at most {limits.text_chars} are tokenized for one request",
            param=param,
        )


def too_long(size: str, context_length: int, at_least: str = "") -> InvalidRequest:
    """The error of a prompt of ``size`` that the context has no room for."""
    return InvalidRequest(
        f"The input ({size}) is longer than the model's context length ({context_length} tokens): "
        f"this model's maximum context length is {context_length} tokens{at_least}.",
        param="prompt",
        code="context_length_exceeded",
    )


def validate_request(
    request: Request,
    limits: Limits,
    vocab_size: int,
    context_length: int,
    *,
    generates: bool = True,
    classifies: bool = False,
) -> None:
    """Check every number, length and id of ``request``; raises InvalidRequest that names the field.

    ``generates`` and ``classifies`` say what the model's head is for.
    """
    if not 0 < len(request.rid) <= limits.rid_chars:
        raise InvalidRequest(f"the request id must have 1 to {limits.rid_chars} characters", param="rid")
    if len(request.ids) % 4:
        raise InvalidRequest("the prompt is not a whole number of int32 ids", param="input_ids")
    prompt = request.prompt
    if not len(prompt):
        raise InvalidRequest("the prompt is empty", param="prompt")
    generated = 0 if request.pooling is not None else 1
    if len(prompt) + generated > context_length:
        at_least = ", of which at least one is generated" if generated else ""
        raise too_long(f"{len(prompt)} tokens", context_length, at_least)
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        raise InvalidRequest(
            f"the prompt holds out-of-vocabulary ids; ids must be in [0, {vocab_size})", param="input_ids"
        )
    if len(request.namespace.salt) > limits.salt_chars:
        raise InvalidRequest(f"cache_salt is longer than {limits.salt_chars} characters", param="cache_salt")
    if request.namespace.adapter:
        check_adapter_name(request.namespace.adapter)
    _number("priority", request.priority, -limits.priority_abs, limits.priority_abs)
    if request.timeout is not None:
        _number("timeout", request.timeout, 0, 1e9, open_low=True)
    if request.reasoning is not None:
        _validate_reasoning(request.reasoning, limits, vocab_size)
    if request.program is not None:
        _validate_program(request.program, limits, vocab_size)
    if request.lease is not None:
        _number("lease", request.lease.ttl, 0, 1e9, open_low=True)
        _number("lease", request.lease.upto or 0, 0, INT64)
    _validate_params(request.params, limits, vocab_size)
    if request.pooling is None:
        _validate_length(request.params, len(prompt), context_length)
    _validate_task(request, generates, classifies)


def check_adapter_name(name: str) -> None:
    """Raises InvalidRequest for a name that could mean anything but a folder of its own among others."""
    if not ADAPTER_NAME.fullmatch(name):
        raise InvalidRequest(
            "the name of an adapter has 1 to 128 letters, digits and the characters - _ . and begins with no dot",
            param="lora_name",
        )


def _validate_task(request: Request, generates: bool, classifies: bool) -> None:
    pooling = request.pooling
    if pooling is None and not generates:
        what = "classifies" if classifies else "embeds"
        raise InvalidRequest(f"this model {what} texts and generates none", param="model", code="unsupported_task")
    if pooling is not None and pooling.kind == "classify" and not classifies:
        raise InvalidRequest("this model has no classification head", param="model", code="unsupported_task")
    if pooling is not None and request.constraint is not None:
        raise InvalidRequest("a vector cannot be constrained", param="constraint")


def _validate_program(program: Program, limits: Limits, vocab_size: int) -> None:
    for name in ("id", "node", "parent", "fork"):
        value = getattr(program, name)
        if len(value) > limits.program_chars or (name == "id" and not value):
            least = 1 if name == "id" else 0
            raise InvalidRequest(
                f"program.{name} must have {least} to {limits.program_chars} characters", param=f"program.{name}"
            )
        _encodable(f"program.{name}", value)
    _number("program.width", program.width, 1, limits.program_width)
    _number("program.priority", program.priority, -limits.priority_abs, limits.priority_abs)
    for name, most in (("next_uses", INT64), ("next_in", 1e9), ("pause", 1e9), ("budget", INT64)):
        value = getattr(program, name)
        if value is not None:
            _number(f"program.{name}", value, 0, most)
    if program.deadline is not None:
        _number("program.deadline", program.deadline, 0, 1e9, open_low=True)
    if program.after and program.end:
        raise InvalidRequest("nothing comes after the last request of a program", param="program.after")
    if isinstance(program.after, str):
        _encodable("program.after", program.after)
    else:
        _ids("program.after", program.after, INT64, vocab_size)


def _validate_reasoning(reasoning: Reasoning, limits: Limits, vocab_size: int) -> None:
    if not reasoning.end:
        raise InvalidRequest("the end of the reasoning has no tokens", param="reasoning")
    _ids("reasoning", reasoning.end, limits.reasoning_end_tokens, vocab_size)
    _ids("reasoning", reasoning.begin, limits.reasoning_end_tokens, vocab_size)
    if reasoning.budget is not None:
        _number("thinking_token_budget", reasoning.budget, 0, INT64)


def _validate_length(params: SamplingParams, n_prompt: int, context_length: int) -> None:
    if params.max_tokens is not None:
        _number("max_tokens", params.max_tokens, 0, INT64)
        if n_prompt + params.max_tokens > context_length:
            raise InvalidRequest(
                f"max_completion_tokens is too large: {params.max_tokens}. This model's maximum context length is "
                f"{context_length} tokens and the prompt has {n_prompt}.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if params.min_tokens > params.max_tokens:
            raise InvalidRequest("min_tokens is larger than max_tokens", param="min_tokens")
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            raise InvalidRequest("max_tokens must be at least 1 unless prompt logprobs are asked", param="max_tokens")
    _number("min_tokens", params.min_tokens, 0, max(0, context_length - n_prompt))
    _number("logprob_start", params.logprob_start, 0, n_prompt)


def _validate_params(p: SamplingParams, limits: Limits, vocab_size: int) -> None:
    _number("temperature", p.temperature, 0, 2)
    _number("top_p", p.top_p, 0, 1, open_low=True)
    _number("min_p", p.min_p, 0, 1)
    if p.top_k != -1:
        _number("top_k", p.top_k, 1, INT64)
    _number("presence_penalty", p.presence_penalty, -2, 2)
    _number("frequency_penalty", p.frequency_penalty, -2, 2)
    _number("repetition_penalty", p.repetition_penalty, 0, 100, open_low=True)
    if p.seed is not None:
        _number("seed", p.seed, -INT64, INT64 - 1)
    for name, top in (("logprobs", p.logprobs), ("prompt_logprobs", p.prompt_logprobs)):
        if top is not None:
            _number(name, top, 0, min(limits.logprobs, vocab_size))
    for name in ("stop", "stop_regex"):
        strings = getattr(p, name)
        _count(name, strings, limits.stop_strings)
        for s in strings:
            if not 0 < len(s) <= limits.stop_chars:
                raise InvalidRequest(f"each {name} needs 1 to {limits.stop_chars} characters", param=name)
            _encodable(name, s)
    _ids("stop_token_ids", p.stop_token_ids, limits.stop_token_ids, vocab_size)
    _ids("allowed_token_ids", p.allowed_token_ids, limits.allowed_token_ids, vocab_size)
    _ids("logprob_token_ids", p.logprob_token_ids, limits.logprob_token_ids, vocab_size)
    _ids("logit_bias", p.logit_bias, limits.logit_bias, vocab_size)
    for bias in p.logit_bias.values():
        _number("logit_bias", bias, -limits.logit_bias_abs, limits.logit_bias_abs)
    _count("bad_words", p.bad_words, limits.bad_words)
    for word in p.bad_words:
        if not word:
            raise InvalidRequest("a bad word has no tokens", param="bad_words")
        _ids("bad_words", word, limits.bad_word_tokens, vocab_size)


def _number(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    # An int can be too large for a float, so neither isfinite nor formatting may see one that is out of range.
    if isinstance(value, bool) or not isinstance(value, int | float) or (value != value or abs(value) == math.inf):
        raise InvalidRequest(f"{name} must be a finite number", param=name)
    if not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        shown = f", not {_shown(value)}" if abs(value) < 2 * INT64 else ""
        raise InvalidRequest(f"{name} must be in {bracket}{_shown(low)}, {_shown(high)}]{shown}", param=name)


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _count(name: str, values: Collection[object], most: int) -> None:
    if len(values) > most:
        raise InvalidRequest(f"{name} has {len(values)} entries; at most {most} are allowed", param=name)


def _encodable(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} is not valid Unicode", param=name) from None


def _ids(name: str, values: Collection[int], most: int, vocab_size: int) -> None:
    _count(name, values, most)
    for value in values:
        if not 0 <= value < vocab_size:
            raise InvalidRequest(f"{name} holds id {value}; ids must be in [0, {vocab_size})", param=name)
