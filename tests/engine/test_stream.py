"""The buffer of a stream: nothing is lost, nothing is held without end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bough.base.limits import DEFAULT_LIMITS
from bough.base.messages import Finish, Logprob, Output
from bough.engine.stream import OutputStream

LIMITS = replace(DEFAULT_LIMITS, stream_stall_seconds=10.0, stream_buffer_tokens=100)


def stream(*rids: str) -> tuple[OutputStream, list[str]]:
    left: list[str] = []
    return OutputStream(list(rids), LIMITS, left.extend), left


def output(rid: str, index: int, n: int, finish: Finish | None = None) -> Output:
    tokens = list(range(index, index + n))
    return Output(rid, index, tokens, 3, 1, finish, [Logprob(t, -1.0, 1, [], []) for t in tokens])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.booleans()), max_size=60))
def test_whatever_is_read_when_adds_up(events: list[tuple[str, int, bool]]) -> None:
    async def scenario() -> None:
        source, left = stream("a", "b", "c")
        sent = dict.fromkeys("abc", 0)
        got: dict[str, list[int]] = {"a": [], "b": [], "c": []}

        def take(news: Output) -> None:
            assert news.index == len(got[news.rid])
            assert news.logprobs is not None and [p.token for p in news.logprobs] == news.tokens
            got[news.rid] += news.tokens

        for rid, n, read in events:
            source.feed(output(rid, sent[rid], n), 0.0)
            sent[rid] += n
            if read:
                take(await anext(source))
        for rid in "abc":
            source.feed(output(rid, sent[rid], 1, Finish("length")), 0.0)
            sent[rid] += 1
        finished = []
        async for news in source:
            take(news)
            finished.append(news.rid)
            assert news.finish is not None
        assert sorted(finished) == ["a", "b", "c"]
        assert got == {rid: list(range(n)) for rid, n in sent.items()}
        await source.aclose()
        assert not left

    asyncio.run(scenario())


def test_unread_for_too_long_ends_the_request() -> None:
    async def scenario() -> None:
        source, _ = stream("a")
        source.feed(output("a", 0, 1), 100.0)
        source.feed(output("a", 1, 1), 109.0)
        assert source.unfinished
        source.feed(output("a", 2, 1), 111.0)
        assert not source.unfinished
        news = await anext(source)
        assert news.tokens == [0, 1, 2]
        assert news.finish is not None and (news.finish.kind, news.finish.status) == ("timeout", 408)

    asyncio.run(scenario())


def test_too_many_unread_tokens_end_the_request() -> None:
    async def scenario() -> None:
        source, _ = stream("a")
        for i in range(101):
            assert source.unfinished
            source.feed(output("a", i, 1), 0.0)
        news = await anext(source)
        assert len(news.tokens) == 101 and news.finish is not None and news.finish.kind == "timeout"

    asyncio.run(scenario())


def test_a_gap_is_an_error_not_a_wrong_text() -> None:
    async def scenario() -> None:
        source, _ = stream("a")
        source.feed(output("a", 0, 2), 0.0)
        source.feed(output("a", 3, 1), 0.0)
        news = await anext(source)
        assert news.tokens == [0, 1] and news.finish is not None and news.finish.kind == "error"

    asyncio.run(scenario())


def test_closing_aborts_what_is_unfinished_once() -> None:
    async def scenario() -> None:
        source, left = stream("a", "b")
        source.feed(output("a", 0, 1, Finish("stop")), 0.0)
        await source.aclose()
        await source.aclose()
        assert left == ["b"]
        assert [news async for news in source] == []

    asyncio.run(scenario())
