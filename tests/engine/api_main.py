"""A small API process: one line of JSON in, lines of JSON out, over the inherited socket.

``{"prompt": [..], "max_tokens": n}`` streams tokens; ``{"ask": "pids" | "ready" | "idle"}`` answers when it can.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from scripted import request

from bough.base import log
from bough.base.errors import BoughError
from bough.engine.ipc_client import IpcClient
from bough.engine.launch import Launch


class Api:
    def __init__(self, client: IpcClient) -> None:
        self.client = client
        self.busy = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.busy += 1
        try:
            await self.answer(json.loads(await reader.readline()), writer)
            await writer.drain()
        finally:
            self.busy -= 1
            writer.close()

    async def answer(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        def say(**words: object) -> None:
            writer.write(json.dumps(words).encode() + b"\n")

        if "ask" in message:
            hello = await self.client.start()
            while message["ask"] == "idle" and (self.client.stats is None or self.client.stats.running):
                await asyncio.sleep(0.01)
            say(engine=hello.pid, api=os.getpid(), parent=os.getppid())
            return
        try:
            stream = self.client.submit(request(secrets.token_hex(16), message["prompt"], message["max_tokens"]))
        except BoughError as error:
            say(error=type(error).__name__)
            return
        try:
            async for output in stream:
                finish = output.finish
                say(tokens=output.tokens, finish=finish and finish.kind, status=finish and finish.status)
                await writer.drain()
        finally:
            await stream.aclose()


async def main(launch: Launch) -> int:
    client = IpcClient(Path(launch.run_dir))
    api = Api(client)
    assert launch.listen_fd is not None
    listener = socket.socket(fileno=launch.listen_fd)
    server = await asyncio.start_server(api.serve, sock=listener)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    launch.ready()
    print(f"port {listener.getsockname()[1]}", flush=True)
    await stop.wait()
    server.close()
    while api.busy:
        await asyncio.sleep(0.01)
    await client.close()
    return 0


launched = Launch.receive()
log.configure("api", "info")
sys.exit(asyncio.run(main(launched)))
