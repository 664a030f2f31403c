"""Calls of the model: limits, retries, types, and the record of what they cost."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from bough.base.errors import Overloaded, Unavailable
from bough.lang import speculation
from bough.lang.config import global_config
from bough.lang.errors import BackendError, InvalidAnswer, LimitExceeded, Unsupported
from bough.lang.habits import Answered, Place
from bough.lang.ir import SglGen, SglSelect
from bough.lang.params import SglSamplingParams, resolve
from bough.lang.program import Call, Line, remaining
from bough.lang.types import Answer, answer_of

if TYPE_CHECKING:
    from bough.lang.backends.base import Generated
    from bough.lang.executor import StreamExecutor

T = TypeVar("T")


async def generate(ex: StreamExecutor, expr: SglGen, line: Line | None, pause: float | None = None) -> None:
    """Run a gen and store what came of it; ``pause`` is how long the next call is expected to be away, if known."""
    params = resolve(ex.default_sampling_para, expr.sampling_params, ex.chat_template.stop_str)
    if ex.stream:
        assert ex.num_api_spec_tokens is None, "stream is not supported with api speculative execution"
    elif speculation.is_open(ex):
        speculation.record(ex, params, expr.name)
        return
    answer = answer_of(expr)
    if answer is not None:
        answer.constrain(params)
        ex.types_wanted[expr.name] = answer.wanted
    place = line, expr.name
    if global_config.enable_prefetch and params.n == 1:
        ex.next_text = ex.program.habits.after(place)
    ex.next_pause = ex.program.habits.pause(place)[0] if pause is None else pause
    with _adapted(ex, expr.lora_path):
        if answer is not None and (expr.reask or expr.validate):
            value, text, meta = await _ask_until_valid(ex, expr, answer, params, line)
        else:
            value, text, meta = await _once(ex, expr, answer, params, line)
    ex.text_ += text
    _answered(ex, place)
    ex.variables[expr.name] = value
    ex.meta_info[expr.name] = meta
    ex.settle(expr.name)


async def _once(
    ex: StreamExecutor, expr: SglGen, answer: Answer | None, params: SglSamplingParams, line: Line | None
) -> tuple[Any, str, Any]:
    """(value, what is still to be appended to the text, meta) of one generation."""
    async with _within_budget(ex, params), recorded(ex, "generate", expr.name, line) as call:
        if ex.stream and ex.shown is None and params.n == 1:  # several answers come whole, as a list
            text, meta = await _streamed(ex, expr, answer, params, call), ex.meta_info.get(expr.name)
            ex.program.spend(call.settle())
            return text if answer is None else answer.parse(text), "", meta
        if ex.num_api_spec_tokens is not None:
            found: Any = await speculation.complete(ex, params, lambda: _asked(ex, call, params))
        else:
            found = await _asked(ex, call, params)
        texts, meta = found
        _count(ex, call, meta)
        if isinstance(texts, list):
            return (texts if answer is None else [answer.parse(t) for t in texts]), texts[0], meta
        assert isinstance(texts, str)
        return (texts if answer is None else answer.parse(texts)), texts, meta


def _asked(ex: StreamExecutor, call: Call, params: SglSamplingParams) -> Awaitable[Generated]:
    # A copy, since backends change what they are given.
    return repeated(ex, call, lambda: ex.backend.agenerate(ex, copy.copy(params)))


def _count(ex: StreamExecutor, call: Call, meta: Any) -> None:
    ex.program.spend(sum(call.count(m) for m in (meta if isinstance(meta, list) else [meta])))


async def settle(ex: StreamExecutor, line: Line | None) -> None:
    """Make the call for an open turn of the assistant, see :mod:`bough.lang.speculation`."""

    async def ask(params: SglSamplingParams) -> tuple[str, Call]:
        async with _within_budget(ex, params), recorded(ex, "generate", None, line) as call:
            texts, meta = await _asked(ex, call, params)
            _count(ex, call, meta)
            return texts[0] if isinstance(texts, list) else texts, call

    await speculation.settle(ex, ask)


async def _streamed(
    ex: StreamExecutor, expr: SglGen, answer: Answer | None, params: SglSamplingParams, call: Call
) -> str:
    """Follow a generation; the text and the variable grow with it."""
    name, text = expr.name, ""
    assert ex.stream_var_event is not None
    ex.variables[name] = ""
    ex.pieces[name] = pieces = []
    ex.stream_var_event[name].set()
    for attempt in range(max(1, ex.program.retry.attempts)):
        call.attempts += 1
        try:
            async with remaining(ex.program.seconds_left(), ex.program.retry.timeout):
                async for piece, meta in ex.backend.agenerate_stream(ex, copy.copy(params)):
                    text += piece
                    ex.text_ += piece
                    ex.variables[name] = text
                    ex.meta_info[name] = meta
                    call.follow(meta, shown=piece)
                    pieces.append((piece, meta))
                    ex.ring()
            return text
        except Exception as error:
            if text:
                raise
            await _pause(ex, attempt, error)
    raise AssertionError("unreachable")


async def _ask_until_valid(
    ex: StreamExecutor, expr: SglGen, answer: Answer, params: SglSamplingParams, line: Line | None
) -> tuple[Any, str, Any]:
    """As :func:`_once`, telling the model what is wrong with its answers. Only the last one stays in the text."""
    before, messages = ex.text_, list(ex.messages_)
    ex.shown = len(before)  # an answer that may be rejected is not
    try:
        for attempt in range(expr.reask + 1):
            ex.open_ended = attempt < expr.reask
            try:
                value, text, meta = await _once(ex, expr, answer, params, line)
                for each in value if params.n > 1 else [value]:
                    answer.check(each, expr.validate)
                return value, text, meta
            except InvalidAnswer as error:
                call = ex.calls[-1]
                call.wasted_tokens += call.generated_tokens
                if attempt == expr.reask:
                    raise
                _tell(ex, error)
    finally:
        ex.text_, ex.messages_, ex.open_ended = before, messages, False
        ex.shown = None
    raise AssertionError("unreachable")


def _tell(ex: StreamExecutor, error: InvalidAnswer) -> None:
    """Add a rejected answer, and why it was rejected, to the text."""
    written, complaint = error.written, f"That is not valid: {error.reason}. Answer again."
    if ex.cur_role != "assistant":
        ex.text_ += f"{written}\n{complaint}\n"
        return
    template, history = ex.chat_template, list(ex.messages_)
    text = ex.text_ + written
    history.append({"role": "assistant", "content": written})
    text += template.get_prefix_and_suffix("assistant", ex.messages_)[1]
    opening, closing = template.get_prefix_and_suffix("user", history)
    text += opening + complaint + closing
    history.append({"role": "user", "content": complaint})
    ex.text_ = text + template.get_prefix_and_suffix("assistant", history)[0]
    ex.messages_ = history


async def select(ex: StreamExecutor, expr: SglSelect, line: Line | None) -> None:
    """Run a select and store what was chosen."""
    place = line, expr.name
    ex.next_pause = ex.program.habits.pause(place)[0]
    with _adapted(ex, expr.lora_path):
        async with recorded(ex, "select", expr.name, line) as call:
            decision = await repeated(
                ex, call, lambda: ex.backend.aselect(ex, expr.choices, expr.temperature, expr.choices_method)
            )
            call.count(decision.meta_info)
    if expr.name is not None:
        ex.variables[expr.name] = decision.decision
        ex.meta_info[expr.name] = decision.meta_info
    ex.text_ += decision.decision
    _answered(ex, place)
    ex.settle(expr.name)


def _answered(ex: StreamExecutor, place: Place) -> None:
    """The call at ``place`` is over, and its answer is in the text."""
    ex.next_text, ex.next_pause = "", None
    ex.answered = Answered(place, len(ex.text_), time.perf_counter())


async def prefill(ex: StreamExecutor, line: Line | None) -> None:
    """Have the backend compute the text so far."""
    if ex.backend.wants_text(ex):
        await _computed(ex, "prefill", line)


async def lease(ex: StreamExecutor, ttl: float, line: Line | None) -> None:
    """Have the backend compute the text so far and keep it; one that takes leases with other calls finds it noted."""
    if not ex.text_:
        return
    ex.lease = ttl, len(ex.messages_)
    if ex.backend.keeps_leases:
        last = ex.answered
        ex.next_pause = None if last is None else ex.program.habits.pause(last.place)[0]
        await _computed(ex, "lease", line)
        ex.lease = ex.next_pause = None


async def _computed(ex: StreamExecutor, kind: str, line: Line | None) -> None:
    async with recorded(ex, kind, None, line) as call:
        call.count(await repeated(ex, call, lambda: ex.backend.acommit_lazy_operations(ex)))


@contextmanager
def _adapted(ex: StreamExecutor, lora_path: str | None) -> Iterator[None]:
    """The calls in here are made with an adapter. Raises Unsupported where the backend has none."""
    if lora_path is not None and not ex.backend.takes_adapters:
        raise Unsupported(f"{type(ex.backend).__name__} takes no adapters")
    ex.lora_path = lora_path
    try:
        yield
    finally:
        ex.lora_path = None


@asynccontextmanager
async def recorded(ex: StreamExecutor, kind: str, name: str | None, line: Line | None) -> AsyncIterator[Call]:
    """The record of one call, with its time and what it failed with."""
    call = ex.program.begin(kind, name, line, ex.last_node)
    ex.current = call
    ex.calls.append(call)
    began = time.perf_counter()
    _learn(ex, kind, began)
    try:
        yield call
    except BaseException as error:
        call.error = f"{type(error).__name__}: {error}"
        ex.program.spend(call.waste())
        raise
    finally:
        call.seconds = time.perf_counter() - began
        ex.last_node = call.node


def _learn(ex: StreamExecutor, kind: str, now: float) -> None:
    """A call begins: how long after the last answer, and behind what text."""
    last, habits = ex.answered, ex.program.habits
    if last is None or kind in ("tool", "lease"):
        return
    if last.at is not None:
        habits.paused(last.place, now - last.at)
        last.at = None
    if kind != "prefill":
        ex.answered = None
        habits.learn(last.place, ex.text_[last.length :])


async def repeated(ex: StreamExecutor, call: Call, attempt: Callable[[], Awaitable[T]]) -> T:
    """``attempt()`` within the program's time, again where it failed for a reason that may pass."""
    for i in range(max(1, ex.program.retry.attempts)):
        call.attempts += 1
        try:
            async with remaining(ex.program.seconds_left(), ex.program.retry.timeout):
                return await attempt()
        except Exception as error:
            await _pause(ex, i, error)
            ex.program.spend(call.waste())
    raise AssertionError("unreachable")


