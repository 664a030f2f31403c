"""A hundred requests with one new prefix, which is computed once."""

from __future__ import annotations

import asyncio

from .serving import Server, Stream, clients, read_stream

PREFIX, SUFFIX, ANSWER, CLIENTS = 150, 5, 8, 100


def test_a_common_prefix_is_computed_once(served: Server) -> None:
    def prompt(i: int) -> list[int]:
        return [10 + (7 * k) % 200 for k in range(PREFIX)] + [20 + i, 130 + i // 10, 20 + i, 9, 9][:SUFFIX]

    before = served.quiet()

    async def main() -> list[Stream]:
        async with clients(served) as client:
            return await asyncio.gather(*(read_stream(client, prompt(i), ANSWER, Stream()) for i in range(CLIENTS)))

    streams = asyncio.run(main())
    after = served.quiet()
    assert all(s.done and s.finish == "length" for s in streams)
    # The last generated token of an answer is never computed.
    least = PREFIX + CLIENTS * (SUFFIX + ANSWER - 1)
    computed = after["computed_tokens"] - before["computed_tokens"]
    assert least <= computed <= least + 2 * CLIENTS
    cached = after["cached_tokens"] - before["cached_tokens"]
    assert cached >= (CLIENTS - 1) * PREFIX
    for i in (0, 57, 99):
        assert served.tokens(prompt(i), ANSWER) == streams[i].tokens
