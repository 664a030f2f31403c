"""``python -m benchmarks.peers COMMAND``: setup, list, run, company, newcomer, busy, pauses, table, profile; see
README.md."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.engines import DEFAULT_PEERS, PEERS, Engine, Settings, bough
from benchmarks.peers.home import RESULTS, ROOT, Home, Unavailable, default_home
from benchmarks.peers.rows import DEFAULT_ROWS, ROWS, Row, select
from bough.bench.machine import cpu
from bough.device.platform.cpu import spare_onednn


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = build_parser().parse_args(argv)
    spare_onednn()  # those that every process of a run inherits: peers multiply by oneDNN, too
    try:
        code: int = arguments.function(arguments, Home(arguments.home.resolve()))
    except Unavailable as reason:
        print(reason, file=sys.stderr)
        return 1
    return code


def build_parser() -> argparse.ArgumentParser:
    """Flags of all commands."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--home", type=Path, default=default_home(), help="environments, models (default: %(default)s)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    setup = commands.add_parser("setup", help="make environments and models; what is there is left alone")
    setup.add_argument("steps", nargs="*", metavar="STEP", help="models, or peers; all default ones if none is named")
    setup.set_defaults(function=_setup)
    commands.add_parser("list", help="rows, goals and peers").set_defaults(function=_list)
    _configure_run(commands.add_parser("run", help="measure side by side"))
    company = commands.add_parser("company", help="whether a workload starves beside two others")
    company.add_argument("--third", default="chat", metavar="NAME", help="the workload (default: %(default)s)")
    _configure_comparison(company, _company, "company.json")
    newcomer = commands.add_parser("newcomer", help="what a long prompt does to a stream that it comes beside")
    newcomer.add_argument("--model", choices=("135m", "1b"), default="1b", help="(default: %(default)s)")
    newcomer.add_argument(
        "--tokens", type=int, nargs=2, default=(300, 1500), metavar=("ANSWER", "PROMPT"), help="(default: %(default)s)"
    )
    _configure_comparison(newcomer, _newcomer, "newcomer.json")
    busy = commands.add_parser("busy", help="what other programs cost that use the processors meanwhile")
    busy.add_argument("--programs", type=int, default=2, metavar="INT", help="at most (default: %(default)s)")
    _configure_comparison(busy, _busy, "busy.json")
    pauses = commands.add_parser("pauses", help="first tokens and gaps where people pause before they send")
    _configure_comparison(pauses, _pauses, "pauses.json")
    table = commands.add_parser("table", help="write docs/performance.md, or docs/performance-FOLDER.md, from results")
    table.add_argument(
        "results", nargs="?", type=Path, default=RESULTS, metavar="FOLDER", help="of runs (default: %(default)s)"
    )
    table.set_defaults(function=_table)
    profile = commands.add_parser("profile", help="where bough's time goes in rows (needs perf)")
    profile.add_argument("rows", metavar="LIST", help="names or patterns; the texts are kept for `table`")
    profile.add_argument("--format", help="of the weights; the row's own by default")
    profile.add_argument("--times", type=int, default=3, metavar="INT", help="runs of the row under the profiler")
    profile.add_argument("--results", type=Path, default=RESULTS, help="the texts go beside these results")
    _configure_bough(profile)
    profile.set_defaults(function=_profile)
    return parser


