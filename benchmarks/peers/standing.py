"""How bough stands in a run's JSON: against the floors, against the best peer, against the goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.peers.floors import Limits
from benchmarks.peers.limits import middle
from benchmarks.peers.rows import GOALS, OWN_GOALS, RECORDED_IK, ROWS, Goal

RECORDED = "ik (recorded)"

JUDGED = {"ttft_ms_p50": "first token ms, p50", "itl_ms_p99": "gap ms, p99"}


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
        aims: the least and the most that they are by any of the limits measured in the row, whose reading rates may lie
            far apart.
    """

    ours: tuple[str, float] | None
    best: Peer | None
    goal: Goal | None
    floor: float
    aim: float | None
    aims: tuple[float, float] | None

    @property
    def factor(self) -> float | None:
        """How many times faster than the best peer."""
        return self.best.lead if self.best else None

    @property
    def met(self) -> tuple[bool | None, bool | None] | None:
        """Whether the goals (over the floor, over the best peer) are reached; None without a goal or a figure, or where
        the limits do not agree. Who does not finish reaches none."""
        if self.goal is None or self.aims is None:
            return None
        if self.ours is None:
            return False, False
        least, most = self.aims
        over_floor = None if least < self.ours[1] <= most else self.ours[1] <= least
        return over_floor, None if self.factor is None else self.factor >= self.goal.over_peer


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
    for name, (at, row) in last_tried(reports).items():
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
    aim, aims = None, None
    if goal is not None:
        factor = goal.over_floor or (goal.seconds or 0.0) / row["goal_machine_floor_s"]
        aim, aims = factor * row["floor_s"], (factor * min(row["floors"]), factor * max(row["floors"]))
    best = min(peers, key=lambda peer: peer.lead, default=None)
    return Standing(_ours(row), best, goal, row["floor_s"], aim, aims)


def _ours(row: Mapping[str, Any]) -> tuple[str, float] | None:
    return _fastest({c: s for c, s in finished(row).items() if c.startswith("bough")})


def _peers(row: Mapping[str, Any]) -> list[Peer]:
    """Of a row that bough finished."""
    if (ours := _ours(row)) is None:
        return []
    return [Peer(c, s, ours[1], row["floor_s"]) for c, s in finished(row).items() if not c.startswith("bough")]


def _recorded(name: str, row: Mapping[str, Any]) -> list[Peer]:
    """What ik took on the goal machine, as seconds over the floor of others here. Beside others only: alone it is the
    best of one."""
    recorded, ours = RECORDED_IK.get(name), _ours(row)
    if recorded is None or ours is None or not has_peers(row):
        return []
    seconds = recorded / row["goal_machine_floor_s"] * row.get("others_floor_s", row["floor_s"])
    return [Peer(RECORDED, seconds, ours[1], row["floor_s"])]


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


def last_tried(reports: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, Mapping[str, Any]]]:
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


def waited(reports: Sequence[Mapping[str, Any]]) -> dict[str, list[Wait]]:
    """Row -> a wait for each of ``JUDGED``: beside the peer that did best against bough where each was last measured,
    of bough's last run where there is none, or where it did not finish."""
    found = {}
    for name, (at, row) in last_tried(reports).items():
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
        for gain in gained([report]):
            stays[gain.row, "narrow"] = stays[wide_row(gain.row), f"wide of {gain.row}"] = i
    kept = {(name, i) for (name, _), i in stays.items()}
    return [{**r, "rows": {n: row for n, row in r["rows"].items() if (n, i) in kept}} for i, r in enumerate(reports)]


def gained(reports: Sequence[Mapping[str, Any]]) -> list[Gain]:
    """What fewer bits gain over bough's own bfloat16: each row in the last run that has both."""
    found: dict[str, Gain] = {}
    for report in reports:
        seconds = {n: s.ours[1] for n, r in report["rows"].items() if "floor_s" in r and (s := standing(n, r)).ours}
        for name, narrow in seconds.items():
            row = report["rows"][name]
            beside = _fastest(finished(row, "wide"))
            wide, of = (beside[1], row) if beside else (seconds.get(wide_row(name)), report["rows"].get(wide_row(name)))
            if wide and of and name != wide_row(name):
                rates = limits_of(of).read_gb_s, limits_of(row).read_gb_s
                found[name] = Gain(name, report["machine"]["date"], wide, narrow, rates)
    return [found[name] for name in ROWS if name in found]


def limits_of(row: Mapping[str, Any]) -> Limits:
    """The medians of what the machine was measured to do while a row ran."""
    return middle([Limits(**found) for found in row["limits"]])
