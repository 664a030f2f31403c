"""Both transports behave alike: the same loop, the same streams, the same endings."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
import uvloop

from bough.base.errors import ConfigError, Overloaded, Unavailable
from bough.base.limits import DEFAULT_LIMITS
from bough.base.messages import Output, Outputs, encode
from bough.engine.client import StreamClient
from bough.engine.driver import HEARTBEAT_SECONDS, Driver
from bough.engine.ipc import SocketPort, endpoint
from bough.engine.ipc_client import IpcClient
from bough.engine.launch import make_run_dir
from bough.engine.local_client import LocalClient

from .scripted import HOLD, RAISE_IN_RECEIVE, RAISE_IN_STEP, REFUSE, ScriptedCore, ScriptedScheduler, expected, request

DEADLINE = 20.0


@dataclass
class Setting:
    client: StreamClient
    core: ScriptedCore
    run_dir: Path | None = None


@asynccontextmanager
async def local(core: ScriptedCore) -> AsyncIterator[Setting]:
    client = LocalClient(lambda: core)
    await client.start()
    try:
        yield Setting(client, core)
    finally:
        await client.close()
        assert core.closed


@asynccontextmanager
async def ipc(core: ScriptedCore) -> AsyncIterator[Setting]:
    run_dir = make_run_dir()
    driver = Driver(core, SocketPort(run_dir))
    thread = threading.Thread(target=driver.run)
    client = IpcClient(run_dir)
    try:
        thread.start()
        await client.start()
        yield Setting(client, core, run_dir)
    finally:
        await client.close()
        driver.stop()
        await asyncio.to_thread(thread.join)
        shutil.rmtree(run_dir)


@pytest.fixture(params=[local, ipc], ids=["local", "ipc"])
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    def runner(scenario: Callable[[Setting], Awaitable[None]], core: ScriptedCore | None = None) -> None:
        async def body() -> None:
            async with asyncio.timeout(DEADLINE), request.param(core or ScriptedCore()) as setting:
                await scenario(setting)

        asyncio.run(body())

    return runner


async def read(stream: AsyncIterator[Output]) -> tuple[list[int], Output]:
    """All tokens of a stream of one request, and its last output."""
    tokens: list[int] = []
    async for output in stream:
        assert output.index == len(tokens)
        tokens += output.tokens
    return tokens, output


async def until(condition: Callable[[], bool]) -> None:
    """Follow the event loop until ``condition`` holds; the test's deadline ends it otherwise."""
    while not condition():
        await asyncio.sleep(0.001)


def test_tokens_arrive_in_order_and_end_once(run: Callable[..., None]) -> None:
    async def scenario(s: Setting) -> None:
        prompts = {f"r{i}": [10 + i, 20] for i in range(50)}
        streams = [s.client.submit(request(rid, prompt, 30)) for rid, prompt in prompts.items()]
        for prompt, (tokens, last) in zip(prompts.values(), await asyncio.gather(*map(read, streams))):
            assert tokens == expected(prompt, 30)
            assert last.finish is not None and last.finish.kind == "length" and last.n_prompt == 2

    run(scenario)


def test_requests_of_one_stream_are_told_apart(run: Callable[..., None]) -> None:
    async def scenario(s: Setting) -> None:
        got: dict[str, list[int]] = {"a": [], "b": []}
        ends = []
        async for output in s.client.submit(request("a", [5], 10), request("b", [6], 20)):
            got[output.rid] += output.tokens
            ends += [output.rid] if output.finish else []
        assert got == {"a": expected([5], 10), "b": expected([6], 20)}
        assert sorted(ends) == ["a", "b"]

    run(scenario)


def test_leaving_a_stream_aborts_its_requests(run: Callable[..., None]) -> None:
    async def scenario(s: Setting) -> None:
        stream = s.client.submit(request("a", [5]), request("b", [6]))
        await anext(stream)
        await stream.aclose()
        await until(lambda: sorted(s.core.scheduler.aborted) == [5, 6])
        assert (await read(s.client.submit(request("a", [7], 3))))[0] == expected([7], 3)

    run(scenario)


def test_cancelling_the_reader_in_a_generator_aborts(run: Callable[..., None]) -> None:
    async def scenario(s: Setting) -> None:
        stream = s.client.submit(request("a", [HOLD]))
        reading = asyncio.Event()

        async def reader() -> None:
            try:
                reading.set()
                await anext(stream)
            finally:
                await stream.aclose()

        task = asyncio.create_task(reader())
        await reading.wait()
        task.cancel()
        await until(lambda: s.core.scheduler.aborted == [HOLD])

    run(scenario)


