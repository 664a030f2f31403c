"""``bough``: finds the command, lets it parse its flags and runs it.

A command is a module with ``configure(parser)``, which adds its flags, and ``run(arguments)``, which
returns the exit code. Only the command at hand is imported, and what is slow to import (torch, the
engine) only inside ``run``: ``bough --help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from bough import __version__
from bough.base.errors import BoughError

COMMANDS = {
    "serve": ("bough.cli.serve", "serve a model over an OpenAI-compatible HTTP API"),
    "generate": ("bough.cli.generate", "continue a text in the terminal"),
    "chat": ("bough.cli.chat", "talk to a model in the terminal"),
    "doctor": ("bough.cli.doctor", "what this machine offers, what is slower than it could be, and what to do"),
    "bench": ("bough.bench.command", "measure a server, the engine or the scheduler"),
}
"""Name -> (module, one line of help)."""


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The whole parser, with the flags of ``command`` alone filled in."""
    parser = argparse.ArgumentParser(prog="bough", description="Serve large language models.")
    parser.add_argument("--version", action="version", version=f"bough {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, help) in COMMANDS.items():
        sub = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        if name == command:
            importlib.import_module(module).configure(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Errors that bough raises on purpose become one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    command = argv[0] if argv and argv[0] in COMMANDS else None
    arguments = build_parser(command).parse_args(argv)
    try:
        code: int = importlib.import_module(COMMANDS[arguments.command][0]).run(arguments)
    except BoughError as error:
        print(f"bough: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`); keep the interpreter's last flush from failing too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


if __name__ == "__main__":
    sys.exit(main())
