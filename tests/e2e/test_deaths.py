"""kill -9 of each process under load: every client hears of it, nothing is left behind, and it serves again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from .serving import TINY, Server, Stream, clients, dead, load, read_stream, running, wait_for

NOTICE = 3.0
"""Seconds within which everyone whom a death concerns has heard of it."""
RESTART = 20.0
STREAMS = 20
PROMPTS = [[10 + i, 20, 30] for i in range(STREAMS)]
ENDLESS = 30000
KNOWN = 200
"""Tokens of each answer that are known beforehand."""


def expected(server: Server) -> list[list[int]]:
    answer = server.post("/generate", {
        "input_ids": PROMPTS, "sampling_params": {"max_new_tokens": KNOWN, "temperature": 0, "ignore_eos": True},
    })  # fmt: skip
    return [entry["output_ids"] for entry in answer.json()]


async def under_load(server: Server, strike: Callable[[], None]) -> tuple[list[Stream], list[httpx.Response | None]]:
    """Strike while twenty streams flow and five requests wait for their answers; what they all got."""
    async with clients(server) as client:

        async def whole(i: int) -> httpx.Response | None:
            body = {"input_ids": [40 + i], "sampling_params": {"max_new_tokens": ENDLESS, "ignore_eos": True}}
            try:
                return await client.post("/generate", json=body)
            except httpx.TransportError:
                return None

        streams, tasks = await load(client, PROMPTS, ENDLESS)
        waiting = [asyncio.create_task(whole(i)) for i in range(5)]
        while (await client.get("/server_info")).json()["stats"]["running"] < STREAMS + 5:
            pass
        strike()
        async with asyncio.timeout(NOTICE):
            await asyncio.gather(*tasks)
            answers = await asyncio.gather(*waiting)
    return streams, answers


def agree(streams: list[Stream], tokens: list[list[int]]) -> bool:
    """Whether what arrived is the beginning of the right answers, as far as these are known."""
    return all(s.tokens[:KNOWN] == known[: len(s.tokens)] for s, known in zip(streams, tokens))


def test_engine_killed(long_model: Path) -> None:
    with running(str(long_model), *TINY) as server:
        tokens, pids = expected(server), server.children
        streams, answers = asyncio.run(under_load(server, lambda: os.kill(pids["engine"], signal.SIGKILL)))
        assert agree(streams, tokens)
        for stream in streams:
            assert stream.done and not stream.broken and stream.finish is None
            assert stream.error is not None and "engine" in stream.error["message"]
        for answer in answers:
            assert answer is not None and answer.status_code == 503
            assert answer.json()["error"]["message"] and "retry-after" in answer.headers
        # Until there is a new engine, requests are refused and not kept waiting.
        assert server.get("/health").status_code == 200
        wait_for(lambda: server.get("/readyz").status_code == 200, RESTART)
        now = server.children
        assert now["api"] == pids["api"] and now["engine"] != pids["engine"]
        assert expected(server) == tokens
        server.quiet()


def test_api_killed(long_model: Path) -> None:
    with running(str(long_model), *TINY) as server:
        tokens, pids = expected(server), server.children
        streams, answers = asyncio.run(under_load(server, lambda: os.kill(pids["api"], signal.SIGKILL)))
        assert agree(streams, tokens)
        assert all(s.broken and not s.done for s in streams)
        assert answers == [None] * 5
        # The port was never lost: whoever connects now is answered by the next API process.
        assert httpx.get(server.url + "/health", timeout=RESTART).status_code == 200
        wait_for(lambda: server.get("/readyz").status_code == 200, RESTART)
        now = server.children
        assert now["engine"] == pids["engine"] and now["api"] != pids["api"]
        # The engine has given up the requests of the dead process.
        stats = server.quiet()
        assert stats["aborted"] == STREAMS + 5
        assert expected(server) == tokens


def test_supervisor_killed(long_model: Path) -> None:
    with running(str(long_model), *TINY) as server:
        pids = server.children
        pidfds = [os.pidfd_open(pid) for pid in pids.values()]
        streams, answers = asyncio.run(under_load(server, server.process.kill))
        assert dead(pidfds, NOTICE)
        assert all(s.broken for s in streams) and answers == [None] * 5
        socket.create_server(("127.0.0.1", server.port)).close()


@pytest.mark.slow
def test_the_engine_killed_many_times(long_model: Path) -> None:
    """Each time while it computes, also while it is still loading."""
    with running(str(long_model), *TINY) as server:
        tokens, api = expected(server), server.children["api"]

        async def once() -> None:
            async with clients(server) as client:
                result = Stream()
                task = asyncio.create_task(read_stream(client, PROMPTS[0], ENDLESS, result))
                await result.begun.wait()
                os.kill(server.children["engine"], signal.SIGKILL)
                async with asyncio.timeout(NOTICE):
                    await task
                assert result.error is not None and result.done

        for i in range(6):
            asyncio.run(once())
            if i % 2:
                wait_for(lambda: "engine" in server.children, RESTART)
                os.kill(server.children["engine"], signal.SIGKILL)
            wait_for(lambda: server.get("/readyz").status_code == 200, RESTART)
        assert server.children["api"] == api
        assert expected(server) == tokens
