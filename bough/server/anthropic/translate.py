"""From a request of the Messages API to the chat request that answers it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bough.base.errors import InvalidRequest
from bough.server.anthropic.schema import Block, CountTokensRequest, InputMessage, MessagesRequest, ToolChoice
from bough.server.errors import encode_json
from bough.server.schema import ChatRequest

Message = dict[str, Any]

_EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts that chat templates do not know -> the nearest one that they do."""


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """The chat that ``body`` means. Raises InvalidRequest that names the field."""
    messages = [message for i, turn in enumerate(body.messages) for message in _messages(turn, f"messages[{i}]")]
    if body.system:
        messages.insert(0, {"role": "system", "content": _text(body.system, "system")})
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    chat = ChatRequest(messages=messages, model=body.model, tools=tools or None)
    if body.tool_choice is not None:
        chat.tool_choice = _tool_choice(body.tool_choice)
        chat.parallel_tool_calls = not body.tool_choice.disable_parallel_tool_use
    # The last turn is the assistant's where its answer is to go on from there.
    chat.continue_final_message = bool(messages) and messages[-1]["role"] == "assistant"
    chat.include_reasoning = thinks(body)
    if body.thinking is None or body.thinking.type != "adaptive":
        chat.chat_template_kwargs = {"enable_thinking": thinks(body), "thinking": thinks(body)}
    config = body.output_config
    if config is not None and config.effort is not None:
        chat.reasoning_effort = _EFFORTS.get(config.effort, config.effort)
    if config is not None and config.format is not None:
        schema = {"name": "output", "schema": config.format.get("schema"), "strict": True}
        chat.response_format = {"type": config.format.get("type"), "json_schema": schema}
    if hints := list(_cache_hints(body)):
        chat.prompt_cache_options = {
            "mode": "explicit", "breakpoints": len(hints), "ttl": hints[-1].get("ttl", "5m"),
            "messages": _covered(body, len(messages)),
        }  # fmt: skip
    if isinstance(body, MessagesRequest):
        _sampling(chat, body)
    return chat


def thinks(body: CountTokensRequest) -> bool:
    """Whether the answer shows its reasoning."""
    return body.thinking is not None and body.thinking.type != "disabled"


def thinking_budget(body: MessagesRequest) -> int | None:
    """Most tokens of reasoning. Raises InvalidRequest where nothing would be left for the answer."""
    budget = body.thinking.budget_tokens if body.thinking is not None and thinks(body) else None
    if budget is not None and not 0 < budget < body.max_tokens:
        raise InvalidRequest(
            f"thinking.budget_tokens must be at least 1 and less than max_tokens, not {budget}",
            param="thinking.budget_tokens",
        )
    return budget


def _sampling(chat: ChatRequest, body: MessagesRequest) -> None:
    chat.max_tokens = body.max_tokens
    chat.stream = body.stream
    chat.stop = body.stop_sequences
    chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    if isinstance(user := (body.metadata or {}).get("user_id"), str):
        chat.user = user


def _messages(turn: InputMessage, where: str) -> Iterator[Message]:
    """The messages of one turn: the results of calls go before what the user says about them."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    texts: list[Block] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results = False
    for i, block in enumerate(turn.content):
        at = f"{where}.content[{i}]"
        match block.get("type"):
            case "tool_result" if turn.role == "user":
                results = True
                yield {"role": "tool", "tool_call_id": _field(block, "tool_use_id", at), "content": _result(block, at)}
            case "tool_use" if turn.role == "assistant":
                calls.append(_call(block, at))
            case "thinking" if turn.role == "assistant":
                thoughts.append(_field(block, "thinking", at))
            case "redacted_thinking" if turn.role == "assistant":
                pass  # nobody but who wrote it can read it
            case _:
                texts.append({"type": "text", "text": _block_text(block, at)})
    if results and not texts:
        return
    message: Message = {"role": turn.role, "content": texts}
    if len(texts) < 2:
        message["content"] = texts[0]["text"] if texts else ""
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    yield message


def _block_text(block: Block, at: str) -> str:
    kind = block.get("type")
    if kind == "text":
        return _field(block, "text", at)
    if kind == "search_result":
        lines = [str(block.get("title") or ""), str(block.get("source") or "")]
        return "\n".join([*lines, _text(block.get("content") or [], f"{at}.content")])
    raise InvalidRequest(f"{at}: blocks of the type {str(kind)[:64]!r} are not supported here", param=at)


def _text(content: Any, where: str) -> str:
    """The text of a string or of text blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidRequest(f"{where} must be text or a list of blocks", param=where)
    return "\n".join(_block_text(block, f"{where}[{i}]") for i, block in enumerate(content))


def _result(block: Block, at: str) -> str:
    text = _text(block.get("content") or "", f"{at}.content")
    # Templates know no other way to tell that a call has failed.
    return f"Error: {text}" if block.get("is_error") is True and not text.lower().startswith("error") else text


def _call(block: Block, at: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{at}.input must be an object", param=f"{at}.input")
    function = {"name": _field(block, "name", at), "arguments": encode_json(arguments).decode()}
    return {"id": _field(block, "id", at), "type": "function", "function": function}


def _field(block: Block, name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{at}.{name} must be text", param=f"{at}.{name}")
    return value


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise InvalidRequest(f"{at}: this server has no tools of its own such as {str(kind)[:64]!r}", param=at)
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema"), "strict": bool(tool.get("strict"))}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _covered(body: CountTokensRequest, n_messages: int) -> int:
    """How many of the chat's messages stand before the last breakpoint, at least in part."""
    if body.cache_control is not None:
        return n_messages
    n = covered = 1 if body.system else 0
    for i, turn in enumerate(body.messages):
        n += len(list(_messages(turn, f"messages[{i}]")))
        if isinstance(turn.content, list) and any(block.get("cache_control") for block in turn.content):
            covered = n
    return covered


def _cache_hints(body: CountTokensRequest) -> Iterator[dict[str, Any]]:
    """Where the client says that a prefix will come again, in order; the last may be of the whole request."""
    turns = [turn.content for turn in body.messages]
    blocks = [*(body.tools or ()), *(b for part in (body.system, *turns) if isinstance(part, list) for b in part)]
    for holder in blocks:
        if isinstance(hint := holder.get("cache_control"), dict):
            yield hint
    if body.cache_control is not None:
        yield body.cache_control
