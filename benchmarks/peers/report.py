"""From a run's JSON to tables: against the floors, against the best peer, against the goals."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import DEFAULT_PEERS, PEERS
from benchmarks.peers.floors import Limits
from benchmarks.peers.home import ROOT, Home
from benchmarks.peers.limits import middle
from benchmarks.peers.profile import profile_path
from benchmarks.peers.rows import GOALS, OWN_GOALS, RECORDED_IK, ROWS, Goal
from bough.bench.measures import table

RECORDED = "ik (recorded)"

LATENCIES = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "itl_ms_max", "tpot_ms_p50")

JUDGED = {"ttft_ms_p50": "first token ms, p50", "itl_ms_p99": "gap ms, p99"}

COLUMNS = ("seconds", "x floor", "spread", "total_per_s", *LATENCIES, "cached_tokens", "generated_tokens", "valid",
           "foreign_cores")  # fmt: skip

READY_SECONDS = 3
"""Within which the default model is to answer when its weights are in the cache."""

SUMMARY = ("row", "floor s", "bough s", "x floor", "goal x", "best peer", "s", "x floor", "bough is", "goal", "met")


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer's seconds, with bough's and the floor of that run; ``run`` is its date where it is not the last one."""

    contender: str
    seconds: float
    ours: float
    floor: float
    run: str = ""

    @property
    def lead(self) -> float:
        """How many times faster bough was in that run."""
        return self.seconds / self.ours

    @property
    def label(self) -> str:
        """The contender, with month, day and time of the run if it is another."""
        return _label(self.contender, self.run)


@dataclass(frozen=True, slots=True)
class Wait:
    """Milliseconds that bough's clients and those of the best peer waited, in one run; ``run`` as of :class:`Peer`.

    Attributes:
        ours: None if bough did not finish, or the row knows no such wait.
        contender: the peer; empty if none finished beside bough.
        best: its milliseconds.
    """

    ours: float | None
    contender: str = ""
    best: float | None = None
    run: str = ""

    @property
    def of_best(self) -> str:
        """The peer's figure, and who it is."""
        return f"{self.best:.4g} ({_label(self.contender, self.run)})" if self.best is not None else ""

    @property
    def factor(self) -> float:
        """How many times longer bough's clients waited; 0 if there is nobody to compare with."""
        return self.ours / self.best if self.ours and self.best else 0.0

    @property
    def met(self) -> str:
        """Whether bough's clients waited no longer: yes, no, or - if there is nobody to compare with."""
        return "-" if self.ours is None or self.best is None else "yes" if self.ours <= self.best else "no"


def _label(contender: str, run: str) -> str:
    return f"{contender}, {run[5:16].replace('T', ' ')}" if run else contender


@dataclass(frozen=True, slots=True)
class Standing:
    """How a row went.

    Attributes:
        ours: (contender, seconds) of the fastest bough; None if none finished.
        best: the peer that came nearest to bough, or passed it furthest; None if none finished beside it.
        goal: None where there is none.
        floor: seconds.
        aim: seconds that bough is to reach here, from the goal's multiple of the floor.
    """

    ours: tuple[str, float] | None
    best: Peer | None
    goal: Goal | None
    floor: float
    aim: float | None

    @property
    def factor(self) -> float | None:
        """How many times faster than the best peer."""
        return self.best.lead if self.best else None

    @property
    def met(self) -> tuple[bool, bool | None] | None:
        """Whether the goals (over the floor, over the best peer) are reached; None without a goal or a figure. Who does
        not finish reaches none."""
        if self.goal is None or self.aim is None:
            return None
        if self.ours is None:
            return False, False
        return self.ours[1] <= self.aim, None if self.factor is None else self.factor >= self.goal.over_peer


@dataclass(frozen=True, slots=True)
class Gain:
    """Seconds of a row with weights in bfloat16 and with fewer bits, in turns or, in older runs, in two rows; ``rates``
    in GB/s, as the machine read while each of them was measured."""

    row: str
    date: str
    wide: float
    narrow: float
    rates: tuple[float, float]

    @property
    def factor(self) -> float:
        """How many times faster than in bfloat16."""
        return self.wide / self.narrow

    @property
    def goal(self) -> float | None:
        return OWN_GOALS.get(self.row)

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        return None if self.goal is None else self.factor >= self.goal


