"""/v1/responses: create, retrieve, continue in the background, cancel, delete, list the input."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.responses import Response

from bough.base.errors import BoughError, EngineError, InvalidRequest, Overloaded
from bough.server.answers import ChatChunkChoice
from bough.server.chat import ChatStream, open_chat
from bough.server.errors import encode_json
from bough.server.options import check_metadata
from bough.server.paging import integer, page
from bough.server.programs import programs_named
from bough.server.responses.answer import Event, Growing, encode_event, new_response
from bough.server.responses.schema import ResponsesRequest
from bough.server.responses.store import EventLog, ResponseStore, Stored
from bough.server.responses.translate import Item, chat_request, check, input_items, own_words, param_of, resolved
from bough.server.responses.truncate import fitting
from bough.server.schema import Empty, decoder
from bough.server.service import Service
from bough.server.work import Answer, Call, Events, Work

logger = logging.getLogger("bough.server")

LISTED = 20
MOST_LISTED = 100


class Responses:
    """The endpoints, over what they store."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.store = ResponseStore(service.limits)

    async def create(self, call: Call, body: ResponsesRequest) -> Answer:
        """POST /v1/responses."""
        check(body)
        check_metadata(body.metadata, call.service.limits)
        history, own = self._items(call, body)
        model = call.service.adapter(body.model, body.lora_path) or call.service.model_name
        response = new_response(body, model, int(time.time()))
        growing = Growing(response)
        if body.background:
            return self._start(call, body, growing, history, own)
        # What is wrong with the request is found before anything is answered.
        chat = await _open(call, body, [*history, *own], response["id"])
        if body.stream:
            return Events(self._stream(call, body, growing, chat, history, own))
        async with aclosing(chat.pieces) as pieces:
            async for choices in pieces:
                growing.take(choices)
        growing.end(chat.usage(), chat.warnings(), chat.program())
        self._keep(call, body, response, history, own)
        return encode_json(response)

    def _items(self, call: Call, body: ResponsesRequest) -> tuple[list[Item], list[Item]]:
        """(items of the conversation that is continued, items of this request)."""
        history: list[Item] = []
        if body.previous_response_id is not None:
            try:
                previous = self.store.get(body.previous_response_id, call.principal.tenant)
            except BoughError:
                raise InvalidRequest(
                    f"Previous response with id '{body.previous_response_id[:256]}' not found.",
                    param="previous_response_id", code="previous_response_not_found",
                ) from None  # fmt: skip
            if previous.running:
                raise InvalidRequest("the previous response is not finished yet", param="previous_response_id")
            history = previous.conversation
        return history, resolved(input_items(body), history)

    def _keep(
        self, call: Call, body: ResponsesRequest, response: dict[str, Any], history: list[Item], own: list[Item]
    ) -> None:
        if body.store is not False:
            self.store.add(response, call.principal.tenant, history, own)

    async def _stream(
        self,
        call: Call,
        body: ResponsesRequest,
        growing: Growing,
        chat: ChatStream,
        history: list[Item],
        own: list[Item],
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(_events(growing, chat.pieces, chat)) as events:
            async for piece in events:
                yield piece
        self._keep(call, body, growing.response, history, own)

    # In the background

    def _start(
        self, call: Call, body: ResponsesRequest, growing: Growing, history: list[Item], own: list[Item]
    ) -> Answer:
        limits = call.service.limits
        if self.store.running(call.principal.tenant) >= limits.responses_background:
            raise Overloaded("too many responses run in the background")
        if body.priority is None:
            body.priority = -limits.priority_abs  # behind those that somebody waits for
        # What is wrong with the request is still its own error.
        chat_request(body, [*history, *own], growing.response["id"])
        stored = self.store.add(growing.response, call.principal.tenant, history, own)
        stored.log = EventLog()
        stored.log.add([encode_event(event) for event in growing.begin()])
        answer = encode_json(growing.response)
        call.flight.programs = frozenset()  # those of the work
        stored.task = asyncio.create_task(self._work(call, body, growing, stored))
        return Events(stored.log.read(-1)) if body.stream else answer

    async def _work(self, call: Call, body: ResponsesRequest, growing: Growing, stored: Stored) -> None:
        """Generate on behalf of nobody's connection."""
        log, service = stored.log, call.service
        assert log is not None
        with service.flight(call.request_id, tenant=call.principal.tenant) as flight:
            flight.programs = programs_named(call.program, body.program)
            own_call = replace(call, flight=flight, started=time.perf_counter())
            try:
                chat = await _open(own_call, body, [*stored.history, *stored.own], stored.response["id"])
                log.add([encode_event(event) for event in growing.run()])
                async with aclosing(chat.pieces) as pieces:
                    async for choices in pieces:
                        log.add([encode_event(event) for event in growing.take(choices)])
                log.add([encode_event(event) for event in growing.end(chat.usage(), chat.warnings(), chat.program())])
            except asyncio.CancelledError:
                growing.cancel()
                raise
            except Exception as error:
                log.add([encode_event(event) for event in growing.fail(_known(error, call.request_id))])
            finally:
                log.close()
                self.store.resize(stored)

    # What is stored

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/responses/{id}; with ``stream=true`` the events of a background response."""
        stored = self._stored(request)
        if request.query_params.get("stream", "false").lower() != "true":
            return _json(stored.response)
        log = stored.log
        if log is None:
            raise InvalidRequest("only responses that were created in the background can be streamed", param="stream")
        after = integer(request, "starting_after", -1, -1, 1 << 62)

        async def replay(call: Call, body: Empty) -> Answer:
            return Events(log.read(after))

        return Work(self.service, decoder(Empty), replay)

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{id}/cancel."""
        stored = self._stored(request)
        if stored.task is None:
            raise InvalidRequest("Cannot cancel a synchronous response.")
        if stored.running:
            await _stop(stored)
        return _json(stored.response)

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{id}; work in the background ends."""
        stored = self._stored(request)
        if stored.running:
            await _stop(stored)
        self.store.remove(stored)
        return _json({"id": stored.response["id"], "object": "response.deleted", "deleted": True})

    async def items(self, request: Request) -> Response:
        """GET /v1/responses/{id}/input_items, the latest first unless ``order=asc``."""
        stored = self._stored(request)
        entries = [*stored.history, *stored.own]
        return _json(page(request, entries, default=LISTED, most=MOST_LISTED))

    def _stored(self, request: Request) -> Stored:
        return self.store.get(request.path_params["response_id"], request.scope["state"]["principal"].tenant)


async def _stop(stored: Stored) -> None:
    """End the background work of ``stored``, whether or not it has begun."""
    assert stored.task is not None and stored.log is not None
    stored.task.cancel()
    await asyncio.wait({stored.task})
    if stored.running:
        stored.response["status"] = "cancelled"
        stored.log.close()


async def _open(call: Call, body: ResponsesRequest, items: list[Item], rid: str) -> ChatStream:
    """The chat that answers ``items``, whose errors name fields of this API."""
    with _own_names():
        if body.truncation == "auto":
            items = await fitting(call, body, items)
        chat = await open_chat(call, chat_request(body, items, rid))
    return ChatStream(chat.usage, chat.warnings, chat.program, _own_errors(chat.pieces), chat.enforced, chat.model)


async def _own_errors(
    pieces: AsyncGenerator[list[ChatChunkChoice], None],
) -> AsyncGenerator[list[ChatChunkChoice], None]:
    with _own_names():
        async with aclosing(pieces):
            async for choices in pieces:
                yield choices


@contextmanager
def _own_names() -> Iterator[None]:
    try:
        yield
    except BoughError as error:
        error.param, error.message = param_of(error.param), own_words(error.message)
        raise


async def _events(
    growing: Growing, pieces: AsyncGenerator[list[ChatChunkChoice], None], chat: ChatStream
) -> AsyncGenerator[bytes, None]:
    """The chat as events of the response, encoded; a failure once they have begun is the last of them."""
    begun = False

    def encoded(events: list[Event]) -> bytes:
        return b"".join([encode_event(event) for event in events])

    async with aclosing(pieces):
        try:
            async for choices in pieces:
                if not begun:
                    begun = True
                    yield encoded(growing.begin()) + encoded(growing.run())
                if news := encoded(growing.take(choices)):
                    yield news
            yield encoded(growing.end(chat.usage(), chat.warnings(), chat.program()))
        except BoughError as error:
            if not begun:  # it still has its HTTP status
                raise
            yield encoded(growing.fail(error))


def _known(error: Exception, request_id: str) -> BoughError:
    if isinstance(error, BoughError):
        return error
    logger.error("request %s failed", request_id, exc_info=error)
    return EngineError("the server failed while it handled this request")


def _json(value: Any) -> Response:
    return Response(encode_json(value), media_type="application/json")
