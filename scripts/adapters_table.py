"""Prints the table of docs/adapters.md from what ``python -m benchmarks.adapters --output`` has measured."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
WEIGHTS = {
    "adapters-1b.json": "1B, bfloat16",
    "adapters-bf16.json": "135M, bfloat16",
    "adapters-q4.json": "135M, Q4_1",
}


def table() -> list[str]:
    """The lines."""
    lines = ["| weights | rows | tokens/s | with 8 adapters | share |", "|---|--:|--:|--:|--:|"]
    for file, weights in WEIGHTS.items():
        for row in json.loads((RESULTS / file).read_text())["results"]:
            cells = [weights, row["rows"], f"{row['base']:.0f}", f"{row['adapters']:.0f}", f"{row['ratio']:.2f}"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
