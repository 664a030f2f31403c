"""Plain values from APIs that constrain answers by JSON Schemas only: they are asked for as ``{"value": ...}``.

Programs see the value as it is written elsewhere, so their texts do not depend on the API.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from bough.lang.params import SglSamplingParams

if TYPE_CHECKING:
    from bough.lang.executor import StreamExecutor

_KEY = "value"
WRAPPER_TOKENS = 16
"""What an object may cost more than the value in it, where no budget is passed by that."""


def wrap(s: StreamExecutor, params: SglSamplingParams) -> bool:
    """Have ``params`` ask for an object in the place of a plain value; False where they ask for none."""
    if params.value_schema is None:
        return False
    schema = {
        "type": "object",
        "properties": {_KEY: params.value_schema},
        "required": [_KEY],
        "additionalProperties": False,
    }
    params.json_schema, params.regex, params.value_schema = json.dumps(schema, ensure_ascii=False), None, None
    params.stop = ()  # one would end the object before its value
    if params.max_new_tokens is not None and s.program.limits.tokens is None:
        params.max_new_tokens += WRAPPER_TOKENS
    return True


def unwrapped(text: str) -> str:
    """The plain value of an answer, as it would be written alone; ``text`` itself where it is no such object."""
    try:
        value = json.loads(text)[_KEY]
    except (ValueError, LookupError, TypeError):
        return text
    return value if isinstance(value, str) else json.dumps(value)


async def in_one_piece(pieces: AsyncIterator[tuple[str, Any]]) -> AsyncIterator[tuple[str, Any]]:
    """A stream of (new text, meta information) of an object, as that of the plain value, which comes at the end."""
    text, last = "", dict[str, Any]()
    async for new, meta in pieces:
        text, last = text + new, meta or last
        yield "", last
    yield unwrapped(text), last