def wide_row(name: str) -> str:
    """The row with the same work in bfloat16."""
    return f"{name.rpartition('/')[0]}/bf16"


def standing(name: str, row: Mapping[str, Any]) -> Standing:
    """Judge one row of a report by itself."""
    # Beside ik itself the record counts, too: the build that was recorded had flash attention, in which the one that
    # packages hold aborts.
    return _against(name, row, [*_peers(row), *_recorded(name, row)])


def standings(reports: Sequence[Mapping[str, Any]]) -> dict[str, Standing]:
    """Judge every row that reports have, oldest first: bough in the row's last run, beside the best of its peers as
    each was last measured."""
    found = {}
    for name, (at, row) in _last(reports).items():
        peers = [
            replace(peer, run=run)
            for contender, run, there in _finished_beside(reports, name, at)
            for peer in _peers(there)
            if peer.contender == contender
        ]
        found[name] = _against(name, row, [*peers, *_recorded(name, row)])
    return found


def _against(name: str, row: Mapping[str, Any], peers: Sequence[Peer]) -> Standing:
    goal = GOALS.get(name)
    aim = None
    if goal is not None:
        factor = goal.over_floor or (goal.seconds or 0.0) / row["goal_machine_floor_s"]
        aim = factor * row["floor_s"]
    return Standing(_ours(row), min(peers, key=lambda peer: peer.lead, default=None), goal, row["floor_s"], aim)


def _ours(row: Mapping[str, Any]) -> tuple[str, float] | None:
    return _fastest({c: s for c, s in finished(row).items() if c.startswith("bough")})


def _peers(row: Mapping[str, Any]) -> list[Peer]:
    """Of a row that bough finished."""
    if (ours := _ours(row)) is None:
        return []
    return [Peer(c, s, ours[1], row["floor_s"]) for c, s in finished(row).items() if not c.startswith("bough")]


def _recorded(name: str, row: Mapping[str, Any]) -> list[Peer]:
    """What ik took on the goal machine, as seconds over this floor. Beside others only: alone it is the best of one."""
    recorded, ours = RECORDED_IK.get(name), _ours(row)
    if recorded is None or ours is None or not has_peers(row):
        return []
    return [Peer(RECORDED, recorded / row["goal_machine_floor_s"] * row["floor_s"], ours[1], row["floor_s"])]


def _finished_beside(
    reports: Sequence[Mapping[str, Any]], name: str, at: int
) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(peer, date, row) where each last finished a row beside bough; no date if that is report ``at``."""
    found = {}
    for i, report in enumerate(reports):
        row = report["rows"].get(name, {})
        for peer in _peers(row) if "floor_s" in row else []:
            found[peer.contender] = (peer.contender, "" if i == at else report["machine"]["date"], row)
    return list(found.values())


def _last(reports: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, Mapping[str, Any]]]:
    """Row -> (which report, the row) as bough last tried it beside others, or alone if it never did."""
    rows = [
        (name, (i, row))
        for i, report in enumerate(reports)
        for name, row in report["rows"].items()
        if "floor_s" in row and any(contender.startswith("bough") for contender in row["cells"])
    ]
    found = dict(sorted(rows, key=lambda item: has_peers(item[1][1])))
    return {name: found[name] for name in ROWS if name in found}


def has_peers(row: Mapping[str, Any]) -> bool:
    """Whether others than bough took part."""
    return not all(contender.startswith("bough") for contender in row["cells"])


def finished(row: Mapping[str, Any], among: str = "cells") -> dict[str, float]:
    """Contender -> median seconds, of those that did all of the row's work; ``wide`` are boughs in bfloat16."""
    cells = row.get(among, {}).items()
    return {c: cell["median"]["seconds"] for c, cell in cells if "median" in cell and not cell.get("note")}


def _fastest(seconds: Mapping[str, float]) -> tuple[str, float] | None:
    return min(seconds.items(), key=lambda item: item[1]) if seconds else None


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
    for name, waits in _waits(reports).items():
        shown = [text for wait in waits for text in ("" if wait.ours is None else f"{wait.ours:.4g}", wait.of_best)]
        met = [wait.met for wait in waits]
        lines.append([name, *shown, " / ".join(met) if set(met) != {"-"} else ""])
    heads = ["row", *(f"{who}: {n}" for n in JUDGED.values() for who in ("bough", "best of the peers")), "met"]
    return _table(heads, lines)


