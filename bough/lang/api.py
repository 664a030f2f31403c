"""The words of the language."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

from bough.lang.choices import ChoicesSamplingMethod, token_length_normalized
from bough.lang.config import global_config
from bough.lang.function import SglFunction
from bough.lang.ir import (
    SglAct,
    SglExpr,
    SglExprList,
    SglGen,
    SglImage,
    SglRoleBegin,
    SglRoleEnd,
    SglSelect,
    SglSeparateReasoning,
    SglVideo,
)
from bough.lang.limits import Limits, Retry

if TYPE_CHECKING:
    from bough.lang.tools import Tool

Text = str | SglExpr


@overload
def function(
    func: Callable[..., Any],
    num_api_spec_tokens: int | None = None,
    *,
    limits: Limits | None = None,
    retry: Retry | None = None,
    priority: int = 0,
) -> SglFunction: ...
@overload
def function(
    func: None = None,
    num_api_spec_tokens: int | None = None,
    *,
    limits: Limits | None = None,
    retry: Retry | None = None,
    priority: int = 0,
) -> Callable[[Callable[..., Any]], SglFunction]: ...
def function(
    func: Callable[..., Any] | None = None,
    num_api_spec_tokens: int | None = None,
    *,
    limits: Limits | None = None,
    retry: Retry | None = None,
    priority: int = 0,
) -> SglFunction | Callable[[Callable[..., Any]], SglFunction]:
    """Make a program of a function whose first parameter is ``s``; with or without arguments of its own.

    Args:
        num_api_spec_tokens: fetch this many tokens at a time from APIs that are called for little at a time.
        limits: what one run may use.
        retry: how calls that failed are repeated.
        priority: an engine lets larger ones of the same tenant go first.
    """

    def make(body: Callable[..., Any]) -> SglFunction:
        return SglFunction(body, num_api_spec_tokens, limits=limits, retry=retry, priority=priority)

    return make if func is None else make(func)


def set_default_backend(backend: Any) -> None:
    """Where programs run that are not told otherwise: an Engine, a RuntimeEndpoint, any other backend."""
    global_config.default_backend = backend


def flush_cache(backend: Any = None) -> Any:
    """Empty the prefix cache of a backend; False where there is no backend."""
    backend = backend or global_config.default_backend
    return False if backend is None else _backend(backend).flush_cache()


def get_server_info(backend: Any = None) -> Any:
    """What the server says of itself; None where there is no backend."""
    backend = backend or global_config.default_backend
    return None if backend is None else _backend(backend).get_server_info()


def _backend(backend: Any) -> Any:
    from bough.lang.backends import as_backend

    return as_backend(backend)


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | list[str] | None = None,
    stop_token_ids: list[int] | None = None,
    stop_regex: str | list[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: Any = None,
    choices: list[str] | None = None,
    choices_method: ChoicesSamplingMethod | None = None,
    regex: str | None = None,
    json_schema: str | None = None,
    *,
    type: Any = None,
    reask: int = 0,
    validate: Callable[[Any], object] | None = None,
    lora_path: str | None = None,
) -> SglExpr:
    """Let the model write; what it writes becomes the variable ``name``. None means: as the run says.

    Args:
        n: this many answers; the variable is a list, and the text goes on with the first.
        dtype: int, float, bool or str constrain the text; the variable stays a text.
        choices: one of these is chosen instead, as by :func:`select`.
        regex, json_schema: what the text must match.
        type: Python type of the variable: int, float, bool, str, an Enum, a Literal, a dataclass, a TypedDict, a
            Pydantic or msgspec model, a list of any of them. The text is constrained to it.
        reask: how often the model is told why its answer was rejected, and asked again; the text keeps the last.
        validate: rejects a value by raising ValueError, or by returning False.
        lora_path: name of the adapter to use for this answer, on backends that have adapters.
    """
    if choices:
        return SglSelect(
            name, choices, 0.0 if temperature is None else temperature, choices_method or token_length_normalized,
            lora_path,
        )  # fmt: skip
    if regex is not None:
        re.compile(regex)
    return SglGen(
        name, max_tokens, min_tokens, n, stop, stop_token_ids, stop_regex, temperature, top_p, top_k, min_p,
        frequency_penalty, presence_penalty, ignore_eos, return_logprob, logprob_start_len, top_logprobs_num,
        return_text_in_logprobs, dtype, regex, json_schema, type=type, reask=reask, validate=validate,
        lora_path=lora_path,
    )  # fmt: skip


class _TypedGen:
    """:func:`gen` with a ``dtype``, and fewer options."""

    def __init__(self, dtype: type[int] | type[str]) -> None:
        self._dtype = dtype

    def __call__(
        self,
        name: str | None = None,
        max_tokens: int | None = None,
        n: int | None = None,
        stop: str | list[str] | None = None,
        stop_token_ids: list[int] | None = None,
        stop_regex: str | list[str] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        frequency_penalty: float | None = None,
        presence_penalty: float | None = None,
        ignore_eos: bool | None = None,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
    ) -> SglGen:
        return SglGen(
            name, max_tokens, None, n, stop, stop_token_ids, stop_regex, temperature, top_p, top_k, min_p,
            frequency_penalty, presence_penalty, ignore_eos, return_logprob, logprob_start_len, top_logprobs_num,
            return_text_in_logprobs, self._dtype,
        )  # fmt: skip


gen_int = _TypedGen(int)
gen_string = _TypedGen(str)
"""A text in quotation marks."""


def select(
    name: str | None = None,
    choices: list[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod = token_length_normalized,
    *,
    lora_path: str | None = None,
) -> SglSelect:
    """Let the model, or the adapter ``lora_path`` of it, choose one of several continuations, by their logprobs."""
    assert choices is not None
    return SglSelect(name, choices, temperature, choices_method, lora_path)


def act(
    name: str | None = None,
    tools: Sequence[Tool | Callable[..., Any]] = (),
    max_steps: int = 8,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    stop: str | list[str] | None = None,
    type: Any = None,
) -> SglAct:
    """Let the model call tools until it answers; the answer becomes the variable ``name``.

    Stands outside of any role: each step is a message of the assistant, followed by the tool's result as a message of
    the user. :func:`tools_prompt` tells the model what it may call.
    ``get_meta_info(name)["tool_calls"]`` lists the calls.

    Args:
        tools: what it may call.
        max_steps: calls after which it must answer.
        type: of the answer.
    """
    from bough.lang.tools import as_tool

    answer = SglGen(name, max_tokens, temperature=temperature, stop=stop, type=type)
    return SglAct(name, [as_tool(tool) for tool in tools], max_steps, answer)


def image(expr: Any) -> SglImage:
    """An image: the path of a file, the bytes of one, or a PIL image."""
    return SglImage(expr)


def video(path: str, num_frames: int) -> SglVideo:
    """``num_frames`` frames of a video file."""
    return SglVideo(path, num_frames)


def _role(name: str, expr: Any) -> SglExprList:
    inside = [] if expr is None else [expr]
    return SglExprList([SglRoleBegin(name), *inside, SglRoleEnd(name)])


def system(expr: Text | None = None) -> SglExprList:
    """A message of the system."""
    return _role("system", expr)


def user(expr: Text | None = None) -> SglExprList:
    """A message of the user."""
    return _role("user", expr)


def assistant(expr: Text | None = None) -> SglExprList:
    """A message of the assistant."""
    return _role("assistant", expr)


def system_begin() -> SglRoleBegin:
    return SglRoleBegin("system")


def system_end() -> SglRoleEnd:
    return SglRoleEnd("system")


def user_begin() -> SglRoleBegin:
    return SglRoleBegin("user")


def user_end() -> SglRoleEnd:
    return SglRoleEnd("user")


def assistant_begin() -> SglRoleBegin:
    return SglRoleBegin("assistant")


def assistant_end() -> SglRoleEnd:
    return SglRoleEnd("assistant")


def separate_reasoning(expr: Any = None, model_type: str | None = None) -> SglExprList:
    """``expr``, whose reasoning becomes the variable ``<name>_reasoning_content`` and leaves the text.

    Args:
        model_type: family of the model, which says how reasoning is marked: ``qwen3``, ``deepseek-r1`` and others.
    """
    return SglExprList([expr, SglSeparateReasoning(model_type, expr)])
