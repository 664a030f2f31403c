"""``bough serve``: the HTTP server and its engine, until SIGTERM."""

from __future__ import annotations

import argparse

from bough.base.cli import add_arguments, from_arguments
from bough.base.config import Config


def configure(parser: argparse.ArgumentParser) -> None:
    """Every field of the configuration is a flag."""
    add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve; the exit code of the supervisor."""
    from bough.engine.supervisor import Supervisor

    return Supervisor(from_arguments(arguments, Config())).run()
