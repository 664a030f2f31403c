"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from bough.server.anthropic.answer import Growing, encode_event
from bough.server.anthropic.schema import UNSUPPORTED_MESSAGES, CountTokensRequest, MessagesRequest
from bough.server.anthropic.translate import chat_request, thinking_budget
from bough.server.chat import ChatStream, open_chat, render
from bough.server.errors import encode_json
from bough.server.options import new_id
from bough.server.schema import CONSTRAINTS, refuse_constraints, refuse_unsupported
from bough.server.work import Answer, Call, Events


async def messages(call: Call, body: MessagesRequest) -> Answer:
    """POST /v1/messages."""
    refuse_unsupported(body, UNSUPPORTED_MESSAGES)
    refuse_constraints(body, CONSTRAINTS, "output_config.format")
    request = chat_request(body)
    request.rid = new_id("msg_")
    if call.service.form.reasoning is not None:
        request.thinking_token_budget = thinking_budget(body)
    chat = await open_chat(call, request, cut=True)
    growing = Growing(request.rid, chat.model, body, chat.enforced)
    if body.stream:
        return Events(_stream(chat, growing))
    async with aclosing(chat.pieces) as pieces:
        async for choices in pieces:
            growing.take(choices)
    growing.end(chat.usage(), chat.warnings(), chat.program())
    return encode_json(growing.message)


async def _stream(chat: ChatStream, growing: Growing) -> AsyncGenerator[bytes, None]:
    begun = False
    async with aclosing(chat.pieces) as pieces:
        async for choices in pieces:
            events = [] if begun else growing.begin(chat.usage())
            begun = True
            events += growing.take(choices)
            if events:
                yield b"".join(map(encode_event, events))
    yield b"".join(map(encode_event, growing.end(chat.usage(), chat.warnings(), chat.program())))


async def count_tokens(call: Call, body: CountTokensRequest) -> bytes:
    """POST /v1/messages/count_tokens."""
    call.service.check_model(body.model)
    ids = await render(call.engine, call.service, chat_request(body))
    return encode_json({"input_tokens": len(ids)})
