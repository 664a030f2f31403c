"""How the supervisor starts a process and what that process tells it: msgpack on stdin, one line on a pipe.

Imports no numpy, so that the supervisor stays small.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from bough.base.config import Config
from bough.base.errors import ConfigError

logger = logging.getLogger("bough.launch")

EXIT_FAILED = 1
EXIT_CONFIG = 78
"""Exit code (EX_CONFIG) of a process that would fail in the same way each time it is started."""
ENDPOINT = "engine.sock"
PATH_BYTES = 107
"""Longest path of a Unix-domain socket on Linux."""
_PR_SET_PDEATHSIG = 1


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of a run is given.

    Attributes:
        config: the whole configuration.
        run_dir: folder of the run's sockets, mode 0700.
        supervisor: process id of the parent.
        report_fd: pipe on which the process reports once.
        listen_fd: the listening socket of the API, inherited so that the port survives the process.
        started: when the process was started, in the clock of ``time.monotonic``.
    """

    config: Config
    run_dir: str
    supervisor: int
    report_fd: int
    listen_fd: int | None = None
    started: float = msgspec.field(default_factory=time.monotonic)

    @classmethod
    def receive(cls) -> Launch:
        """Read the launch from standard input and tie this process's life to its parent's.

        To be called by the main thread, before anything heavy is imported.
        """
        launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=cls)
        die_with(launch.supervisor)
        return launch

    def ready(self) -> None:
        """Tell the supervisor that the start has succeeded."""
        self._report("ready")

    def failed(self, error: Exception) -> int:
        """Log why the start failed, in one last line, and tell the supervisor; the exit code to leave with."""
        if isinstance(error, ConfigError):
            cause, code = error.message, EXIT_CONFIG
        else:
            logger.error("the start failed", exc_info=error)
            cause, code = f"{type(error).__name__}: {error}", EXIT_FAILED
        cause = " ".join(cause.split())
        logger.error("%s", cause)
        self._report(f"failed {cause}")
        return code

    def _report(self, line: str) -> None:
        os.write(self.report_fd, line.encode()[:4096])
        os.close(self.report_fd)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` dies; exits at once if it is dead already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit("the supervisor is gone")


def make_run_dir() -> Path:
    """A fresh folder of mode 0700 for the sockets of one run, short enough for a socket's address.

    It lies in ``$XDG_RUNTIME_DIR`` or else in the temporary folder. Raises ConfigError where neither will do.
    """
    parents = [p for p in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp") if p]
    for parent in parents:
        longest = Path(parent) / "bough-XXXXXXXX" / ENDPOINT
        if len(os.fsencode(longest)) <= PATH_BYTES and os.access(parent, os.W_OK | os.X_OK):
            return Path(tempfile.mkdtemp(prefix="bough-", dir=parent))
    raise ConfigError(f"no writable folder with a short enough name for sockets among: {', '.join(parents)}")
