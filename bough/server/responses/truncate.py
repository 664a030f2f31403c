"""``truncation: auto``: what a conversation begins with is dropped until the rest fits the context."""

from __future__ import annotations

from collections.abc import Sequence

from bough.base.errors import InvalidRequest
from bough.server.chat import render
from bough.server.responses.schema import ResponsesRequest
from bough.server.responses.translate import Item, chat_request
from bough.server.work import Call
from bough.text.memory import Bound


async def fitting(call: Call, body: ResponsesRequest, items: list[Item]) -> list[Item]:
    """The longest end of ``items`` that leaves room for the answer, but at least the last of them.

    It begins with a message of the user, as many templates want, unless the last turn alone is too long. An output
    goes with the call that it is of. Bisects, so that a long conversation is rendered some ten times.
    """
    room = call.service.hello.model.context_length - (body.max_output_tokens or 1)

    async def fits(first: int) -> bool:
        chat = chat_request(body, without(items, first), "")
        prompt = await render(call.engine, call.service, chat, Bound(room, "begin"))
        return len(prompt) <= room

    async def first_fitting(cuts: Sequence[int]) -> int | None:
        low, high = -1, len(cuts)
        while high - low > 1:
            middle = (low + high) // 2
            try:
                good = await fits(cuts[middle])
            except InvalidRequest:  # not every template takes a conversation that begins there
                good = False
            low, high = (low, middle) if good else (middle, high)
        return cuts[high] if high < len(cuts) else None

    if await fits(0):
        return items
    turns = [i for i, item in enumerate(items) if i and item["type"] == "message" and item.get("role") == "user"]
    within = range(turns[-1] + 1 if turns else 1, len(items))
    for cuts in (turns, within):
        if (first := await first_fitting(cuts)) is not None:
            return without(items, first)
    return without(items, len(items) - 1)


def without(items: list[Item], first: int) -> list[Item]:
    """``items`` from ``first`` on, and no outputs of calls before it."""
    calls = {item.get("call_id") for item in items[:first] if item["type"] == "function_call"}
    return [
        item for item in items[first:] if not (item["type"] == "function_call_output" and item.get("call_id") in calls)
    ]
