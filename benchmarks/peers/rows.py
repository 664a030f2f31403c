"""The rows of the comparison, their goals, and what was recorded of engines on the machine of the goals."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from benchmarks.peers.floors import Limits
from benchmarks.peers.work import WORK
from bough.bench.workloads import Sizes, Workload

GOAL_MACHINE = Limits(read_gb_s=80.0, bf16_gflop_s=967.0, int8_gop_s=2130.0)
"""What the goals were set on; a goal or a record in seconds is read as a multiple of the floor there."""

BITS = {"bf16": 16, "int8": 8, "q8_0": 8, "int4": 4, "q4_0": 4, "q4_1": 4}
"""Format of the weights -> bits; a row compares formats of equal bits."""

BITS_NAMES = {16: "bf16", 8: "int8", 4: "int4"}

ORDER = ("batch1", "independent", "chat", "rag", "fewshot", "bestof", "json", "prefill256", "prefill2048")

SMALLER = {("1b", "independent"): {"requests": 16}, ("1b", "rag"): {"requests": 24}}
"""Sizes that differ from the workload's own."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What bough aims at: seconds on the goal machine or a multiple of the floor, and a factor over the best peer."""

    over_peer: float
    over_floor: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One workload on one model with weights of so many bits."""

    model: str
    work: str
    bits: int

    @property
    def name(self) -> str:
        return f"{self.model}/{self.work}/{BITS_NAMES[self.bits]}"

    @property
    def workload(self) -> Workload:
        return WORK[self.work]

    @property
    def sizes(self) -> Sizes:
        return self.workload.sizes | SMALLER.get((self.model, self.work), {})

    def takes(self, weights: str) -> bool:
        """Whether engines with such weights compete in this row."""
        return BITS[weights] == self.bits


ROWS = {row.name: row for row in (Row(m, w, b) for m in ("135m", "1b") for b in (16, 8, 4) for w in ORDER)}
"""Name -> row: every combination."""

GOALS = {
    "135m/batch1/bf16": Goal(1.6, over_floor=1.25),
    "135m/independent/bf16": Goal(1.5, over_floor=1.5),
    "135m/chat/bf16": Goal(2.0, over_floor=1.8),
    "135m/rag/bf16": Goal(2.6, over_floor=1.8),
    "135m/fewshot/bf16": Goal(1.6, over_floor=1.5),
    "135m/bestof/bf16": Goal(1.6, over_floor=1.8),
    "135m/json/bf16": Goal(2.2, over_floor=2.0),
    "135m/prefill256/bf16": Goal(1.35, seconds=8 * 256 / 3600),
    "135m/prefill2048/bf16": Goal(1.9, seconds=4 * 2048 / 3000),
    "135m/batch1/int8": Goal(1.4, seconds=0.35),
    "135m/independent/int8": Goal(2.1, seconds=2.3),
    "135m/batch1/int4": Goal(1.4, seconds=0.27),
    "1b/batch1/bf16": Goal(1.1, over_floor=1.1),
    "1b/independent/bf16": Goal(1.1, over_floor=1.12),
    "1b/rag/bf16": Goal(1.6, over_floor=1.3),
    "1b/batch1/int8": Goal(1.4, seconds=2.2),
}
"""Row -> goal. The rows that have one are those that run by default, with the single stream of ``1b`` at 4 bits."""

OWN_GOALS = {name: 1.6 for name in ROWS if name.endswith("/int8")} | {"1b/batch1/int4": 2.2}
"""Row -> how many times faster than bough's own bfloat16, in one run."""

DEFAULT_ROWS = (*GOALS, "1b/batch1/int4")

RECORDED_IK = {
    "135m/batch1/bf16": 0.88,
    "135m/independent/bf16": 15.3,
    "135m/chat/bf16": 21.0,
    "135m/prefill256/bf16": 8 * 256 / 2652,
    "135m/prefill2048/bf16": 4 * 2048 / 1526,
    "135m/batch1/int8": 0.51,
    "135m/independent/int8": 17.5,
    "135m/batch1/int4": 0.38,
    "1b/batch1/bf16": 4.15,
    "1b/batch1/int8": 3.17,
}
"""Row -> seconds of ik_llama.cpp on the goal machine (revision 8337e4c; the best of its formats and runs)."""


def select(patterns: str) -> list[Row]:
    """Rows by comma-separated patterns, each a name or ``MODEL/*/BITS`` with ``*`` for anything; in table order."""
    wanted = patterns.split(",")
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in ROWS):
            raise ValueError(f"no row is called {pattern!r}; see `python -m benchmarks.peers list`")
    return [row for name, row in ROWS.items() if any(fnmatchcase(name, pattern) for pattern in wanted)]