def _waits(reports: Sequence[Mapping[str, Any]]) -> dict[str, list[Wait]]:
    """Row -> a wait for each of ``JUDGED``: beside the peer that did best against bough where each was last measured,
    of bough's last run where there is none, or where it did not finish."""
    found = {}
    for name, (at, row) in _last(reports).items():
        beside = _finished_beside(reports, name, at) if _ours(row) else []
        medians = [(c, run, there, there["cells"][c]["median"]) for c, run, there in beside]
        found[name] = [
            max(
                (Wait(_own(there, key), c, median[key], run) for c, run, there, median in medians if key in median),
                key=lambda wait: wait.factor,
                default=Wait(_own(row, key)),
            )
            for key in JUDGED
        ]
    return found


def _own(row: Mapping[str, Any], key: str) -> float | None:
    """Of bough's fastest form in a row."""
    ours = _ours(row)
    return row["cells"][ours[0]]["median"].get(key) if ours else None


def _gains(reports: Sequence[Mapping[str, Any]]) -> str:
    """What fewer bits gain over bough's own bfloat16: each row in the last run that has both."""
    lines = [
        [gain.row, gain.date, f"{gain.wide:.3g}", f"{gain.narrow:.3g}",
         " / ".join(f"{rate:.0f}" for rate in gain.rates), f"{gain.factor:.2f}x",
         f"{gain.goal:g}x" if gain.goal else "", "" if gain.met is None else "yes" if gain.met else "no"]
        for gain in _gained(reports)
    ]  # fmt: skip
    return _table(["row", "run", "bfloat16 s", "s", "read GB/s", "faster", "goal", "met"], lines) if lines else ""


def current(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The reports, oldest first, without what later ones have measured again; those that have nothing left are empty.

    A row stays in the last report that has it, in the last that has it beside each peer, and in the last that has it
    with fewer bits beside bfloat16.
    """
    stays: dict[tuple[str, str], int] = {}
    for i, report in enumerate(reports):
        for name, row in report["rows"].items():
            if "floor_s" in row:
                stays[name, "last"] = i
                stays |= {(name, contender): i for contender in row["cells"] if not contender.startswith("bough")}
        for gain in _gained([report]):
            stays[gain.row, "narrow"] = stays[wide_row(gain.row), f"wide of {gain.row}"] = i
    kept = {(name, i) for (name, _), i in stays.items()}
    return [{**r, "rows": {n: row for n, row in r["rows"].items() if (n, i) in kept}} for i, r in enumerate(reports)]


def _gained(reports: Sequence[Mapping[str, Any]]) -> list[Gain]:
    found: dict[str, Gain] = {}
    for report in reports:
        seconds = {n: s.ours[1] for n, r in report["rows"].items() if "floor_s" in r and (s := standing(n, r)).ours}
        for name, narrow in seconds.items():
            row = report["rows"][name]
            beside = _fastest(finished(row, "wide"))
            wide, of = (beside[1], row) if beside else (seconds.get(wide_row(name)), report["rows"].get(wide_row(name)))
            if wide and of and name != wide_row(name):
                rates = _limits(of).read_gb_s, _limits(row).read_gb_s
                found[name] = Gain(name, report["machine"]["date"], wide, narrow, rates)
    return [found[name] for name in ROWS if name in found]


def _line(name: str, s: Standing) -> tuple[str, ...]:
    def figure(seconds: float, floor: float) -> tuple[str, str]:
        return f"{seconds:.3g}", f"{seconds / floor:.2f}"

    met = "" if s.met is None else " / ".join({True: "yes", False: "no", None: "-"}[m] for m in s.met)
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
    limits, rates = _limits(row), [found["read_gb_s"] for found in row["limits"]]
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


def _limits(row: Mapping[str, Any]) -> Limits:
    return middle([Limits(**found) for found in row["limits"]])


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
        "which the machine reads, which is between the two that are given with each row.",
    ]
    if (about := folder / "about.md").exists():
        parts.append(about.read_text().strip())
    last = {name: row for name, (_, row) in _last(every).items()}
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
    missed |= {name for name, waits in _waits(every).items() if "no" in [wait.met for wait in waits]}
    missed |= {gain.row for gain in _gained(reports) if gain.met is False}
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