async def _pause(ex: StreamExecutor, attempt: int, error: Exception) -> None:
    """Wait before the next attempt; raises ``error`` where there is none."""
    retry = ex.program.retry
    if isinstance(error, TimeoutError):
        try:
            ex.program.seconds_left()
        except LimitExceeded as limit:
            raise limit from error
    if attempt + 1 >= retry.attempts or not _transient(error):
        raise error
    asked, left = getattr(error, "retry_after", None), ex.program.seconds_left()
    seconds = retry.delay * 2**attempt if asked is None else asked
    if left is not None and seconds >= left:
        raise LimitExceeded(
            f"the program {ex.program.name} may take {ex.program.limits.seconds:g} s, "
            f"and its next attempt is {seconds:g} s away"
        ) from error
    await asyncio.sleep(seconds)


def _transient(error: Exception) -> bool:
    """Whether the same call may succeed later."""
    if isinstance(error, BackendError):
        return error.transient
    return isinstance(error, TimeoutError | Overloaded | Unavailable)


@asynccontextmanager
async def _within_budget(ex: StreamExecutor, params: SglSamplingParams) -> AsyncIterator[None]:
    """A call in here asks for no more than the program may still generate, beside what its other calls may."""
    program, n = ex.program, params.n
    left = program.tokens_left()
    if left is None:
        yield
        return
    # None leaves it to the backend how many.
    most = left // n if params.max_new_tokens is None else params.max_new_tokens
    if ex.backend.keeps_budgets:
        params.max_new_tokens = min(most, max(1, left // n))
        yield
        return
    reserved = await program.reserve(most * n, n)
    params.max_new_tokens = reserved // n
    try:
        yield
    finally:
        program.give_back(reserved)
