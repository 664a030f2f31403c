"""From a request of Ollama's API to the chat request that answers it."""

from __future__ import annotations

from collections import deque
from typing import Any

from bough.base.errors import BoughError, InvalidRequest
from bough.server.ollama.schema import (
    UNSUPPORTED_GENERATE,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    Options,
)
from bough.server.options import check_ids, new_id, truncation
from bough.server.schema import CONSTRAINTS, UNSUPPORTED, ChatRequest, refuse_constraints, refuse_unsupported
from bough.server.service import Service
from bough.server.work import Call

Message = dict[str, Any]

TEMPERATURE, TOP_K, TOP_P = 0.8, 40, 0.9
"""Ollama's defaults, which its clients count on."""


class CannotThink(BoughError):
    """``think`` was asked of a model that does not mark its reasoning."""

    status = 400
    type = "invalid_request_error"


def model_of(service: Service, name: str | None) -> str | None:
    """The served name that ``name`` means: Ollama's clients add the tag ``latest``."""
    return name if name is None or name == service.model_name else name.removesuffix(":latest")


def chat_of_messages(call: Call, body: OllamaChatRequest) -> ChatRequest:
    """The chat that ``body`` means. Raises InvalidRequest that names the field."""
    chat = _chat(call, body, _messages(body.messages))
    chat.tools = body.tools or None
    return chat


async def chat_of_prompt(call: Call, body: OllamaGenerateRequest) -> ChatRequest:
    """The chat of one user's message; ``raw``, or a model without a template, reads the prompt as it is."""
    refuse_unsupported(body, UNSUPPORTED_GENERATE)
    messages = [{"role": "system", "content": body.system}] if body.system else []
    chat = _chat(call, body, [*messages, {"role": "user", "content": body.prompt}])
    if body.raw or call.engine.template is None:
        prompt = body.prompt if body.raw or not body.system else f"{body.system}\n\n{body.prompt}"
        chat.input_ids = await call.engine.tokenize(
            prompt, not body.raw, truncation(chat, call.service, chat.max_tokens)
        )
        check_ids(chat.input_ids, call.service.hello.model.vocab_size, "prompt")
    return chat


def _chat(call: Call, body: OllamaRequest, messages: list[Message]) -> ChatRequest:
    refuse_unsupported(body, UNSUPPORTED)
    refuse_constraints(body, CONSTRAINTS, "format")
    service, options = call.service, body.options or Options()
    chat = ChatRequest(messages=messages, model=model_of(service, body.model), rid=new_id("ollama-"))
    chat.stream = body.stream is not False
    _sampling(chat, options)
    if body.format == "json":
        chat.response_format = {"type": "json_object"}
    elif isinstance(body.format, dict):
        chat.response_format = {
            "type": "json_schema",
            "json_schema": {"name": "format", "schema": body.format, "strict": True},
        }
    elif body.format:
        raise InvalidRequest("format must be json or a JSON Schema", param="format")
    if body.think is not None:
        if body.think and service.form.reasoning is None:
            raise CannotThink(f"{service.model_name!r} does not support thinking", param="think")
        chat.chat_template_kwargs = {"enable_thinking": bool(body.think), "thinking": bool(body.think)}
        chat.include_reasoning = bool(body.think)
        if isinstance(body.think, str):
            chat.reasoning_effort = body.think
    if body.logprobs:
        chat.logprobs, chat.top_logprobs = True, body.top_logprobs
    return chat


def _sampling(chat: ChatRequest, o: Options) -> None:
    if o.mirostat:
        raise InvalidRequest("mirostat is not supported", param="options.mirostat")
    for name in ("typical_p", "tfs_z"):
        if getattr(o, name) not in (None, 1.0):
            raise InvalidRequest(f"{name} is not supported", param=f"options.{name}")
    if o.repeat_last_n not in (None, 0, -1):
        raise InvalidRequest(
            "repeat_last_n can be -1, as penalties look at the whole text, or 0 for no repeat_penalty",
            param="options.repeat_last_n",
        )
    if o.num_predict is not None and o.num_predict >= 0:  # below, as long as it takes
        chat.max_tokens = o.num_predict
    chat.temperature = TEMPERATURE if o.temperature is None else o.temperature
    chat.top_k = TOP_K if o.top_k is None else o.top_k
    chat.top_p = TOP_P if o.top_p is None else o.top_p
    chat.min_p, chat.stop = o.min_p, o.stop
    chat.seed = None if o.seed == -1 else o.seed
    chat.presence_penalty, chat.frequency_penalty = o.presence_penalty, o.frequency_penalty
    chat.repetition_penalty = None if o.repeat_last_n == 0 else o.repeat_penalty


def _messages(messages: list[Message]) -> list[Message]:
    """The messages with OpenAI's fields: calls and their results, which Ollama knows by name and order, get ids."""
    made: list[Message] = []
    waiting: deque[tuple[str, str]] = deque()
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        if message.get("images"):
            raise InvalidRequest(f"{at}.images is not supported yet by this version", param=f"{at}.images")
        turn: Message = {key: message[key] for key in ("role", "content") if key in message}
        turn.setdefault("content", "")
        if calls := message.get("tool_calls"):
            turn["tool_calls"] = _calls(calls, at, len(made))
            waiting.extend((call["id"], call["function"].get("name")) for call in turn["tool_calls"])
        if message.get("thinking"):
            turn["reasoning_content"] = message["thinking"]
        if message.get("role") == "tool":
            turn["tool_call_id"] = message.get("tool_call_id") or _answered(waiting, message.get("tool_name"))
        made.append(turn)
    return made


def _calls(calls: Any, at: str, number: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(
        isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls
    ):
        raise InvalidRequest(f"{at}.tool_calls must be a list of functions", param=f"{at}.tool_calls")
    return [
        {"id": call.get("id") or f"call_{number}_{k}", "type": "function", "function": call["function"]}
        for k, call in enumerate(calls)
    ]


def _answered(waiting: deque[tuple[str, str]], name: Any) -> str:
    """Id of the call that a result is of: the first without one that has its name, or the first of all."""
    found = next((call for call in waiting if call[1] == name), waiting[0] if waiting else None)
    if found is None:
        return "call"
    waiting.remove(found)
    return found[0]
