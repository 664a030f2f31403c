"""Several generations from one API call (``num_api_spec_tokens``).

On chat models the gens of one assistant turn are collected, asked for in one call when the turn ends, and found in
its answer by the texts around them. On completion models more is generated than was asked for, and later gens take
what was generated ahead while the program's texts agree with it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from bough.lang.params import SglSamplingParams
from bough.lang.program import Call

if TYPE_CHECKING:
    from bough.lang.backends.base import Generated
    from bough.lang.executor import StreamExecutor

logger = logging.getLogger(__name__)

TRIES = 3
Ask = Callable[[SglSamplingParams], Awaitable[tuple[str, Call]]]
"""Makes one call: (its answer, the record of it)."""
_SHARED = ("n", "temperature", "top_p", "frequency_penalty", "presence_penalty")


def is_open(ex: StreamExecutor) -> bool:
    """Whether the state is in a turn that will be asked for as a whole."""
    return ex.cur_role == "assistant" and ex.num_api_spec_tokens is not None and ex.backend.is_chat_model


def record(ex: StreamExecutor, params: SglSamplingParams, name: str | None) -> None:
    """Remember a gen of an open turn. All of a turn must have the same sampling parameters."""
    if ex.spec_params is None:
        ex.spec_params = params
    elif any(getattr(params, f) != getattr(ex.spec_params, f) for f in _SHARED):
        raise AssertionError("sampling parameters should be consistent if turn on api speculative execution.")
    ex.spec_format.append({"text": "", "stop": params.stop or None, "name": name})


async def settle(ex: StreamExecutor, ask: Ask) -> None:
    """Make the call for an open turn and distribute its answer."""
    prefix = ex.chat_template.get_prefix_and_suffix("assistant", ex.messages_)[0]
    if not is_open(ex) or not ex.text_.endswith(prefix):
        return
    terms, params = ex.spec_format, ex.spec_params
    ex.spec_format, ex.spec_params = [], None
    if params is not None:
        for _ in range(TRIES):
            answer, call = await ask(dataclasses.replace(params, max_new_tokens=ex.num_api_spec_tokens, stop=[]))
            if match(terms, answer):
                break
            call.wasted_tokens += call.generated_tokens
        else:
            logger.warning("%s: no answer fitted the texts of the assistant's turn", ex.program.name)
    for term in terms:
        ex.text_ += term["text"]
        if (name := term["name"]) is not None:
            ex.variables[name] = term["text"]
            ex.meta_info[name] = {}
            ex.settle(name)


def match(terms: list[dict[str, Any]], answer: str) -> bool:
    """Find the texts of the gens among ``terms`` in ``answer``."""
    for i, term in enumerate(terms):
        if term["name"] is None:
            if not answer.startswith(term["text"]):
                return False
            answer = answer[len(term["text"]) :]
            continue
        end = _first(answer, term["stop"])
        if end is None:
            if i != len(terms) - 1:
                return False
            end = len(answer)
        term["text"], answer = answer[:end], answer[end:]
    return True


async def complete(
    ex: StreamExecutor, params: SglSamplingParams, attempt: Callable[[], Awaitable[Generated]]
) -> tuple[str, dict[str, Any]]:
    """A gen on a completion model, from what was generated ahead where there is enough of it, else by ``attempt()``."""
    stop, most = params.stop, params.max_new_tokens
    meta: dict[str, Any] = {}
    if not ex.speculated_text:
        assert ex.num_api_spec_tokens is not None
        ahead, left = max(most, ex.num_api_spec_tokens), ex.program.tokens_left()
        params.max_new_tokens, params.stop = ahead if left is None else min(ahead, left), None
        answer, meta = await attempt()
        ex.speculated_text = answer[0] if isinstance(answer, list) else answer
    end = _first(ex.speculated_text, stop)
    if end is None:
        end = min(most, len(ex.speculated_text))
    text, ex.speculated_text = ex.speculated_text[:end], ex.speculated_text[end:]
    return text, meta


def _first(text: str, stop: Any) -> int | None:
    """Where the first of the stop texts begins."""
    stops = [stop] if isinstance(stop, str) else stop or []
    found = [at for at in (text.find(s) for s in stops) if at >= 0]
    return min(found, default=None)
