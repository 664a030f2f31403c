"""The program envelope over HTTP: as a field, as headers, in every API that generates; and what is refused."""

from __future__ import annotations

import pytest

from bough.base.errors import InvalidRequest
from bough.base.program import Lease, Program
from bough.server.programs import cache_lease, program_headers, program_of
from bough.server.schema import ChatRequest


def test_headers_make_an_envelope() -> None:
    raw = [(b"x-bough-program", b"p1"), (b"X-Bough-Program-Next-Uses", b"2"), (b"x-bough-program-pause", b"0.5"),
           (b"x-bough-program-end", b"true"), (b"accept", b"*/*")]  # fmt: skip
    assert program_of(program_headers(raw), None) == Program(id="p1", next_uses=2, pause=0.5, end=True)
    for encoding in ("utf-8", "latin-1"):
        assert program_headers([(b"x-bough-program", "hé".encode(encoding))]) == {"id": "hé"}


def test_the_body_goes_before_the_headers() -> None:
    assert program_of({"id": "header"}, Program(id="body")) == Program(id="body")
    assert program_of({}, None) is None


@pytest.mark.parametrize("headers", [{"pause": "1"}, {"id": "p", "pause": "soon"}, {"id": "p", "colour": "red"}])
def test_wrong_headers_are_named(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        program_of(headers, None)
    assert refused.value.param is not None and refused.value.param.startswith("program")


@pytest.mark.parametrize(
    ("options", "retention", "lease"),
    [
        (None, None, None),
        ({"ttl": "5m"}, None, Lease(ttl=300.0)),
        ({"mode": "explicit", "breakpoints": 1, "ttl": "1h"}, None, Lease(ttl=3600.0)),
        ({"ttl": 90}, None, Lease(ttl=90.0)),
        (None, "24h", Lease(ttl=86400.0)),
        (None, "in_memory", None),
    ],
)
def test_cache_options_ask_for_a_lease(
    options: dict[str, object] | None, retention: str | None, lease: Lease | None
) -> None:
    body = ChatRequest(messages=[], prompt_cache_options=options, prompt_cache_retention=retention)
    assert cache_lease(body) == lease


@pytest.mark.parametrize("ttl", ["soon", "m", True, {}])
def test_a_wrong_time_to_live_is_refused(ttl: object) -> None:
    with pytest.raises(InvalidRequest):
        cache_lease(ChatRequest(messages=[], prompt_cache_options={"ttl": ttl}))


def test_a_cache_key_is_a_short_lease() -> None:
    assert cache_lease(ChatRequest(messages=[], prompt_cache_key="k")) == Lease(ttl=300.0)
    long = ChatRequest(messages=[], prompt_cache_key="k", prompt_cache_retention="24h")
    assert cache_lease(long) == Lease(ttl=86400.0)
