"""The workloads of ``bough bench serve`` and prompts alone. Imports nothing that a peer's environment lacks."""

from __future__ import annotations

from bough.bench.workloads import WORKLOADS, Workload, independent

PREFILL = {
    "prefill256": Workload(
        "prompts alone, one at a time, 256 tokens", independent,
        {"requests": 8, "prompt": 256, "out": 1, "concurrency": 1}, {"requests": 2},
    ),
    "prefill2048": Workload(
        "prompts alone, one at a time, 2,048 tokens", independent,
        {"requests": 4, "prompt": 2048, "out": 1, "concurrency": 1}, {"requests": 1},
    ),
}  # fmt: skip

WORK = {**WORKLOADS, **PREFILL}
"""Name -> workload."""
