"""Tools for models whose chat template knows nothing of them: told in words, and past calls written out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bough.text.tools.format import Family
from bough.text.tools.writer import Call, write_calls

Message = dict[str, Any]

_TOLD = """You can call functions. To call one, answer with nothing but the call, written like this:
{example}
These are the functions, with the JSON Schemas of their arguments:
{functions}"""


def tell_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], family: Family) -> list[Message]:
    """``messages`` with the ``tools`` described in the system message."""
    told = _TOLD.format(
        example=write_calls(family, [("function_name", {"argument": "value"})]),
        functions="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools),
    )
    if messages and messages[0]["role"] == "system":
        first, *rest = messages
        return [{**first, "content": f"{_plain(first['content'])}\n\n{told}"}, *rest]
    return [{"role": "system", "content": told}, *messages]


def write_history(messages: Sequence[Message], family: Family) -> list[Message]:
    """``messages`` with past calls as the text that they were, and their results as messages of the user."""
    written: list[Message] = []
    answered = False  # the last message has results, to which further ones are added
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{_plain(message['content'])}\n</tool_response>"
            if answered:
                written[-1]["content"] += f"\n{result}"
            else:
                written.append({"role": "user", "content": result})
            answered = True
            continue
        answered = False
        if calls := message.get("tool_calls"):
            text = "\n".join(filter(None, (_plain(message["content"]), write_calls(family, [_call(c) for c in calls]))))
            message = {"role": message["role"], "content": text}
        written.append(message)
    return written


def _call(call: Mapping[str, Any]) -> Call:
    function = call["function"]
    arguments = function.get("arguments") or {}
    return function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
