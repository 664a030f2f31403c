"""From runs' JSON to tables and the document."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import DEFAULT_PEERS, PEERS
from benchmarks.peers.home import ROOT, Home
from benchmarks.peers.profile import profile_path
from benchmarks.peers.rows import GOALS, ROWS
from benchmarks.peers.standing import (
    JUDGED,
    Peer,
    Standing,
    current,
    finished,
    gained,
    last_tried,
    limits_of,
    standing,
    standings,
    waited,
)
from bough.bench.measures import table

LATENCIES = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "itl_ms_max", "tpot_ms_p50")

COLUMNS = ("seconds", "x floor", "spread", "total_per_s", *LATENCIES, "cached_tokens", "generated_tokens", "valid",
           "foreign_cores")  # fmt: skip

READY_SECONDS = 3
"""Within which the default model is to answer when its weights are in the cache."""

SUMMARY = ("row", "floor s", "bough s", "x floor", "goal x", "best peer", "s", "x floor", "bough is", "goal", "met")


def markdown(report: Mapping[str, Any]) -> str:
    """All tables of a run."""
    parts = [_machine(report), _summary(report), _latencies([report]), _gains([report]), _versions(report)]
    parts += [f"### {name}\n\n{_details(name, row)}" for name, row in report["rows"].items() if "floor_s" in row]
    return "\n\n".join(part for part in parts if part) + "\n"


def _machine(report: Mapping[str, Any]) -> str:
    about = report["machine"]
    return (
        f"bough {about['revision']}, {about['cpu']} ({', '.join(about['features'])}), "
        f"{report['threads']} threads; medians of {report['plan']['repeats']}; who was more than "
        f"{report['plan']['behind']:g} times slower than the fastest ran once; seed {report['plan']['seed']}."
    )


def _summary(report: Mapping[str, Any]) -> str:
    """One line per row of a run: floor, bough, best peer, goals."""
    lines = []
    for name, row in report["rows"].items():
        if "floor_s" in row:
            lines.append(_line(name, standing(name, row)))
        else:
            lines.append((name, *[""] * (len(SUMMARY) - 2), row.get("note", "")))
    return _table(SUMMARY, lines)


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---" if head in ("row", "best peer", "met") else "--:" for head in heads]
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, rule, *lines))


def _latencies(reports: Sequence[Mapping[str, Any]]) -> str:
    """Time to the first token and the longest gaps: of bough's fastest form, beside the peer that is best in them."""
    lines = []
    for name, waits in waited(reports).items():
        shown = [text for wait in waits for text in ("" if wait.ours is None else f"{wait.ours:.4g}", wait.of_best)]
        met = [wait.met for wait in waits]
        lines.append([name, *shown, " / ".join(met) if set(met) != {"-"} else ""])
    heads = ["row", *(f"{who}: {n}" for n in JUDGED.values() for who in ("bough", "best of the peers")), "met"]
    return _table(heads, lines)


def _gains(reports: Sequence[Mapping[str, Any]]) -> str:
    """What fewer bits gain over bough's own bfloat16: each row in the last run that has both."""
    lines = [
        [gain.row, gain.date, f"{gain.wide:.3g}", f"{gain.narrow:.3g}",
         " / ".join(f"{rate:.0f}" for rate in gain.rates), f"{gain.factor:.2f}x",
         f"{gain.goal:g}x" if gain.goal else "", "" if gain.met is None else "yes" if gain.met else "no"]
        for gain in gained(reports)
    ]  # fmt: skip
    return _table(["row", "run", "bfloat16 s", "s", "read GB/s", "faster", "goal", "met"], lines) if lines else ""


def _line(name: str, s: Standing) -> tuple[str, ...]:
    def figure(seconds: float, floor: float) -> tuple[str, str]:
        return f"{seconds:.3g}", f"{seconds / floor:.2f}"

    met = "" if s.met is None else " / ".join({True: "yes", False: "no", None: "-"}[m] for m in s.met)
    if s.met is not None and s.met[0] is None:
        met = met.replace("-", "at some rates", 1)
    return (
        name,
        f"{s.floor:.3g}",
        *(figure(s.ours[1], s.floor) if s.ours else ("", "")),
        f"{s.aim / s.floor:.2f}" if s.aim else "",
        s.best.label if s.best else "",
        *(figure(s.best.seconds, s.best.floor) if s.best else ("", "")),
        f"{s.factor:.2f}x" if s.factor else "",
        f"{s.goal.over_peer:g}x" if s.goal else "",
        met,
    )


