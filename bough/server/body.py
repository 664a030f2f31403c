"""Reading a request body: bounded while it arrives, checked before it is parsed, typed when it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TypeVar

import msgspec
from starlette.types import Receive

from bough.base.errors import InvalidRequest
from bough.base.limits import Limits
from bough.server.errors import BodyTimeout, TooLarge, UnsupportedMedia

T = TypeVar("T")
Headers = Iterable[tuple[bytes, bytes]]

_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(b for b in range(256) if b not in b"[]{}")


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


def check_headers(headers: Headers, limits: Limits) -> None:
    """Refuse what can be refused before the body is read.

    Raises TooLarge by the declared length, UnsupportedMedia for compressed bodies and for other types
    than JSON (which also keeps web pages of other origins from posting forms to a local server).
    """
    for name, value in headers:
        if name == b"content-length" and (not value.isdigit() or int(value) > limits.body_bytes):
            raise TooLarge(f"the body is larger than {limits.body_bytes} bytes")
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise UnsupportedMedia("compressed request bodies are not accepted")
        if name == b"content-type" and b"json" not in value.lower():
            raise UnsupportedMedia("the body must be JSON: send the header Content-Type: application/json")


async def read_body(receive: Receive, limits: Limits) -> bytes:
    """The whole body, never holding more than ``limits.body_bytes`` of it.

    Raises TooLarge, BodyTimeout, or ClientGone.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(limits.read_seconds):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > limits.body_bytes:
                    raise TooLarge(f"the body is larger than {limits.body_bytes} bytes")
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {limits.read_seconds:g} seconds") from None


def check_depth(body: bytes, limit: int) -> None:
    """Refuse JSON that nests deeper than ``limit``, in time linear in its length, without parsing it.

    Only brackets outside strings count. Each round removes the innermost pairs, so what is left after
    ``limit`` rounds is nested deeper (or not JSON).
    """
    if body.count(b"[") + body.count(b"{") <= limit:
        return
    outside = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    brackets = b"".join(outside).translate(_BRACKETS, _NOT_BRACKETS)
    for _ in range(limit):
        inner = brackets.replace(b"[]", b"")
        if len(inner) in (0, len(brackets)):
            brackets = inner
            break
        brackets = inner
    if brackets:
        raise InvalidRequest(f"the body is not valid JSON, or nests deeper than {limit} levels")


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes, limits: Limits) -> T:
    """``body`` as the decoder's type.

    Raises InvalidRequest for anything else: bad JSON, bad UTF-8, lone surrogates, NaN, wrong types.
    """
    check_depth(body, limits.json_depth)
    try:
        return decoder.decode(body or b"{}")
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        # A key or value of a mapping is said to be at "key in `$.field`" or at "$.field[...]": the field is to blame.
        param = path.rpartition("`$")[2].strip("`$").lstrip(".").removesuffix("[...]") or None
        raise InvalidRequest(f"{param or 'body'}: {message}", param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
