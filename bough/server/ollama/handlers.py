"""POST /api/chat and /api/generate."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

from bough.base.errors import InvalidRequest
from bough.server.chat import ChatStream, open_chat
from bough.server.errors import encode_json
from bough.server.ollama.answer import Said, Teller
from bough.server.ollama.schema import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest
from bough.server.ollama.translate import chat_of_messages, chat_of_prompt, model_of
from bough.server.schema import ChatRequest, Empty
from bough.server.work import Answer, Call, Events


async def ollama_chat(call: Call, body: OllamaChatRequest) -> Answer:
    """POST /api/chat."""
    if not body.messages:
        return _loaded(call, body, "chat")
    return await _answer(call, chat_of_messages(call, body), "chat")


async def ollama_generate(call: Call, body: OllamaGenerateRequest) -> Answer:
    """POST /api/generate."""
    if not body.prompt:
        return _loaded(call, body, "generate")
    return await _answer(call, await chat_of_prompt(call, body), "generate")


def _loaded(call: Call, body: OllamaRequest, kind: Literal["chat", "generate"]) -> Answer:
    """The answer to a request without a prompt, with which clients have a model loaded."""
    call.service.check_model(model_of(call.service, body.model))
    return encode_json(Teller(call.service.model_name, kind, call.started).last(Said(), None))


async def _answer(call: Call, request: ChatRequest, kind: Literal["chat", "generate"]) -> Answer:
    chat = await open_chat(call, request, cut=True)
    teller = Teller(chat.model, kind, call.started)
    if request.stream:
        return Events(_stream(chat, teller))
    whole = Said()
    async with aclosing(chat.pieces) as pieces:
        async for choices in pieces:
            whole.add(teller.take(choices))
    return encode_json(teller.last(whole, chat.usage(), chat.warnings(), chat.program()))


async def _stream(chat: ChatStream, teller: Teller) -> AsyncGenerator[bytes, None]:
    async with aclosing(chat.pieces) as pieces:
        async for choices in pieces:
            if said := teller.take(choices):
                yield encode_json(teller.line(said)) + b"\n"
    yield encode_json(teller.last(Said(), chat.usage(), chat.warnings(), chat.program())) + b"\n"


async def refuse_management(call: Call, body: Empty) -> Answer:
    """Raises InvalidRequest: the served model is chosen when the server starts."""
    raise InvalidRequest("this server serves the model it was started with: models are neither added nor removed here")
