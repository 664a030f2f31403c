"""What was found, as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

GOALS = {
    ("llama-3.1-8b", 1): 0.80, ("llama-3.1-8b", 8): 0.75, ("llama-3.1-8b", 64): 0.65, ("llama-3.1-8b", 256): 0.60,
}  # fmt: skip
"""Model and rows that decode -> the share of the roofline that is meant."""

PREFILL_GOAL = 0.60

STALLED_GOAL = "gpu_stalled under 0.02"

WORTH_GOALS = {("rag", "no radix"): "worth 1.5", ("bestof", "no radix"): "worth 1.5"}
"""Workload and the feature that it goes without -> what the feature is meant to be worth."""


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown of rows with the same keys, or fewer."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(_shown(row.get(column, "")) for column in columns) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _shown(value: Any) -> str:
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


def markdown(result: dict[str, Any]) -> str:
    """Everything in ``result``, section by section."""
    limits = result.get("limits")
    text = [f"# {result['device']}", ""]
    if limits:
        text.append(
            f"copy {limits['bandwidth'] / 1e9:.0f} GB/s, bfloat16 products {limits['flops'] / 1e12:.0f} TFLOP/s"
        )
    for name, rows in result["sections"].items():
        text += ["", f"## {name}", "", table(rows) if rows else "nothing"]
    for title, lines in (("failed", result["failed"]), ("left out", result["left_out"])):
        if lines:
            text += ["", f"## {title}", "", *(f"- {line}" for line in lines)]
    return "\n".join(text) + "\n"
