"""``bough serve`` whose processes write down what the interpreter's audit hooks tell, once they are ready.

``audited.py FOLDER FLAGS`` serves; ``audited.py FOLDER engine`` and ``audited.py FOLDER api`` are its processes.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

WATCHED = (
    "pickle.find_class", "marshal.loads", "exec", "compile", "import", "os.system", "os.exec", "os.posix_spawn",
    "os.fork", "subprocess.Popen", "socket.connect", "socket.bind", "socket.getaddrinfo", "ctypes.dlopen",
)  # fmt: skip

LAZY = ("bough.grammar.llguidance", "numpy.ma", "re2")
"""Installed modules that are imported when they are first needed, which may be after the start."""

PROOF = "proof that the hook is heard"
"""File name of the code that is compiled when the hook is set."""


def described(argument: Any) -> str:
    if isinstance(argument, CodeType):
        return f"code of {argument.co_filename}"
    return repr(argument)[:200]


def arm(path: str) -> None:
    """From now on write each watched event of this process to the file ``path``, one a line."""
    for module in LAZY:
        importlib.import_module(module)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in WATCHED:
            os.write(file, f"{event} {' '.join(map(described, arguments))}\n".encode())

    sys.addaudithook(hook)
    compile("0", PROOF, "eval")


def process(folder: str, main: Callable[[], int], name: str) -> int:
    from bough.engine.launch import Launch

    ready = Launch.ready

    def ready_and_armed(launch: Launch) -> None:
        ready(launch)
        arm(f"{folder}/{name}")

    Launch.ready = ready_and_armed  # type: ignore[method-assign]  # the one moment at which start-up is over
    return main()


def main(folder: str, arguments: list[str]) -> int:
    if arguments == ["engine"]:
        from bough.engine.process import main as engine

        return process(folder, engine, "engine")
    if arguments == ["api"]:
        from bough.server.process import main as api

        return process(folder, api, "api")
    from bough.base.cli import add_arguments, from_arguments
    from bough.base.config import Config
    from bough.engine.supervisor import Supervisor

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    config = from_arguments(parser.parse_args(arguments), Config())
    commands = [(sys.executable, "-m", "tests.e2e.audited", folder, name) for name in ("engine", "api")]
    return Supervisor(config, *commands).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
