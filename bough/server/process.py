"""The API process: ``python -m bough.server.process``, started by the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import stat
import sys
import time
from collections.abc import Iterator

import uvicorn
import uvloop
from starlette.types import ASGIApp

from bough.base import log
from bough.base.config import Config
from bough.base.errors import BoughError, ConfigError
from bough.engine.async_engine import AsyncEngine
from bough.engine.launch import Launch
from bough.server.app import create_app
from bough.server.protocol import bounded_protocol
from bough.server.service import Service, check_config

logger = logging.getLogger("bough.server")

KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time of common proxies, so that they, not we, close idle connections."""
CLOSE_SECONDS = 2
"""What uvicorn waits for connections after the drain has ended all streams."""
BACKLOG = 2048
SWITCH_SECONDS = 0.0005
"""So long the event loop waits for Python's lock at most while a thread renders a template or reads a long text."""


def step_back() -> None:
    """Let this process wait for a core until one is free or the scheduler's next tick, where it can be asked for.

    For every token it is woken, by default in place of the engine's thread that has just written to it: with as many
    threads as cores the step that follows waits for this process, which is nobody's loss if it happens a little later.
    """
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or a sandbox that forbids it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # nobody has chosen another
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: SIGTERM means a drain here, see :func:`serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, config: Config, *, tls: bool = True) -> Server:
    """A server for ``app`` that enforces ``config.limits`` on the head of each request, with TLS where configured."""
    serve = config.serve
    return Server(
        uvicorn.Config(
            app,
            http=bounded_protocol(config.limits),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=CLOSE_SECONDS,
            ssl_certfile=serve.tls_cert if tls else None,
            ssl_keyfile=serve.tls_key if tls else None,
        )
    )


async def serve(launch: Launch, listener: socket.socket) -> int:
    """Answer on ``listener`` at once, serve when the engine is ready, drain at SIGTERM; the exit code."""
    config = launch.config
    check_config(config)
    service = Service(config)
    app = create_app(service)
    server = load(make_server(app, config))
    operators = make_server(app, config, tls=False)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    fast = asyncio.Event()

    def on_signal() -> None:
        (fast if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    # Connections that uvicorn takes before the engine is there are told that it is loading.
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    operating = asyncio.create_task(operate(operators, config.serve.admin_socket))
    watching = asyncio.create_task(service.watch())
    attaching = asyncio.create_task(_attach(service, launch))
    stopping = asyncio.create_task(stop.wait())
    code = 0
    done, _ = await asyncio.wait({serving, attaching, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if attaching in done and not stop.is_set():
        code = attaching.result()
        if code == 0:
            # What the start has made stays: no later collection looks through it again.
            gc.collect()
            gc.freeze()
            sys.setswitchinterval(SWITCH_SECONDS)
            launch.ready()
            announce(service, listener, time.monotonic() - launch.started)
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    service.draining = True
    draining = asyncio.create_task(service.drain(config.serve.grace))
    hurrying = asyncio.create_task(fast.wait())
    await asyncio.wait({draining, hurrying}, return_when=asyncio.FIRST_COMPLETED)
    for one in (server, operators):
        one.should_exit = True
        one.force_exit = fast.is_set()
    await asyncio.gather(serving, operating)
    for task in (watching, attaching, stopping, draining, hurrying):
        task.cancel()
    if service.engine is not None:
        await service.engine.close()
    return code


def load(server: Server) -> Server:
    """``server`` with its certificate read. Raises ConfigError where that is impossible."""
    try:
        server.config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the certificate or its key cannot be read: {error.strerror or error}") from None
    return server


async def operate(server: Server, path: str | None) -> None:
    """Answer on the operators' Unix socket, which only the server's user may connect to, until told to exit."""
    if path is None:
        return
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.umask(0o177)
        try:
            listener.bind(path)
        except OSError as error:
            logger.error("the operators' socket %s cannot be made: %s", path, error.strerror)
            return
        finally:
            os.umask(before)
        listener.listen(BACKLOG)
        try:
            await server.serve(sockets=[listener])
        finally:
            os.unlink(path)


async def _attach(service: Service, launch: Launch) -> int:
    """Connect to the engine; 0, or the exit code where that failed for good."""
    try:
        engine = await AsyncEngine.connect(launch.run_dir, launch.config.model.path)
    except Exception as error:
        service.failure = error.message if isinstance(error, BoughError) else type(error).__name__
        return launch.failed(error)
    service.attach(engine)
    return 0


def announce(service: Service, listener: socket.socket, seconds: float) -> None:
    """Print where the server is, how long its start took, which kernels compute, and a request that works."""
    host, port = listener.getsockname()[:2]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http{'s' if service.config.serve.tls_cert else ''}://{name}:{port}"
    body = f'{{"model": "{service.model_name}", "messages": [{{"role": "user", "content": "Say hello."}}]}}'
    sys.stdout.write(
        f"\nbough serves {service.model_name} at {url}/v1, ready after {seconds:.1f} s; "
        f"kernels: {service.hello.kernels}\n\n"
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d '{body}'\n\n"
    )
    sys.stdout.flush()


def main() -> int:
    """Serve until SIGTERM; the exit code."""
    launch = Launch.receive()
    log.configure("api", launch.config.serve.log_level)
    step_back()
    if launch.listen_fd is None:
        raise ValueError("the API process needs a listening socket")
    with socket.socket(fileno=launch.listen_fd) as listener:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(serve(launch, listener))
        except BoughError as error:
            return launch.failed(error)


if __name__ == "__main__":
    sys.exit(main())
