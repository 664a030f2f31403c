"""``bough bench``: finds the benchmark, and writes what it found beside the facts of the machine."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from bough.base.errors import ConfigError

KINDS = {
    "serve": (
        "bough.bench.serve",
        "any OpenAI-compatible server, under workloads that share prefixes and ones that do not",
    ),
    "offline": ("bough.bench.offline", "the engine in this process, without a server"),
    "json": (
        "bough.bench.json",
        "structured generation: forward passes, masks, compiles, with and without jump-forward",
    ),
    "programs": ("bough.bench.programs", "programs of many calls, replayed from traces on a simulated device"),
    "scheduler": ("bough.bench.scheduler", "host time per step against running, waiting and cached, without a model"),
}
"""Name -> (module, one line of help)."""


def configure(parser: argparse.ArgumentParser) -> None:
    """One sub-command per benchmark; all of them can write their result."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (module, help) in KINDS.items():
        sub = kinds.add_parser(name, help=help, description=f"Measure {help}.")
        sub.add_argument("--output", type=Path, metavar="FILE", help="write the result here, as JSON")
        sub.add_argument("--plot", type=Path, metavar="FILE", help="draw the result here (needs matplotlib)")
        importlib.import_module(module).configure(sub)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write and draw what was asked for; 1 if a request failed."""
    for path in (arguments.output, arguments.plot):
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    from bough.bench.machine import facts

    kind = importlib.import_module(KINDS[arguments.kind][0])
    result = {"benchmark": arguments.kind, "machine": facts(), **kind.run(arguments)}
    print(kind.summary(result))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {arguments.output}", file=sys.stderr)
    if arguments.plot is not None:
        kind.plot(result, arguments.plot)
        print(f"drawn in {arguments.plot}", file=sys.stderr)
    return 1 if result.get("errors") else 0