def _configure_bough(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bough-python", default=sys.executable, metavar="PYTHON", help="interpreter that runs bough")
    parser.add_argument(
        "--bough", action="append", default=[], metavar="[NAME=]TREE [FLAGS]",
        help="a source tree of bough, and flags to serve with; repeatable; this one by default; none leaves bough out",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=cpu().threads, metavar="INT", help="of every engine")


def _configure_comparison(
    parser: argparse.ArgumentParser, report: Callable[[argparse.Namespace, Settings], object], output: str
) -> None:
    """Flags of a command whose ``report`` is written to ``output`` or where else one wants it."""

    def function(arguments: argparse.Namespace, home: Home) -> int:
        found = report(arguments, Settings(home, arguments.threads, arguments.bough_python))
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
        return 0

    _configure_bough(parser)
    parser.add_argument("--peers", default="none", metavar="LIST", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--repeats", type=int, default=3, metavar="INT")
    parser.add_argument("--output", type=Path, default=RESULTS / output)
    parser.set_defaults(function=function)


def _configure_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _configure_bough(parser)
    add("--peers", default=",".join(DEFAULT_PEERS), metavar="LIST", help=f"of {', '.join(PEERS)}; or none")
    add("--rows", metavar="LIST", help="names or patterns such as '135m/*/bf16' (default: the rows with goals)")
    add("--formats", metavar="LIST", help="only weights of these formats, such as bf16,q8_0")
    add("--repeats", type=int, default=3, metavar="INT", help="of each cell (default: %(default)s)")
    add("--seed", type=int, default=int(time.time()), metavar="INT", help="text of the prompts; a new one by default")
    add("--cell-seconds", type=float, default=40.0, metavar="S", help="a slower run is given up (default: %(default)s)")
    add("--behind", type=float, default=4.0, metavar="X", help="X times slower than the fastest: no more repeats")
    add("--minutes", type=float, default=60.0, metavar="M", help="no row begins later (default: %(default)s)")
    add("--max-foreign", type=float, default=0.15, metavar="CORES", help="of others; beyond, a cell is run again")
    add("--retries", type=int, default=1, metavar="INT", help="how often (default: %(default)s)")
    add("--quiet-wait", type=float, default=15.0, metavar="S", help="wait for others before a cell")
    add("--output", type=Path, help="default: benchmarks/results/peers-DATE.json")
    parser.set_defaults(function=_run)


def _setup(arguments: argparse.Namespace, home: Home) -> int:
    from benchmarks.peers.setup import setup

    return setup(home, arguments.steps)


def _list(arguments: argparse.Namespace, home: Home) -> int:
    from benchmarks.peers.report import listing

    print(listing(home))
    return 0


def boughs(arguments: argparse.Namespace) -> list[Engine]:
    """The boughs of the command line."""
    if arguments.bough == ["none"]:
        return []
    found = []
    for first, *flags in map(shlex.split, arguments.bough or [shlex.quote(str(ROOT))]):
        name, _, tree = first.rpartition("=")
        found.append(bough(name or "bough", Path(tree).expanduser().resolve(), flags))
    return found


def _engines(arguments: argparse.Namespace) -> list[Engine]:
    peers = [] if arguments.peers == "none" else [PEERS[name] for name in arguments.peers.split(",")]
    return [*boughs(arguments), *peers]


def _rows(patterns: str | None) -> list[Row]:
    return select(patterns) if patterns else [ROWS[name] for name in ROWS if name in DEFAULT_ROWS]


def _run(arguments: argparse.Namespace, home: Home) -> int:
    from benchmarks.peers.report import markdown
    from benchmarks.peers.run import Plan, run

    engines = _engines(arguments)
    if arguments.formats:
        kept = arguments.formats.split(",")
        engines = [replace(e, formats=tuple(f for f in e.formats if f in kept)) for e in engines]
    plan = Plan(
        rows=_rows(arguments.rows),
        engines=engines,
        repeats=arguments.repeats,
        seed=arguments.seed,
        cell_seconds=arguments.cell_seconds,
        behind=arguments.behind,
        minutes=arguments.minutes,
        max_foreign=arguments.max_foreign,
        retries=arguments.retries,
        quiet_wait=arguments.quiet_wait,
    )
    output = arguments.output or RESULTS / time.strftime("peers-%Y%m%d-%H%M.json", time.gmtime())
    report = run(plan, Settings(home, arguments.threads, arguments.bough_python), output)
    print(markdown(report))
    print(f"written to {output}", file=sys.stderr)
    return 0


def _company(arguments: argparse.Namespace, settings: Settings) -> object:
    from benchmarks.peers.company import compare

    return compare(_engines(arguments), settings, arguments.third, arguments.repeats)


def _newcomer(arguments: argparse.Namespace, settings: Settings) -> object:
    from benchmarks.peers.newcomer import compare

    return compare(_engines(arguments), settings, arguments.model, arguments.tokens, arguments.repeats)


def _busy(arguments: argparse.Namespace, settings: Settings) -> object:
    from benchmarks.peers.busy import compare

    return compare(_engines(arguments), settings, arguments.programs, arguments.repeats)


def _pauses(arguments: argparse.Namespace, settings: Settings) -> object:
    from benchmarks.peers.pauses import compare

    return compare(_engines(arguments), settings, arguments.repeats)


def _table(arguments: argparse.Namespace, home: Home) -> int:
    from benchmarks.peers.report import publish

    folder = arguments.results.resolve()
    name = "performance.md" if folder == RESULTS else f"performance-{folder.name}.md"
    publish(folder, ROOT / "docs" / name)
    return 0


def _profile(arguments: argparse.Namespace, home: Home) -> int:
    from benchmarks.peers.profile import profile, profile_path

    (engine,) = boughs(arguments)
    settings = Settings(home, arguments.threads, arguments.bough_python)
    for row in select(arguments.rows):
        text = profile(row, engine, arguments.format, arguments.times, settings)
        print(text, flush=True)
        path = profile_path(row.name, arguments.results)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    # What ends the harness ends the servers that it has started, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
