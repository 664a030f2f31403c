"""SGLang's native routes that parse a text which was generated elsewhere."""

from __future__ import annotations

import asyncio

from bough.base.errors import ConfigError, InvalidRequest
from bough.server.errors import encode_json
from bough.server.schema import ParseCallsRequest, SeparateReasoningRequest
from bough.server.tools import schemas_of
from bough.server.work import Call
from bough.text.answer import AnswerParser, parse_answer
from bough.text.events import CallArguments, CallStart, Content, Event, Reasoning, Trouble
from bough.text.formats import find_reasoning, find_tools


async def parse_function_call(call: Call, body: ParseCallsRequest) -> bytes:
    """The tool calls in a text, by the format of the served model or of the family that is named."""
    schemas = schemas_of(body.tools, call.service.limits)
    try:
        family = find_tools(body.tool_call_parser, "") if body.tool_call_parser else call.service.form.tools
    except ConfigError as error:
        raise InvalidRequest(error.message, param="tool_call_parser") from None
    # A text may be as long as a body, so the event loop does not wait for it.
    events = await asyncio.to_thread(parse_answer, AnswerParser(None, family, schemas or None), body.text)
    calls = [
        {"tool_index": event.index, "name": event.name, "parameters": arguments_of(events, event.index)}
        for event in events
        if isinstance(event, CallStart)
    ]
    text = "".join(event.text for event in events if isinstance(event, Content))
    trouble = next((event.reason for event in events if isinstance(event, Trouble)), None)
    return encode_json({"normal_text": text, "calls": calls, "parse_error": trouble})


def arguments_of(events: list[Event], index: int) -> str:
    return "".join(event.text for event in events if isinstance(event, CallArguments) and event.index == index)


async def separate_reasoning(call: Call, body: SeparateReasoningRequest) -> bytes:
    """The reasoning in a text and the rest, by the format of the served model or of the family that is named."""
    try:
        form = find_reasoning(body.reasoning_parser, "") if body.reasoning_parser else call.service.form.reasoning
    except ConfigError as error:
        raise InvalidRequest(error.message, param="reasoning_parser") from None
    events = await asyncio.to_thread(parse_answer, AnswerParser(form), body.text)
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    text = "".join(event.text for event in events if isinstance(event, Content))
    return encode_json({"reasoning_text": reasoning, "text": text})
