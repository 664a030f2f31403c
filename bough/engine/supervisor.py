"""The parent of a served run: starts the engine and the API process, and keeps them running.

Holds no model, no requests and no connection, only the listening socket; imports nothing heavy.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE, Popen

import msgspec

from bough.base import log
from bough.base.config import Config, ServeConfig
from bough.base.errors import ConfigError
from bough.engine.launch import EXIT_CONFIG, Launch, make_run_dir

logger = logging.getLogger("bough.supervisor")

# -P: the current folder, which may be a model's, is no place to import from.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "bough.engine.process")
API_COMMAND = (sys.executable, "-P", "-m", "bough.server.process")
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds between a death and the next start; doubles with each death."""
STEADY_SECONDS = 10.0
"""A process that served for so long starts again after the first pause."""
FAILED_STARTS, FAILED_STARTS_SECONDS = 5, 60.0
"""So many deaths in so many seconds, all before the process was ready, and the run is given up."""
DRAIN_MARGIN, ENGINE_SECONDS = 5.0, 5.0
"""Seconds beyond its grace that the API gets to exit, and those that the engine gets."""
BACKLOG = 2048


def listen(config: ServeConfig) -> socket.socket:
    """The listening socket of the API. Raises ConfigError when the address is taken or not ours."""
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"the port must be in [0, 65535], not {config.port}", param="port")
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        hint = "; choose another with --port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror}{hint}") from None


class Child:
    """One process of the run through all its lives. Each leads a process group of its own."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.command = command
        self.pidfd = -1  # readable once the process is dead; -1 while there is none
        self.restart_at = 0.0
        self.cause = ""
        self.ever_ready = False
        self._process: Popen[bytes] | None = None
        self._report_fd = -1
        self._started_at = 0.0
        self._pause = FIRST_PAUSE
        self._failed_starts: list[float] = []

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self, config: Config, run_dir: Path, listener: socket.socket | None) -> None:
        self._report_fd, report_end = os.pipe()
        os.set_blocking(self._report_fd, False)
        listen_fd = None if listener is None else listener.fileno()
        launch = Launch(
            config=config, run_dir=str(run_dir), supervisor=os.getpid(), report_fd=report_end, listen_fd=listen_fd
        )
        inherited = (report_end,) if listen_fd is None else (report_end, listen_fd)
        self._process = Popen(self.command, stdin=PIPE, pass_fds=inherited, process_group=0)
        os.close(report_end)
        self._started_at = time.monotonic()
        self.pidfd = os.pidfd_open(self._process.pid)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.msgpack.encode(launch))
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it is dead, as its pidfd says

    def signal(self, number: signal.Signals) -> None:
        """Send ``number`` to the process alone, if it lives."""
        if self._process is not None:
            self._process.send_signal(number)

    def reap(self) -> bool:
        """Kill what is left of the group, collect the dead and plan the next start; whether that makes sense."""
        assert self._process is not None
        # Until it is waited for, the leader's id cannot name anyone else's group.
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        code = self._process.wait()
        self._process = None
        os.close(self.pidfd)
        self.pidfd = -1
        now = time.monotonic()
        ready = self._read_report(code)
        if ready:
            self.ever_ready = True
            self._failed_starts.clear()
            if now - self._started_at >= STEADY_SECONDS:
                self._pause = FIRST_PAUSE
        else:
            self._failed_starts = [t for t in self._failed_starts if now - t < FAILED_STARTS_SECONDS] + [now]
        self.restart_at = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        hopeless = code == EXIT_CONFIG and not self.ever_ready
        return not hopeless and len(self._failed_starts) < FAILED_STARTS

    def _read_report(self, code: int) -> bool:
        """Whether the process ever was ready; ``cause`` says why it is dead."""
        try:
            report = os.read(self._report_fd, 4096).decode("utf-8", "replace")
        except BlockingIOError:  # a grandchild holds the other end
            report = ""
        os.close(self._report_fd)
        self.cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if report.startswith("failed "):
            self.cause = report.removeprefix("failed ")
        return report == "ready"


class Supervisor:
    """Runs ``bough serve``. ``run`` belongs on the main thread, whose death ends the children too."""

    def __init__(
        self,
        config: Config,
        engine_command: Sequence[str] = ENGINE_COMMAND,
        api_command: Sequence[str] = API_COMMAND,
    ) -> None:
        self.config = config
        self.engine = Child("engine", engine_command)
        self.api = Child("API", api_command)
        self._children = (self.engine, self.api)
        self._selector = selectors.DefaultSelector()
        self._signals = 0

    def run(self) -> int:
        """Serve until SIGTERM, SIGINT or SIGHUP (0) or until nothing can be served (1).

        The first signal lets running streams finish, for as long as the configuration grants; a second one
        ends everything at once.
        """
        log.configure("super", self.config.serve.log_level)
        try:
            with listen(self.config.serve) as listener:
                run_dir = make_run_dir()
                try:
                    return self._serve(run_dir, listener)
                finally:
                    shutil.rmtree(run_dir, ignore_errors=True)
        except ConfigError as error:
            sys.stderr.write(f"bough: {error.message}\n")
            return 1

    def _serve(self, run_dir: Path, listener: socket.socket) -> int:
        wakeup = self._catch_signals()
        try:
            while not self._signals:
                now = time.monotonic()
                for child in self._children:
                    if not child.running and child.restart_at <= now:
                        child.start(self.config, run_dir, listener if child is self.api else None)
                        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
                for child in self._wait(min((c.restart_at for c in self._children if not c.running), default=None)):
                    hopeful = self._bury(child)
                    logger.error("the %s process is dead: %s", child.name, child.cause)
                    if not hopeful:
                        raise ConfigError(f"the {child.name} cannot start: {child.cause}")
            self._end(self.api, self.config.serve.grace + DRAIN_MARGIN)
            listener.close()  # nobody answers any more: refuse rather than let wait
            self._end(self.engine, ENGINE_SECONDS)
            return 0
        finally:
            for child in self._children:
                if child.running:
                    self._bury(child)
            signal.set_wakeup_fd(-1)
            self._selector.close()
            for end in wakeup:
                end.close()

    def _catch_signals(self) -> tuple[socket.socket, socket.socket]:
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._count_signal)
        self._selector.register(reader, selectors.EVENT_READ)
        return reader, writer

    def _count_signal(self, number: int, frame: object) -> None:
        self._signals += 1

    def _wait(self, until: float | None) -> list[Child]:
        """Wait for a signal, for deaths, or until a time of the monotonic clock; the dead."""
        dead = []
        for key, _ in self._selector.select(None if until is None else max(0.0, until - time.monotonic())):
            if isinstance(key.data, Child):
                dead.append(key.data)
            elif isinstance(key.fileobj, socket.socket):
                key.fileobj.recv(64)
        return dead

    def _bury(self, child: Child) -> bool:
        self._selector.unregister(child.pidfd)
        return child.reap()

    def _end(self, child: Child, seconds: float) -> None:
        """Ask ``child`` to finish; it is killed after ``seconds`` or upon a second signal."""
        child.signal(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while child.running and self._signals < 2 and time.monotonic() < deadline:
            for dead in self._wait(deadline):
                self._bury(dead)
        if child.running:
            logger.warning("the %s process is killed before it has finished", child.name)
            self._bury(child)
