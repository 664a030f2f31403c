"""Request bodies of the Messages API. Unknown fields are ignored."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from bough.server.schema import UNSUPPORTED, Unsupported

Block = dict[str, Any]


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Thinking(msgspec.Struct, kw_only=True):
    """``budget_tokens`` is a hint: the length of the reasoning is the model's."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountTokensRequest(Unsupported, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: Any = None


UNSUPPORTED_MESSAGES = (*UNSUPPORTED, "container", "mcp_servers")