def _versions(report: Mapping[str, Any]) -> str:
    lines = [f"- {name}: {version}" for name, version in report["versions"].items()]
    for key, facts in report["started"].items():
        goal = f" (goal: {READY_SECONDS} s)" if key.startswith("135m/bough") else ""
        lines.append(f"- {key}: ready in {facts['seconds']:g} s{goal}, {facts['bytes'] / 2**30:.1f} GiB then")
    lines += [f"- {key}: skipped, {reason}" for key, reason in report["skipped"].items()]
    return "\n".join(lines)


def _details(name: str, row: Mapping[str, Any]) -> str:
    figures: dict[str, dict[str, float]] = {}
    cells = row["cells"] | {f"beside them, {c}": cell for c, cell in row.get("wide", {}).items()}
    notes = [f"- {c}: {cell['note']}" for c, cell in cells.items() if cell.get("note")]
    notes += [_disturbed(c, cell) for c, cell in cells.items() if cell.get("disturbed")]
    for contender, cell in cells.items():
        if "median" in cell:
            figures[contender] = {
                **cell["median"],
                "x floor": round(cell["median"]["seconds"] / row["floor_s"], 2),
                "spread": cell["spread"],
            }
    notes += [f"- {warning}" for warning in unequal(row)]
    columns = [c for c in COLUMNS if any(c in f for f in figures.values())]
    sizes = ", ".join(f"{key} {value:g}" for key, value in row["sizes"].items())
    shown = table(figures, columns, "contender") if figures else "Nobody finished."
    title = ROWS[name].workload.title
    limits, rates = limits_of(row), [found["read_gb_s"] for found in row["limits"]]
    about = (
        f"{title[0].upper()}{title[1:]} ({sizes}). Floor {row['floor_s']:.3g} s, as the machine read "
        f"{limits.read_gb_s:.0f} GB/s ({min(rates):.0f} to {max(rates):.0f}) and multiplied "
        f"{limits.bf16_gflop_s:.0f} GFLOP/s in bf16 and {limits.int8_gop_s:.0f} GOP/s in int8."
    )
    return "\n\n".join([about, shown, *(["\n".join(notes)] if notes else [])])


def _disturbed(contender: str, cell: Mapping[str, Any]) -> str:
    count, runs = cell["disturbed"], len(cell["repeats"])
    told = f"{count} of {runs} runs, which do not count" if count < runs else "every run"
    return f"- {contender}: other programs disturbed {told}"


