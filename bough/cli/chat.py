"""``bough chat``: a conversation in the terminal. Each turn reuses the KV of the turns before it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING

from bough.base.errors import BoughError, ConfigError
from bough.cli import terminal

if TYPE_CHECKING:
    from bough.engine.async_engine import AsyncEngine
    from bough.engine.generation import GenerateOptions

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def configure(parser: argparse.ArgumentParser) -> None:
    """The system message, then the sampling flags and the model's."""
    parser.add_argument("--system", default=None, metavar="STR", help="system message")
    parser.epilog = HELP
    terminal.add_sampling(parser, max_tokens=512)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the end of the input; always 0."""
    with asyncio.Runner() as runner:
        engine = runner.run(terminal.launch(arguments))
        try:
            if engine.template is None:
                raise ConfigError("the model has no chat template; `bough generate` continues plain text")
            _talk(runner, engine, terminal.options(arguments), arguments.system)
        finally:
            runner.run(engine.close())
    return 0


def _talk(runner: asyncio.Runner, engine: AsyncEngine, options: GenerateOptions, system: str | None) -> None:
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    if sys.stdin.isatty():
        # Imported for its effect: input() gains line editing and a history.
        import readline  # noqa: F401

        print(HELP)
    while (line := _ask()) is not None:
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(opening)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                answer = runner.run(_answer(engine, messages, options))
                messages.append({"role": "assistant", "content": answer})
            except KeyboardInterrupt:
                messages.pop()
                print()
            except BoughError as error:
                messages.pop()
                print(f"bough: {error.message}", file=sys.stderr)


def _ask() -> str | None:
    """The next line that the user types, stripped; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return ""


async def _answer(engine: AsyncEngine, messages: list[dict[str, str]], options: GenerateOptions) -> str:
    turn = await terminal.show(engine, await engine.render_chat(messages), options)
    terminal.report(turn)
    return turn.text
