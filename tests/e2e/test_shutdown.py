"""SIGTERM under load: what runs is finished, what comes is refused, and then the process is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import httpx
import pytest

from .serving import TINY, Server, clients, dead, load, running

PROMPTS = [[10 + i, 20, 30] for i in range(4)]
LENGTH = 1000
ENDLESS = 30000


def ended(server: Server, pidfds: list[int]) -> None:
    """Exit code 0, no process, no folder and no listener left."""
    assert server.process.returncode == 0
    assert dead(pidfds, 0.0)
    assert not list(server.runtime.iterdir())
    socket.create_server(("127.0.0.1", server.port)).close()


def test_streams_finish(long_model: Path) -> None:
    with running(str(long_model), *TINY) as server:
        pidfds = [os.pidfd_open(pid) for pid in server.children.values()]
        answer = server.post("/generate", {
            "input_ids": PROMPTS, "sampling_params": {"max_new_tokens": LENGTH, "temperature": 0, "ignore_eos": True},
        })  # fmt: skip
        expected = [entry["output_ids"] for entry in answer.json()]

        async def main() -> None:
            async with clients(server) as client:
                streams, tasks = await load(client, PROMPTS, LENGTH)
                server.process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(1):
                    while (unready := await client.get("/readyz")).status_code == 200:
                        pass
                assert unready.status_code == 503 and "draining" in unready.json()["problems"][0]
                assert (await client.get("/health")).status_code == 200
                refused = await client.post("/v1/completions", json={"prompt": "a"})
                assert refused.status_code == 503 and "retry-after" in refused.headers
                assert refused.headers["connection"] == "close"
                assert not any(s.done for s in streams), "the streams ended too early to prove anything"
                await asyncio.gather(*tasks)
                assert [s.tokens for s in streams] == expected
                assert all(s.done and s.finish == "length" for s in streams)

        asyncio.run(main())
        server.process.wait(10)
        ended(server, pidfds)


def test_a_second_signal_is_fast(long_model: Path) -> None:
    with running(str(long_model), *TINY) as server:
        pidfds = [os.pidfd_open(pid) for pid in server.children.values()]

        async def main() -> None:
            async with clients(server) as client:
                streams, tasks = await load(client, PROMPTS, ENDLESS)
                server.process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(1):
                    while (await client.get("/readyz")).status_code == 200:
                        pass
                server.process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(3):
                    await asyncio.gather(*tasks)
                assert all(s.finish is None for s in streams)

        asyncio.run(main())
        server.process.wait(3)
        ended(server, pidfds)


def test_grace_ends(long_model: Path) -> None:
    with running(str(long_model), *TINY, "--grace", "0.5") as server:
        pidfds = [os.pidfd_open(pid) for pid in server.children.values()]

        async def main() -> None:
            async with clients(server) as client:
                streams, tasks = await load(client, PROMPTS, ENDLESS)
                waiting = asyncio.create_task(client.post("/generate", json={
                    "text": "a", "sampling_params": {"max_new_tokens": ENDLESS, "ignore_eos": True},
                }))  # fmt: skip
                while (await client.get("/server_info")).json()["requests_in_flight"] < 5:
                    pass
                server.process.send_signal(signal.SIGINT)
                async with asyncio.timeout(4):
                    await asyncio.gather(*tasks)
                    answer = await waiting
                for stream in streams:
                    assert stream.done and not stream.broken and stream.finish is None
                    assert stream.error is not None and "shut down" in stream.error["message"]
                    assert stream.error["type"] and len(stream.tokens) > 10
                assert answer.status_code == 503 and "shut down" in answer.json()["error"]["message"]

        asyncio.run(main())
        server.process.wait(5)
        ended(server, pidfds)


@pytest.mark.slow
def test_idle_connections_do_not_keep_it(long_model: Path) -> None:
    with running(str(long_model), *TINY) as server, httpx.Client(base_url=server.url) as idle:
        pidfds = [os.pidfd_open(pid) for pid in server.children.values()]
        assert idle.get("/health").status_code == 200
        with socket.create_connection(("127.0.0.1", server.port)):
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(4)
        ended(server, pidfds)