def unequal(row: Mapping[str, Any]) -> Iterator[str]:
    """Contenders that did other work than most: prompts of another length, answers that ended early."""
    done = {c: cell["median"] for c, cell in row["cells"].items() if "median" in cell}
    lengths = sorted(f["prompt_tokens"] for f in done.values() if f.get("prompt_tokens"))
    usual = lengths[len(lengths) // 2] if lengths else 0
    for contender, f in done.items():
        if f.get("prompt_tokens") and abs(f["prompt_tokens"] - usual) > 0.02 * usual:
            yield f"{contender} counted {f['prompt_tokens']:g} prompt tokens, others {usual:g}"
        if f.get("short") and "valid" not in f:
            yield f"{contender}: {f['short']:g} answers were shorter than asked for"
    answers = {c: f["generated_tokens"] for c, f in done.items() if "valid" in f}
    if len(set(answers.values())) > 1:
        counts = ", ".join(f"{contender} {count:g}" for contender, count in answers.items())
        yield f"answers end where the model ends them, and so have different lengths in tokens: {counts}"


def publish(folder: Path, output: Path) -> None:
    """Write the document and its pictures, a section for each run of a folder, behind what its about.md tells."""
    from benchmarks.peers.plots import against_floors

    results = sorted(folder.glob("peers-*.json"))
    if not results:
        raise SystemExit(f"no run has left its peers-*.json in {folder}")
    every = [json.loads(result.read_text()) for result in results]
    reports = current(every)
    output.parent.mkdir(parents=True, exist_ok=True)
    names = ", ".join(f"`{_shown(path)}`" for path, report in zip(results, reports, strict=True) if report["rows"])
    parts = [
        "# Performance on a CPU, side by side",
        f"Written by `python -m benchmarks.peers table` from {names}; `benchmarks/peers/README.md` says how it was "
        "measured and what a floor is. A row that several runs have was measured again, not always beside the same "
        "peers. The first table and the pictures take bough from the last of its runs that has any, and each peer "
        "beside bough as both were last measured together: the best is the one that bough led by least, or that led "
        "bough by most, and month, day and time name that run where it is another. The lead is the ratio of seconds in "
        "that run; first tokens and gaps are judged alike, both as measured there. What later runs have measured again "
        "in every way is left out. Where rows read more than they multiply, the floor is as certain as the rate at "
        "which the machine reads, which is between the two that are given with each row: a goal is met, or missed, if "
        "it is at all rates that the row has seen.",
    ]
    if (about := folder / "about.md").exists():
        parts.append(about.read_text().strip())
    last = {name: row for name, (_, row) in last_tried(every).items()}
    judged = standings(every)
    for model in ("135m", "1b"):
        shown = {n: _multiples(row, judged[n].best) for n, row in last.items() if n.startswith(f"{model}/")}
        if shown:
            path = output.parent / "images" / f"{output.stem}-{model}.svg"
            path.parent.mkdir(exist_ok=True)
            against_floors(shown, f"wall time over floor, {model}", path)
            parts.append(f"![{model}: wall time over floor](images/{path.name})")
    parts += [
        "## Every row: bough as last measured beside a peer, or alone if it never was, and the best peer",
        _table(SUMMARY, [_line(name, s) for name, s in judged.items()]),
        _latencies(every),
        "## Fewer bits beside bfloat16, as last measured in one run",
        _gains(reports),
    ]
    parts += [f"## {report['machine']['date']}\n\n{markdown(report)}" for report in reports if report["rows"]]
    missed = {name for name, s in judged.items() if False in (s.met or ())}
    missed |= {name for name, waits in waited(every).items() if "no" in [wait.met for wait in waits]}
    missed |= {gain.row for gain in gained(reports) if gain.met is False}
    parts += _profiles(missed, folder)
    output.write_text("\n\n".join(parts))


def _multiples(row: Mapping[str, Any], best: Peer | None) -> dict[str, float]:
    """Contender -> multiple of the floor, in a row and of the best peer of another run, in place of its own there."""
    found = {contender: seconds / row["floor_s"] for contender, seconds in finished(row).items()}
    if best and best.run:
        found.pop(best.contender, None)
        found[best.label] = best.seconds / best.floor
    return found


def _shown(path: Path) -> Path:
    return path.resolve().relative_to(ROOT) if path.resolve().is_relative_to(ROOT) else path


def _profiles(missed: Collection[str], results: Path) -> Iterator[str]:
    """Where bough's time goes in rows that miss a goal, as far as :mod:`benchmarks.peers.profile` has looked."""
    found = {name: path for name in ROWS if name in missed and (path := profile_path(name, results)).exists()}
    if missed:
        yield "## Where the time goes in rows that miss a goal"
        yield "Shares of all CPU time of the server, by `python -m benchmarks.peers profile`."
    if lacking := [name for name in ROWS if name in missed and name not in found]:
        yield f"Not profiled: {', '.join(lacking)}."
    for name, path in found.items():
        yield f"### {name}: profile\n\n```\n{path.read_text().strip()}\n```\n"


def listing(home: Home) -> str:
    """Rows with their goals, and which peers are set up."""
    lines = []
    for name in ROWS:
        goal = GOALS.get(name)
        aim = ""
        if goal is not None:
            floor = f"{goal.over_floor:g}x floor" if goal.over_floor else f"{goal.seconds:.3g} s on the goal machine"
            aim = f"goal {floor}, {goal.over_peer:g}x the best peer"
        lines.append(f"{name:24}{aim}")
    lines.append("")
    for name, peer in PEERS.items():
        lines.append(f"{name:14}{', '.join(peer.formats):28}{'by default' if name in DEFAULT_PEERS else ''}")
    return "\n".join(lines)
