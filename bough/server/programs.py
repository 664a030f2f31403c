"""The program envelope over HTTP: a field of the body, or headers for clients that can set nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from bough.base.errors import InvalidRequest
from bough.base.program import Lease, Program
from bough.server.schema import ChatRequest

PREFIX = "x-bough-program"
KEY_SECONDS = 300
_IN_MEMORY = ("in_memory", "in-memory")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def program_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The envelope among ``headers``: ``x-bough-program`` is its id, ``x-bough-program-<field>`` any other field.

    Values are UTF-8; one that is not is Latin-1, as in HTTP.
    """
    found = {}
    for raw, value in headers:
        name = raw.decode("latin-1").lower()
        if name == PREFIX:
            found["id"] = _text(value)
        elif name.startswith(f"{PREFIX}-"):
            found[name[len(PREFIX) + 1 :].replace("-", "_")] = _text(value)
    return found


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def program_of(headers: Mapping[str, str], body: Program | None) -> Program | None:
    """The envelope of a request; the body's goes before the headers'. Raises InvalidRequest for a wrong header."""
    if body is not None or not headers:
        return body
    if "id" not in headers:
        raise InvalidRequest(f"the header {PREFIX} with the program's id is missing", param="program.id")
    try:
        return msgspec.convert(dict(headers), Program, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the headers {PREFIX}-* are wrong: {error}", param="program") from None


def programs_named(headers: Mapping[str, str], body: Program | list[Program] | None) -> frozenset[str]:
    """The ids of the programs whose envelopes came with a request."""
    if body is None:
        return frozenset([headers["id"]] if "id" in headers else ())
    return frozenset(named.id for named in (body if isinstance(body, list) else [body]))


def lease_of(ttl: float | None) -> Lease | None:
    """A lease on the whole prompt for ``ttl`` seconds."""
    return None if ttl is None else Lease(ttl=ttl)


def cache_lease(body: ChatRequest) -> Lease | None:
    """The lease that OpenAI's ``prompt_cache_key``, ``prompt_cache_options`` and ``prompt_cache_retention`` ask for.

    Anthropic's ``cache_control`` arrives as the options. A key alone asks for as long as prompts are kept in memory
    there. Raises InvalidRequest for a time to live that is none, and for a comparison with another response.
    """
    options, param = body.prompt_cache_options or {}, "prompt_cache_options"
    if options.get("comparison_response_id"):
        raise InvalidRequest(
            "comparison_response_id is not supported: usage says how many tokens came from the cache", param=param
        )
    ttl: Any = options.get("ttl")
    if ttl is None and body.prompt_cache_retention not in (None, *_IN_MEMORY):
        ttl, param = body.prompt_cache_retention, "prompt_cache_retention"
    if ttl is None and body.prompt_cache_key is not None:
        ttl = KEY_SECONDS
    if ttl is None:
        return None
    if isinstance(ttl, str) and ttl[:-1].isdecimal() and ttl[-1:] in _UNITS:
        return Lease(ttl=float(ttl[:-1]) * _UNITS[ttl[-1]])
    if isinstance(ttl, int | float) and not isinstance(ttl, bool):
        return Lease(ttl=float(ttl))
    raise InvalidRequest("the time to live of a cached prompt is seconds, or like 5m or 1h", param=param)
