"""From the times of single calls to the figures of a workload: percentiles, medians over repeats, tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Figures = dict[str, float]
"""Name of a figure -> value; a figure that could not be measured is absent."""


@dataclass(slots=True)
class Call:
    """One request, as its client saw it. Times are seconds of ``time.perf_counter``.

    Attributes:
        asked: tokens asked for, over all choices.
        start, end: the request was sent; the last byte came.
        stamps: choice index -> when each of its text chunks came.
        texts: choice index -> its text.
        finish: choice index -> finish reason.
        n_prompt, n_generated: the server's usage, or the number of chunks where it sent none.
        n_cached: prompt tokens from the server's cache; None where it does not say.
        error: why the request failed; nothing else of it counts then.
    """

    asked: int
    start: float
    end: float = 0.0
    stamps: dict[int, list[float]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    n_prompt: int = 0
    n_generated: int = 0
    n_cached: int | None = None
    error: str | None = None

    @property
    def first(self) -> float | None:
        """When the first text of any choice came."""
        return min((s[0] for s in self.stamps.values()), default=None)


def percentile(values: Iterable[float], q: float) -> float:
    """The q-th percentile (0-100) by linear interpolation; ``values`` must not be empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _spread(name: str, seconds: Sequence[float]) -> Figures:
    if not seconds:
        return {}
    return {f"{name}_ms_p{q}": round(percentile(seconds, q) * 1e3, 2) for q in (50, 99)}


def measure(calls: Sequence[Call]) -> Figures:
    """The figures of one repeat of one workload.

    ``seconds`` runs from the first send to the last byte; ``itl`` is the gap between the text chunks of a
    choice and ``tpot`` the same per token (a server may put several tokens in a chunk); ``short`` counts
    the calls that ended before the length that was asked for.
    """
    good = [c for c in calls if c.error is None]
    figures: Figures = {"requests": len(calls), "errors": len(calls) - len(good)}
    if not good:
        return figures
    seconds = max(c.end for c in good) - min(c.start for c in good)
    prompt, generated = sum(c.n_prompt for c in good), sum(c.n_generated for c in good)
    figures |= {
        "seconds": round(seconds, 4),
        "prompt_tokens": prompt,
        "generated_tokens": generated,
        "generated_per_s": round(generated / seconds, 2),
        "total_per_s": round((prompt + generated) / seconds, 2),
        "requests_per_s": round(len(good) / seconds, 3),
        "short": sum(c.n_generated < c.asked for c in good),
    }
    cached = [c.n_cached for c in good if c.n_cached is not None]
    if cached:
        figures["cached_tokens"] = sum(cached)
    figures |= _spread("ttft", [c.first - c.start for c in good if c.first is not None])
    gaps = [b - a for c in good for s in c.stamps.values() for a, b in zip(s, s[1:])]
    figures |= _spread("itl", gaps)
    if gaps:
        figures["itl_ms_max"] = round(max(gaps) * 1e3, 2)
    figures |= _spread("tpot", [t for c in good for t in _per_token(c)])
    figures |= _spread("e2e", [c.end - c.start for c in good])
    return figures


def _per_token(call: Call) -> list[float]:
    each = call.n_generated / max(1, len(call.stamps))
    return [(s[-1] - s[0]) / (each - 1) for s in call.stamps.values() if len(s) > 1 and each > 1]


def medians(repeats: Sequence[Figures]) -> Figures:
    """The median of each figure over the repeats that have it."""
    names = dict.fromkeys(name for figures in repeats for name in figures)
    return {name: round(statistics.median(f[name] for f in repeats if name in f), 4) for name in names}


def table(rows: Mapping[str, Mapping[str, float]], columns: Sequence[str], corner: str = "") -> str:
    """A Markdown table, aligned to be read as plain text too; absent figures are blank."""
    lines = [[corner, *columns]]
    for name, figures in rows.items():
        lines.append([name, *(f"{figures[c]:.6g}" if c in figures else "" for c in columns)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join(
        "| " + " | ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))) + " |"
        for line in (lines[0], rule, *lines[1:])
    )
