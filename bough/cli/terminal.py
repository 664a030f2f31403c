"""What ``generate`` and ``chat`` share: sampling flags, streaming to the terminal, the line of figures."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bough.base.cli import add_arguments, from_arguments
from bough.base.config import Config

if TYPE_CHECKING:
    from bough.base.messages import Finish
    from bough.engine.async_engine import AsyncEngine
    from bough.engine.generation import GenerateOptions

SECTIONS = ("model", "device")
"""Parts of the configuration that matter to a single user at a terminal."""


@dataclass(slots=True)
class Turn:
    """One streamed answer.

    Attributes:
        text: the whole answer.
        finish: how it ended.
        n_prompt, n_cached, n_generated: tokens of the prompt, those taken from the cache, and of the answer.
        first: seconds until the first text, or until the end if there was none.
        seconds: seconds until the end.
    """

    text: str
    finish: Finish
    n_prompt: int
    n_cached: int
    n_generated: int
    first: float
    seconds: float

    def figures(self) -> str:
        """The figures of the turn in one line."""
        decoding = self.seconds - self.first
        rate = f", {(self.n_generated - 1) / decoding:.0f} tokens/s" if self.n_generated > 1 and decoding > 0 else ""
        return (
            f"[{self.n_prompt} prompt tokens, {self.n_cached} cached; first text after {self.first * 1e3:.0f} ms; "
            f"{self.n_generated} generated{rate}]"
        )


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the sampling flags, and the model's and the device's."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="INT", help="longest answer (default: %(default)s)"
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="FLOAT", help="0 is greedy (default: %(default)s)"
    )
    group.add_argument("--top-p", type=float, default=1.0, metavar="FLOAT", help="nucleus (default: %(default)s)")
    group.add_argument("--top-k", type=int, default=-1, metavar="INT", help="likeliest tokens kept; -1 keeps all")
    group.add_argument("--seed", type=int, default=None, metavar="INT", help="same seed, same text")
    group.add_argument("--stop", action="append", default=[], metavar="STR", help="end before this text; repeatable")
    add_arguments(parser, SECTIONS)


def options(arguments: argparse.Namespace) -> GenerateOptions:
    """The sampling flags as the engine takes them."""
    from bough.base.params import SamplingParams
    from bough.engine.generation import GenerateOptions

    return GenerateOptions(
        params=SamplingParams(
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            top_k=arguments.top_k,
            seed=arguments.seed,
            stop=tuple(arguments.stop),
        )
    )


async def launch(arguments: argparse.Namespace) -> AsyncEngine:
    """An engine in this process, configured by the flags."""
    from bough.base.log import configure
    from bough.engine.async_engine import AsyncEngine

    configure("bough", "warning")
    return await AsyncEngine.launch(from_arguments(arguments, Config()))


async def show(engine: AsyncEngine, prompt: str | Sequence[int], options: GenerateOptions) -> Turn:
    """Stream one answer to standard output, with a newline at the end; raises BoughError for bad input."""
    start = time.perf_counter()
    first: float | None = None
    parts: list[str] = []
    async for chunk in engine.stream(prompt, options):
        if chunk.text:
            first = first or time.perf_counter() - start
            parts.append(chunk.text)
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if chunk.finish is None:
        raise AssertionError("the engine ended a stream without saying how")
    seconds = time.perf_counter() - start
    return Turn(
        "".join(parts), chunk.finish, chunk.n_prompt, chunk.n_cached, chunk.n_generated, first or seconds, seconds
    )


def report(turn: Turn) -> bool:
    """Write the figures to stderr if a person is there, and what went wrong in any case; whether all is well."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\x1b[2m{turn.figures()}\x1b[0m\n")
    if turn.finish.kind in ("error", "timeout", "abort"):
        sys.stderr.write(f"bough: {turn.finish.message or turn.finish.kind}\n")
        return False
    return True