def test_abort_ends_with_one_terminal_output(run: Callable[..., None]) -> None:
    async def scenario(s: Setting) -> None:
        stream = s.client.submit(request("a", [HOLD]))
        s.client.abort(["a", "unknown"])
        s.client.abort(["a"])
        tokens, last = await read(stream)
        assert last.finish is not None and last.finish.kind == "abort"
        s.client.abort(["a"])

    run(scenario)


def test_a_timeout_does_not_need_the_engine(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.engine.client.LATE_SECONDS", 0.02)

    async def scenario(s: Setting) -> None:
        held = msgspec.structs.replace(request("a", [HOLD]), timeout=0.01)
        tokens, last = await read(s.client.submit(held))
        assert last.finish is not None and (last.finish.kind, last.finish.status) == ("timeout", 408) and not tokens
        await until(lambda: s.core.scheduler.aborted == [HOLD])
        served = msgspec.structs.replace(request("a", [10], 3), timeout=20.0)
        assert (await read(s.client.submit(served)))[0] == expected([10], 3)
        assert not s.client._overdue

    run(scenario)


def test_a_message_that_fails_fails_alone(run: Callable[..., None]) -> None:
    async def scenario(s: Setting) -> None:
        good = s.client.submit(request("good", [10], 200))
        for rid, first, status in (("bad", RAISE_IN_RECEIVE, 500), ("refused", REFUSE, 400)):
            tokens, last = await read(s.client.submit(request(rid, [first])))
            assert not tokens and last.finish is not None
            assert (last.finish.kind, last.finish.status) == ("error", status)
        assert (await read(good))[0] == expected([10], 200)

    run(scenario)


def test_commands_are_answered(run: Callable[..., None]) -> None:
    async def scenario(s: Setting) -> None:
        replies = await asyncio.gather(s.client.control("flush_cache"), s.client.control("abort_all"))
        assert [reply.message for reply in replies] == ["flush_cache", "abort_all"]

    run(scenario)


def test_heartbeats_come_while_idle_and_invariants_are_checked(run: Callable[..., None]) -> None:
    async def scenario(s: Setting) -> None:
        await read(s.client.submit(request("a", [5], 5)))
        await until(lambda: s.client.stats is not None and s.client.stats.steps >= 5)
        assert s.client.stats_age() < 4 * HEARTBEAT_SECONDS
        await until(lambda: s.core.scheduler.checks > 0)
        first = s.client.stats
        await until(lambda: s.client.stats is not first)
        assert s.core.scheduler.steps == 5

    run(scenario)


def test_too_many_in_flight_are_refused_at_once(run: Callable[..., None]) -> None:
    limits = replace(DEFAULT_LIMITS, queue_requests=3, sequences=2)

    async def scenario(s: Setting) -> None:
        streams = [s.client.submit(request(f"r{i}", [HOLD])) for i in range(5)]
        with pytest.raises(Overloaded):
            s.client.submit(request("more", [5]))
        await streams[0].aclose()
        await read(s.client.submit(request("more", [5], 2)))

    run(scenario, ScriptedCore(limits=limits))


def test_slow_reader_gets_everything_in_few_outputs(run: Callable[..., None]) -> None:
    async def scenario(s: Setting) -> None:
        slow = s.client.submit(request("slow", [10], 500))
        assert (await read(s.client.submit(request("other", [11], 600))))[0] == expected([11], 600)
        outputs = [output async for output in slow]
        assert len(outputs) == 1 and outputs[0].tokens == expected([10], 500)

    run(scenario)


def test_reader_that_never_reads_is_ended(run: Callable[..., None]) -> None:
    limits = replace(DEFAULT_LIMITS, stream_stall_seconds=0.05)

    async def scenario(s: Setting) -> None:
        stream = s.client.submit(request("a", [10]))
        await until(lambda: s.core.scheduler.aborted == [10])
        tokens, last = await read(stream)
        assert tokens == expected([10], len(tokens)) and last.finish is not None
        assert (last.finish.kind, last.finish.status) == ("timeout", 408)

    run(scenario, ScriptedCore(ScriptedScheduler(step_seconds=0.001), limits))


def test_closing_the_client_ends_every_stream(run: Callable[..., None]) -> None:
    async def scenario(s: Setting) -> None:
        stream = s.client.submit(request("a", [HOLD]))
        await s.client.close()
        _, last = await read(stream)
        assert last.finish is not None and last.finish.kind in ("abort", "error")
        with pytest.raises(Unavailable):
            s.client.submit(request("b", [5]))

    run(scenario)


def test_an_engine_that_cannot_be_built_raises_its_reason() -> None:
    def build() -> ScriptedCore:
        raise ConfigError("no such model")

    async def scenario() -> None:
        client = LocalClient(build)
        with pytest.raises(ConfigError, match="no such model"):
            await client.start()
        await client.close()

    asyncio.run(scenario())


def test_a_failing_step_ends_a_local_engine_and_its_streams() -> None:
    async def scenario() -> None:
        client = LocalClient(ScriptedCore)
        await client.start()
        held, bad = client.submit(request("a", [HOLD])), client.submit(request("b", [RAISE_IN_STEP]))
        for stream in (held, bad):
            _, last = await read(stream)
            assert last.finish is not None and (last.finish.kind, last.finish.status) == ("error", 503)
        assert not client.alive
        with pytest.raises(Unavailable):
            client.submit(request("c", [5]))
        await client.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE))


