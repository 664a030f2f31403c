"""How long a model may reason, and where in an answer its reasoning is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from bough.base.constraint import Reasoning
from bough.base.errors import InvalidRequest
from bough.engine.generation import GenerateOptions
from bough.server.work import Call
from bough.text.formats import AnswerFormat
from bough.text.tokenizer import Tokenizer

_TAIL = 16
"""Last ids of a prompt, among which a tag that opens the reasoning would be."""


class Budgeted(Protocol):
    """A request that may bound its reasoning, under vLLM's name or SGLang's."""

    thinking_token_budget: int | None
    max_thinking_tokens: int | None


def budget_of(body: Budgeted, form: AnswerFormat) -> int | None:
    """Most tokens of reasoning. Raises InvalidRequest where the model is not known to reason, and below 0."""
    for name in ("thinking_token_budget", "max_thinking_tokens"):
        budget: int | None = getattr(body, name)
        if budget is not None:
            if form.reasoning is None:
                raise InvalidRequest(f"{name}: this server does not know how the model reasons", param=name)
            if budget < 0:
                raise InvalidRequest(f"{name} must be at least 0, not {budget}", param=name)
            return budget
    return None


def started_in(form: AnswerFormat, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool | None:
    """Whether the prompt leaves the reasoning open; None when it says nothing."""
    return form.thinking(tokenizer.decode(list(prompt[-_TAIL:]), skip_special=False))


def reasoning_of(
    form: AnswerFormat,
    tokenizer: Tokenizer,
    started: bool | None,
    budget: int | None,
    constrained: bool,
    optional: bool = False,
) -> Reasoning | None:
    """What the engine has to know of the reasoning in an answer; None where it makes no difference.

    ``optional``: a model that decides by itself whether it reasons may do so before the constrained part without a
    budget too, if its tag is one token: a longer one might begin as an answer does. Where answers are on a channel of
    their own, the constrained part begins there, whatever comes before.
    """
    thinking = form.reasoning
    if thinking is None or started is False:
        return None
    if thinking.answers and constrained and optional:
        # Models are wont to write what an answer is made of between the channel's name and the answer.
        end = tuple(tokenizer.encode(thinking.answers, add_special=False))
        return Reasoning(end=end, budget=budget, firm=True)
    end = tuple(tokenizer.encode(thinking.closes, add_special=False))
    if started or thinking.assumed:
        return Reasoning(end=end, budget=budget) if constrained or budget is not None else None
    begin = tuple(tokenizer.encode(thinking.opens, add_special=False))
    if budget is None and not (constrained and optional and len(begin) == 1):
        return None
    return Reasoning(end=end, budget=budget, begin=begin)


def thoughtful(
    options: GenerateOptions, body: Budgeted, call: Call, prompt: Sequence[int], required: bool = False
) -> GenerateOptions:
    """``options`` of a prompt that is no chat, with the budget that ``body`` has for its reasoning.

    Without a budget, and unless ``required``, such a prompt is taken for a text as any other. Raises InvalidRequest.
    """
    form, tokenizer = call.service.form, call.engine.tokenizer
    budget = budget_of(body, form)
    if budget is None and not (required and options.constraint is not None):
        return options
    started = started_in(form, tokenizer, prompt)
    return replace(options, reasoning=reasoning_of(form, tokenizer, started, budget, options.constraint is not None))
