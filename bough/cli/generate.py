"""``bough generate``: continue one text, streamed to standard output."""

from __future__ import annotations

import argparse
import asyncio
import sys

from bough.cli import terminal


def configure(parser: argparse.ArgumentParser) -> None:
    """The text, then the sampling flags and the model's."""
    parser.add_argument("text", help="the text to continue; - reads standard input")
    terminal.add_sampling(parser, max_tokens=128)


def run(arguments: argparse.Namespace) -> int:
    """Generate; 0, or 1 if the generation failed."""
    text = sys.stdin.read() if arguments.text == "-" else arguments.text
    return asyncio.run(_generate(text, arguments))


async def _generate(text: str, arguments: argparse.Namespace) -> int:
    engine = await terminal.launch(arguments)
    try:
        turn = await terminal.show(engine, text, terminal.options(arguments))
        return 0 if terminal.report(turn) else 1
    finally:
        await engine.close()
