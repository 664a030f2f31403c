"""Processes: starting and stopping a server with all its children, and who used the CPU meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.home import Unavailable

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds up to now: of the whole machine, of one process tree, of this process; ``at`` is monotonic."""

    at: float
    machine: float
    tree: float
    own: float

    def cores(self, earlier: Usage) -> float:
        """Cores that the tree used since."""
        return (self.tree - earlier.tree) / max(self.at - earlier.at, 1e-6)

    def foreign(self, earlier: Usage) -> float:
        """Cores that neither the tree nor this process used since."""
        others = (self.machine - earlier.machine) - (self.tree - earlier.tree) - (self.own - earlier.own)
        return max(0.0, others) / max(self.at - earlier.at, 1e-6)


def usage(root: int) -> Usage:
    """Read ``/proc`` for the tree of processes below ``root``."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    user, nice, system, _, _, irq, softirq = (int(f) for f in fields)
    tree = descendants(root)
    used = sum(_of_process(pid) for pid in tree)
    machine = (user + nice + system + irq + softirq) / _TICKS
    return Usage(time.perf_counter(), machine, used / _TICKS, time.process_time())


def _stat(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` from the state on; empty for a process that has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _of_process(pid: int) -> int:
    """CPU ticks of a process and of its children that were waited for."""
    return sum(int(f) for f in _stat(pid)[11:15])


def descendants(root: int) -> list[int]:
    """``root`` and all processes below it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    tree = [root]
    for pid in tree:
        tree.extend(children.get(pid, []))
    return tree


def await_usage(root: int, seconds: float, enough: Callable[[Usage, Usage], bool]) -> None:
    """Wait until ``enough(now, a quarter of a second ago)`` holds for the tree below ``root``, at most ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before = usage(root)
        time.sleep(0.25)
        if enough(usage(root), before):
            return


def resident_bytes(root: int) -> int:
    """Memory of the tree that is its own (shared file pages count once per process)."""
    total = 0
    for pid in descendants(root):
        with contextlib.suppress(OSError, IndexError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return port


class Process:
    """A server or a pipeline in a process group of its own; its output goes to ``log``."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        pipes: bool = False,
    ) -> None:
        self.log = log
        with log.open("wb") as out:
            self.popen = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def tail(self) -> str:
        """The end of the log, on one line, without where somebody's home is: results are published."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:])[-400:].replace(str(Path.home()), "~")

    def wait_http(self, url: str, seconds: float) -> None:
        """Until ``url`` answers 200; Unavailable if the process ends or the time is over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.popen.poll() is not None:
                raise Unavailable(f"ended with {self.popen.returncode} while starting: {self.tail()}")
            with contextlib.suppress(urllib.error.URLError, OSError):
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if answer.status == 200:
                        return
            time.sleep(0.1)
        raise Unavailable(f"did not answer within {seconds:.0f} s: {self.tail()}")

    def stop(self) -> None:
        """Ask the group to end, then make it."""
        for sent, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(patience)
                break
        # Children that outlived the first process are still in its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()
