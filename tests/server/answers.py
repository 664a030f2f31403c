"""What is asked of the scripted model, what it shall answer, and the request that the engine saw."""

from __future__ import annotations

import itertools
from typing import Any

from .scripted import MODEL, Running

ASK: Any = [{"role": "user", "content": "weather?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
TOOLS: Any = [WEATHER, TIME]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nIt asks for weather.\n</think>\n\n"

numbers = itertools.count()


def answering(server: Running, *texts: str) -> dict[str, Any]:
    """The fields of a request whose choices generate ``texts``."""
    rid = f"tools-{next(numbers)}"
    for i, text in enumerate(texts):
        server.client.answers[rid if len(texts) == 1 else f"{rid}-{i}"] = text
    return {"model": MODEL, "messages": ASK, "n": len(texts), "extra_body": {"rid": rid}}


def sent(server: Running, fields: dict[str, Any]) -> Any:
    rid = fields["extra_body"]["rid"]
    return next(r for r in server.client.seen if r.rid == rid)
