"""Whether the kernels and the engine are right on this device, before anything is measured."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.play import Ask, Engine, Features, random_ids
from bough.base.params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/device/triton", "--deselect", "tests/device/triton/test_ahead.py", "-m", "not slow")
LENIENT = ("--continue-on-collection-errors",)
"""A file that does not load here fails alone."""


def run_tests(arguments: Sequence[str], seconds: float, processes: int) -> dict[str, Any]:
    """The tests of the kernels, which run on the GPU where there is one; what does not end in time counts as failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *LENIENT, *arguments]
    if processes > 1:
        command += ["-n", str(processes)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
        text = done.stdout
    except subprocess.TimeoutExpired as error:
        text = f"{(error.stdout or b'').decode()}\nout of time"
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error|errors|skipped)", last)}
    failed = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {"name": "kernels", "counts": counts, "ok": counts.keys() <= {"passed", "skipped"} and bool(counts),
            "said": failed[:20] or [last]}  # fmt: skip


WAYS = {
    "one at a time": Features(radix=False, cascade=False, overlap=False),
    "no overlap": Features(overlap=False),
    "no radix": Features(radix=False),
    "no cascade": Features(cascade=False),
    "small chunks": Features(step_tokens=64),
}


def prompts(vocab_size: int, tiny: bool) -> list[Ask]:
    """Stems that requests share, and duplicates; greedy and drawn."""
    rng = np.random.default_rng(7)
    stems = [random_ids(rng, n, vocab_size) for n in ((5, 11) if tiny else (40, 300, 700))]
    asks = []
    for i in range(4 if tiny else 24):
        more = random_ids(rng, int(rng.integers(0, 6)), vocab_size)
        params = SamplingParams(temperature=0.8, top_p=0.9, seed=i, ignore_eos=True) if i % 3 == 2 else None
        prompt = np.concatenate((stems[i % len(stems)], more))
        asks.append(Ask(prompt, 4 if tiny else 48, params) if params else Ask(prompt, 4 if tiny else 48))
    return asks


def equivalence(captured: Engine, eager: Engine, vocab_size: int, tiny: bool) -> Iterator[dict[str, Any]]:
    """The same answers whatever the engine does on the way, in float32 from the same random weights."""
    asks = prompts(vocab_size, tiny)
    alone = [eager.play([ask], WAYS["one at a time"]).told[0].tokens for ask in asks]
    ways = [("all", captured, Features()), ("no graphs", eager, Features())]
    ways += [(name, captured, features) for name, features in WAYS.items() if name != "one at a time"]
    for name, engine, features in ways:
        told = engine.play(asks, features).told
        wrong = sum(bool(answer.error) or answer.tokens != right for answer, right in zip(told, alone))
        yield {"name": f"equivalence: {name}", "ok": not wrong, "said": [f"{wrong} of {len(asks)} differ"]}
