"""One picture per model: every contender's wall time as a multiple of the floor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.peers.rows import ROWS

COLORS = {"bough": "#3a7d44", "vllm": "#30638e", "llamacpp": "#d1793b", "ik": "#8d5a97", "openvino": "#7f8c8d"}

CUT = 12.0
"""Bars end here; the figure beside them goes on."""


def against_floors(rows: Mapping[str, Mapping[str, float]], title: str, path: Path) -> None:
    """Draw horizontal bars, a group for each row of contender -> multiple of the floor, least first, as SVG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    bars = [(name, contender, factor) for name, row in rows.items() for contender, factor
            in sorted(row.items(), key=lambda item: item[1])]  # fmt: skip
    names = list(rows)
    at = [i + 0.8 * names.index(name) for i, (name, _, _) in enumerate(bars)]
    figure = Figure(figsize=(8.0, 1.0 + 0.24 * (len(bars) + len(names))), layout="constrained")
    axis = figure.add_subplot()
    colors = [COLORS.get(contender.split()[0].split("@")[0], "#b0a999") for _, contender, _ in bars]
    axis.barh(at, [min(factor, CUT) for _, _, factor in bars], color=colors, height=0.8)
    for y, (_, _, factor) in zip(at, bars):
        axis.text(min(factor, CUT) + 0.05, y, f"{factor:.2f}", va="center", fontsize=7)
    axis.set_yticks(at, [f"{ROWS[n].work}  {contender}" for n, contender, _ in bars], fontsize=7)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.invert_yaxis()
    axis.set_xlim(0, CUT + 1)
    axis.set_xlabel("wall time / floor (less is better)")
    axis.set_title(title)
    axis.spines[["top", "right"]].set_visible(False)
    with rc_context({"svg.hashsalt": title}):  # else the same picture has other ids each time
        figure.savefig(path, metadata={"Date": None})
