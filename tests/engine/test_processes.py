"""Real processes, real sockets, real deaths. The engine and the API are small; the supervisor is the real one."""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .scripted import LOSE_DEVICE, expected

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DEADLINE = 60.0
NOTICE = 3.0
"""Seconds within which a death has to be noticed by everyone whom it concerns."""


def command(model: str, port: int, grace: float) -> list[str]:
    return [sys.executable, str(HERE / "supervisor_main.py"), model, str(port), str(grace)]


def environment(runtime: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(runtime)}


@dataclass
class Run:
    process: asyncio.subprocess.Process
    port: int
    runtime: Path

    async def ask(self, question: str) -> dict[str, Any]:
        (answer,) = [line async for line in self.call({"ask": question})]
        return answer

    async def call(self, message: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(json.dumps(message).encode() + b"\n")
            while line := await reader.readline():
                yield json.loads(line)
        finally:
            writer.close()

    async def generate(
        self, prompt: list[int], max_tokens: int | None, started: Callable[[], None] = lambda: None
    ) -> tuple[list[int], dict[str, Any]]:
        tokens: list[int] = []
        last: dict[str, Any] = {}
        async for last in self.call({"prompt": prompt, "max_tokens": max_tokens}):
            tokens += last.get("tokens", [])
            started()
        return tokens, last

    async def load(self, n: int) -> list[asyncio.Task[tuple[list[int], dict[str, Any]]]]:
        """``n`` endless streams, each of which has begun to flow."""
        begun = [asyncio.Event() for _ in range(n)]
        tasks = [asyncio.create_task(self.generate([10 + i], None, begun[i].set)) for i in range(n)]
        for event in begun:
            await event.wait()
        return tasks

    async def end(self, seconds: float) -> str:
        """Wait for the supervisor's end; what it and its children wrote to stderr."""
        async with asyncio.timeout(seconds):
            _, errors = await self.process.communicate()
        return errors.decode()


def scenario(body: Callable[[Run], Awaitable[None]], runtime: Path, grace: float = 30.0) -> None:
    @asynccontextmanager
    async def started() -> AsyncIterator[Run]:
        process = await asyncio.create_subprocess_exec(
            *command("fine", 0, grace), env=environment(runtime), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            word, port = (await process.stdout.readline()).split()
            assert word == b"port"
            yield Run(process, int(port), runtime)
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()

    async def main() -> None:
        async with asyncio.timeout(DEADLINE), started() as run:
            await body(run)

    asyncio.run(main())


def dead(pidfds: list[int], seconds: float) -> bool:
    """Whether the processes behind all ``pidfds`` end within ``seconds`` (each)."""
    with selectors.DefaultSelector() as selector:
        for fd in pidfds:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(seconds)
            if not ready:
                return False
            for key, _ in ready:
                selector.unregister(key.fd)
                os.close(key.fd)
    return True


def test_engine_killed_under_load(tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        pids = await run.ask("ready")
        tasks = await run.load(20)
        os.kill(pids["engine"], signal.SIGKILL)
        async with asyncio.timeout(NOTICE):
            results = await asyncio.gather(*tasks)
        for i, (tokens, last) in enumerate(results):
            assert tokens == expected([10 + i], len(tokens))
            assert (last["finish"], last["status"]) == ("error", 503)
        now = await run.ask("ready")
        assert now["engine"] != pids["engine"] and now["api"] == pids["api"]
        assert (await run.generate([5], 40))[0] == expected([5], 40)

    scenario(body, tmp_path)


def test_an_engine_that_loses_its_device_is_started_again(tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        pids = await run.ask("ready")
        tasks = await run.load(3)
        async with asyncio.timeout(NOTICE):
            _, last = await run.generate([LOSE_DEVICE], 40)
            results = await asyncio.gather(*tasks)
        assert {last["status"], *(end["status"] for _, end in results)} == {503}
        now = await run.ask("ready")
        assert now["engine"] != pids["engine"] and now["api"] == pids["api"]
        assert (await run.generate([5], 40))[0] == expected([5], 40)
        run.process.send_signal(signal.SIGTERM)
        said = await run.end(DEADLINE)
        assert "the GPU cannot be used any more: planted; this process ends" in said and "CUDA error: planted" in said

    scenario(body, tmp_path)


def test_api_killed_under_load(tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        pids = await run.ask("ready")
        tasks = await run.load(20)
        os.kill(pids["api"], signal.SIGKILL)
        async with asyncio.timeout(NOTICE):
            await asyncio.gather(*tasks, return_exceptions=True)
        # Connected while nobody accepts: the port was never lost. The engine gave up the dead one's requests.
        now = await run.ask("idle")
        assert now["api"] != pids["api"] and now["engine"] == pids["engine"]
        assert (await run.generate([5], 40))[0] == expected([5], 40)

    scenario(body, tmp_path)


def test_supervisor_killed_leaves_no_orphans(tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        pids = await run.ask("ready")
        children = [os.pidfd_open(pids["engine"]), os.pidfd_open(pids["api"])]
        tasks = await run.load(3)
        run.process.kill()
        assert await asyncio.to_thread(dead, children, NOTICE)
        await asyncio.gather(*tasks, return_exceptions=True)
        socket.create_server(("127.0.0.1", run.port)).close()

    scenario(body, tmp_path)


def test_sigterm_lets_streams_finish(tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        pids = await run.ask("ready")
        children = [os.pidfd_open(pids["engine"]), os.pidfd_open(pids["api"])]
        begun = asyncio.Event()
        running = asyncio.create_task(run.generate([5], 400, begun.set))
        await begun.wait()
        run.process.send_signal(signal.SIGTERM)
        tokens, last = await running
        assert tokens == expected([5], 400) and last["finish"] == "length"
        await run.end(10)
        assert run.process.returncode == 0
        assert await asyncio.to_thread(dead, children, 0.0)
        assert not list(run.runtime.iterdir())
        socket.create_server(("127.0.0.1", run.port)).close()

    scenario(body, tmp_path)


def test_a_second_signal_does_not_wait_for_streams(tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        await run.ask("ready")
        tasks = await run.load(3)
        run.process.send_signal(signal.SIGINT)
        run.process.send_signal(signal.SIGTERM)
        await run.end(5)
        assert run.process.returncode == 0
        await asyncio.gather(*tasks, return_exceptions=True)

    scenario(body, tmp_path)


def start(model: str, port: int, runtime: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(model, port, 1.0), env=environment(runtime), capture_output=True, text=True, timeout=DEADLINE
    )


def test_port_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = start("fine", port, tmp_path)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"bough: cannot listen on 127.0.0.1:{port}: Address already in use")


def test_configuration_error_says_its_cause_last(tmp_path: Path) -> None:
    result = start("broken", 0, tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "bough: the engine cannot start: the model is broken"
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_an_engine_that_never_starts_is_given_up(tmp_path: Path) -> None:
    result = start("dies", 0, tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "bough: the engine cannot start: exit code 3"
    assert result.stderr.count("the engine process is dead") == 5


def test_supervisor_is_small() -> None:
    script = (
        "import sys, bough.engine.supervisor\n"
        "assert not {'torch', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "print(next(line for line in open('/proc/self/status') if line.startswith('RssAnon')).split()[1])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment(HERE), capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < 30_000  # KiB


def test_api_side_does_not_import_torch() -> None:
    script = "import sys, bough.engine.async_engine\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], env=environment(HERE), check=True)
