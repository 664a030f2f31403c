"""Lists in pages, as OpenAI's clients turn them: ``after`` an id, at most ``limit`` entries, in ``order``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request

from bough.base.errors import InvalidRequest

PAGED: dict[str, Any] = {
    "limit": {"type": "integer"}, "after": {"type": "string"}, "order": {"enum": ["asc", "desc"]},
}  # fmt: skip
"""What :func:`page` reads of the query."""


def integer(request: Request, name: str, default: int, least: int, most: int) -> int:
    """A query parameter. Raises InvalidRequest outside [least, most]."""
    text = request.query_params.get(name)
    try:
        value = default if text is None else int(text[:32])
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise InvalidRequest(f"{name} must be a whole number in [{least}, {most}]", param=name)
    return value


def page(request: Request, entries: Sequence[dict[str, Any]], *, default: int, most: int) -> dict[str, Any]:
    """The page of ``entries``, which are in ascending order and have ids, that ``request`` asks for."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    found = list(entries) if order == "asc" else list(reversed(entries))
    if (after := request.query_params.get("after")) is not None:
        ids = [entry["id"] for entry in found]
        if after not in ids:
            raise InvalidRequest(f"there is no {after[:256]!r} in this list", param="after")
        found = found[ids.index(after) + 1 :]
    limit = integer(request, "limit", default, 1, most)
    data = found[:limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(found) > limit}