def test_garbage_is_counted_and_disturbs_nobody() -> None:
    rng = random.Random(0)
    valid = encode(request("x", [5], 5))

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[int]]:
            return os._exit, (99,)

    kinds: list[Callable[[], bytes]] = [
        lambda: rng.randbytes(rng.randrange(200)),
        lambda: valid[: rng.randrange(len(valid))],
        lambda: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        lambda: pickle.dumps(Bomb()),
        lambda: encode({"type": "request", "rid": 5}),
        lambda: encode({"type": "abort", "rids": "everything"}),
        lambda: encode({"type": "shutdown"}),
        lambda: b"\xc1" * 3 + valid,
        lambda: b"",
        lambda: b"\x91" * 100_000,
    ]

    async def scenario(s: Setting) -> None:
        assert s.run_dir is not None
        victims = [s.client.submit(request(f"v{i}", [10 + i], 2000)) for i in range(4)]
        with socket.socket(socket.AF_UNIX) as attacker:
            attacker.connect(endpoint(s.run_dir))
            for i in range(10_000):
                payload = kinds[i % len(kinds)]()
                await asyncio.to_thread(attacker.sendall, len(payload).to_bytes(4, "little") + payload)
            for i, (tokens, _) in enumerate(await asyncio.gather(*map(read, victims))):
                assert tokens == expected([10 + i], 2000)
            await until(lambda: s.client.stats is not None and s.client.stats.bad_messages == 10_000)

    async def body() -> None:
        async with asyncio.timeout(DEADLINE), ipc(ScriptedCore()) as setting:
            await scenario(setting)

    asyncio.run(body())


def test_two_clients_see_their_own_requests_only_and_one_may_vanish() -> None:
    async def body() -> None:
        async with asyncio.timeout(DEADLINE), ipc(ScriptedCore()) as s:
            assert s.run_dir is not None
            other = IpcClient(s.run_dir)
            await other.start()
            held = s.client.submit(request("held", [HOLD]))
            doomed = other.submit(request("held", [HOLD, 7]))
            for client in (s.client, other):
                assert (await read(client.submit(request("same", [9], 50))))[0] == expected([9], 50)
            await other.close()
            assert (await read(doomed))[1].finish is not None
            await until(lambda: s.core.scheduler.aborted == [7])
            assert len(s.core.scheduler.requests) == 1
            await held.aclose()

    asyncio.run(body())


def test_outputs_of_nobody_are_dropped() -> None:
    """What an earlier engine, or a stream that was closed, still sends finds no stream."""

    async def body() -> None:
        async with asyncio.timeout(DEADLINE), ipc(ScriptedCore()) as s:
            stream = s.client.submit(request("a", [HOLD]))
            s.client._dispatch(Outputs([Output("old", 7, [1], 1, 0)]))
            s.client.abort(["a"])
            assert (await read(stream))[0] == []

    asyncio.run(body())


def test_wake_up_from_idle_is_quick(run: Callable[..., None]) -> None:
    async def scenario(s: Setting) -> None:
        loop = asyncio.get_running_loop()
        times = []
        for i in range(50):
            start = loop.time()
            await read(s.client.submit(request(f"r{i}", [5], 1)))
            times.append(loop.time() - start)
            await until(lambda: s.core.scheduler.idle)
        print(f"median round trip from idle: {sorted(times)[25] * 1e6:.0f} us")
        assert sorted(times)[25] < 0.02  # far below the heartbeat that would hide a missed wake-up

    run(scenario)


def test_the_transport_works_on_the_event_loop_of_the_server() -> None:
    async def body() -> None:
        async with asyncio.timeout(DEADLINE), ipc(ScriptedCore()) as s:
            streams = [s.client.submit(request(f"r{i}", [10 + i], 100)) for i in range(16)]
            for i, (tokens, _) in enumerate(await asyncio.gather(*map(read, streams))):
                assert tokens == expected([10 + i], 100)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())
