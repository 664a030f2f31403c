"""A contender that runs: it is given workloads and answers with calls, whether over HTTP or over pipes."""

from __future__ import annotations

import asyncio
import json
import random
import select
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import uvloop

from benchmarks.peers.dialects import DIALECTS
from benchmarks.peers.engines import Contender, Launch, Settings
from benchmarks.peers.home import Unavailable
from benchmarks.peers.process import Process, free_port
from benchmarks.peers.work import WORK
from bough.bench.client import Client
from bough.bench.measures import Call
from bough.bench.workloads import Sizes


class Running(Protocol):
    """A started contender."""

    process: Process

    def run(self, work: str, sizes: Sizes, seed: str, seconds: float) -> list[Call]:
        """The calls of a workload; TimeoutError when it takes longer than ``seconds``."""


def start(contender: Contender, settings: Settings, model: str, log: Path) -> Running:
    """Start a contender and wait until it is ready; Unavailable if it cannot be."""
    launch = contender.engine.launch(settings, model, contender.format)
    if launch.health is None:
        return PipelineProcess(launch, log)
    return Server(launch, DIALECTS[contender.engine.dialect], _name(contender, settings, model), log)


def need_servers(contenders: Sequence[Contender], settings: Settings, model: str) -> None:
    """Unavailable if one of them cannot be started, or takes no workload while another one runs."""
    for contender in contenders:
        if contender.engine.launch(settings, model, contender.format).health is None:
            raise Unavailable(f"{contender.engine.name} takes one workload at a time")


def _name(contender: Contender, settings: Settings, model: str) -> str:
    """What requests call the model: only ``transformers serve`` wants the folder again."""
    if contender.engine.dialect != "transformers":
        return "m"
    from benchmarks.peers.models import folder

    return str(folder(settings.home, model))


class Server:
    """An OpenAI-compatible server."""

    def __init__(self, launch: Launch, dialect: type[Client], model: str, log: Path) -> None:
        base = f"http://127.0.0.1:{(port := free_port())}"
        command = [part.replace("{port}", str(port)) for part in launch.command]
        self.process = Process(command, log, environment=launch.environment, folder=launch.folder)
        self._client = dialect(f"{base}/v1", model, "none", timeout=3600.0)
        try:
            self.process.wait_http(base + (launch.health or ""), launch.seconds)
        except BaseException:
            self.process.stop()
            raise

    def run(self, work: str, sizes: Sizes, seed: str, seconds: float) -> list[Call]:
        async def send() -> list[Call]:
            return await asyncio.wait_for(WORK[work].run(self._client, sizes, random.Random(seed)), seconds)

        return uvloop.run(send())


class PipelineProcess:
    """An engine without a server, driven by a script in its own environment."""

    def __init__(self, launch: Launch, log: Path) -> None:
        self.process = Process(launch.command, log, environment=launch.environment, folder=launch.folder, pipes=True)
        try:
            self._answer(launch.seconds)
        except BaseException as error:
            self.process.stop()
            if isinstance(error, TimeoutError):
                raise Unavailable(f"did not load within {launch.seconds:.0f} s: {self.process.tail()}") from None
            raise

    def run(self, work: str, sizes: Sizes, seed: str, seconds: float) -> list[Call]:
        order = json.dumps({"workload": work, "sizes": sizes, "seed": seed})
        pipe = self.process.popen.stdin
        assert pipe is not None
        pipe.write(order.encode() + b"\n")
        pipe.flush()
        return msgspec.json.decode(self._answer(seconds), type=list[Call])

    def _answer(self, seconds: float) -> bytes:
        pipe = self.process.popen.stdout
        assert pipe is not None
        if not select.select([pipe], [], [], seconds)[0]:
            raise TimeoutError
        line: bytes = pipe.readline()
        if not line:
            raise Unavailable(f"the pipeline has ended: {self.process.tail()}")
        return line
