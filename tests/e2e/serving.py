"""The real server as its user starts it, and clients that look at it from outside."""

from __future__ import annotations

import asyncio
import json
import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bough.compat.sglang.utils import terminate_process

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0
SERVE = (sys.executable, "-m", "bough.cli.main", "serve")
TINY = ("--pool-tokens", "65536", "--threads", "1")
"""Flags for tiny models: a second thread would only wait for the first."""
_ANNOUNCED = re.compile(r"bough serves (?P<model>\S+) at (?P<url>http://\S+:(?P<port>\d+))/v1")


def environment(runtime: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(runtime)}


def wait_for(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Poll until ``condition``; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


class Server:
    """One run of ``bough serve``, ready to be used."""

    def __init__(self, process: subprocess.Popen[str], url: str, port: int, model: str, runtime: Path) -> None:
        self.process = process
        self.url = url
        self.port = port
        self.model = model
        self.runtime = runtime

    def post(self, path: str, body: Any, timeout: float = 30.0) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10.0)

    def info(self) -> dict[str, Any]:
        return dict(self.get("/server_info").json())

    def stats(self) -> dict[str, Any]:
        return dict(self.info()["stats"])

    def quiet(self, seconds: float = 120.0) -> dict[str, Any]:
        """Wait until nothing runs, waits or is locked; the statistics then, of which the pages add up."""
        found: dict[str, Any] = {}

        def at_rest() -> bool:
            info = self.info()
            found.clear()
            found.update(info["stats"])
            busy = found["running"] + found["waiting"] + found["locked_tokens"] + info["requests_in_flight"]
            return not busy and found["free_tokens"] + found["tree_tokens"] == found["pool_tokens"]

        wait_for(at_rest, seconds)
        return found

    def tokens(self, prompt: Any, n: int) -> list[int]:
        """The first ``n`` greedy tokens of ``prompt``, from a request that does not stream."""
        answer = self.post("/generate", {
            ("text" if isinstance(prompt, str) else "input_ids"): prompt,
            "sampling_params": {"max_new_tokens": n, "temperature": 0, "ignore_eos": True},
        })  # fmt: skip
        assert answer.status_code == 200, answer.text
        return list(answer.json()["output_ids"])

    def counter(self, name: str) -> float:
        """The value of one metric, summed over its labels."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}(\{{.*\}})? ", line))

    @property
    def children(self) -> dict[str, int]:
        """Process ids of the engine and of the API."""
        found = {}
        for line in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            command = Path(f"/proc/{line}/cmdline").read_bytes()
            for name, part in (("engine", b"engine"), ("api", b"server")):
                if part in command.rpartition(b"-m")[2]:
                    found[name] = int(line)
        return found

    @property
    def engine_seconds(self) -> float:
        """Processor time that the engine has taken. While anything runs in it, hardly less than the time that passes
        for it, however busy the machine is."""
        fields = Path(f"/proc/{self.children['engine']}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def run_dir(self) -> Path:
        (folder,) = self.runtime.iterdir()
        return folder


@contextmanager
def running(*arguments: str, command: Sequence[str] = SERVE, cwd: Path | None = None) -> Iterator[Server]:
    """``bough serve`` with ``arguments`` on a port of its own choice, from the announcement of its address on."""
    with tempfile.TemporaryDirectory(prefix="bough-e2e-") as folder, tempfile.TemporaryFile("w+") as errors:
        runtime = Path(folder) / "run"
        runtime.mkdir()
        process = subprocess.Popen(
            [*command, "--port", "0", "--files", f"{folder}/files", *arguments], env=environment(runtime),
            stdout=subprocess.PIPE, stderr=errors, text=True, cwd=cwd,
        )  # fmt: skip
        try:
            found = None
            assert process.stdout is not None
            while found is None and (line := process.stdout.readline()):
                found = _ANNOUNCED.search(line)
            if found is None:
                errors.seek(0)
                raise AssertionError(f"the server did not start: {errors.read()[-2000:]}")
            yield Server(process, found["url"], int(found["port"]), found["model"], runtime)
        finally:
            terminate_process(process)
            assert process.stdout is not None
            process.stdout.close()
            errors.seek(0)
            print(errors.read()[-5000:])


def dead(pidfds: Sequence[int], seconds: float) -> bool:
    """Whether the processes behind all ``pidfds``, which are closed, end within ``seconds``."""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for fd in pidfds:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                selector.unregister(key.fd)
            if time.monotonic() > deadline:
                break
        over = not selector.get_map()
    for fd in pidfds:
        os.close(fd)
    return over


@dataclass
class Stream:
    """What one streaming client has got so far."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    error: dict[str, Any] | None = None
    status: int = 0
    done: bool = False
    broken: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def clients(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client with any number of connections and no timeouts: deadlines are the tests' own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as client:
        yield client


async def read_stream(client: httpx.AsyncClient, prompt: list[int], n: int, result: Stream, **more: Any) -> Stream:
    """Stream ``n`` greedy tokens into ``result``; a lost connection sets ``broken``."""
    body = {
        "prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True, **more,
    }  # fmt: skip
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            result.status = response.status_code
            if response.status_code != 200:
                result.error = json.loads(await response.aread())["error"]
                return result
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    result.done = True
                elif line:
                    _take(result, json.loads(line.removeprefix("data: ")))
    except httpx.TransportError:
        result.broken = True
    finally:
        result.begun.set()
    return result


def _take(result: Stream, event: dict[str, Any]) -> None:
    if "error" in event:
        result.error = event["error"]
        return
    for choice in event["choices"]:
        result.tokens += choice.get("token_ids") or []
        result.finish = choice["finish_reason"] or result.finish
    if result.tokens:
        result.begun.set()


async def load(
    client: httpx.AsyncClient, prompts: Sequence[list[int]], n: int
) -> tuple[list[Stream], list[asyncio.Task[Stream]]]:
    """One stream for each prompt, all of which have begun to flow."""
    streams = [Stream() for _ in prompts]
    tasks = [asyncio.create_task(read_stream(client, p, n, s)) for p, s in zip(prompts, streams)]
    for stream in streams:
        await stream.begun.wait()
    return streams, tasks
