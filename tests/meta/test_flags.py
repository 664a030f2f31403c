"""The command line is frozen: a new flag is a decision, made by editing ``flags.txt`` too."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from bough.cli.main import COMMANDS, build_parser

FROZEN = Path(__file__).with_name("flags.txt")


def flags(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    """``command flag`` for each flag and ``command NAME`` for each positional argument."""
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._VersionAction):
            continue
        if isinstance(action, argparse._SubParsersAction):
            for command, sub in action.choices.items():
                yield from flags(sub, f"{name} {command}")
        else:
            shown = "/".join(action.option_strings) or str(action.metavar or action.dest)
            choices = " {" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
            yield f"{name} {shown}{choices}"


def test_flags_are_those_that_were_agreed() -> None:
    now = sorted(
        {
            line
            for command in COMMANDS
            for line in flags(build_parser(command), "bough")
            if line.startswith(f"bough {command} ")
        }
    )
    frozen = FROZEN.read_text().splitlines()
    assert now == frozen, f"new: {sorted(set(now) - set(frozen))}; gone: {sorted(set(frozen) - set(now))}"


def test_every_flag_explains_itself() -> None:
    for command in COMMANDS:
        parser = build_parser(command)
        for sub in _parsers(parser):
            for action in sub._actions:
                assert action.help or isinstance(action, argparse._SubParsersAction), (sub.prog, action)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from _parsers(sub)
