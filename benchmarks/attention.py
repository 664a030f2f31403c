"""Paged attention of the kernels that this machine uses, beside gathering the cells and torch's own attention.

    python benchmarks/attention.py [--parts decode,dtypes] --output benchmarks/results/attention.json
    python benchmarks/attention.py --output FILE --document docs/attention.md

A run of some parts keeps what the file has of the others; with ``--document`` nothing is measured.
Times are medians in microseconds of one layer; layers rotate over more memory than the caches hold, as in a model, and
the compiled kernel is called as a model's layers call it, without the checks and tensors of a single op before it.
``gbs`` counts the KV that a row has to read (once for all that share it), ``gflops`` what causality leaves to compute.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bough.bench.machine import facts
from bough.device.ops.cells import Cells
from bough.device.ops.groups import SharedGroups
from bough.device.ops.heads import Heads, Scoring
from bough.device.ops.library import AttentionCall, Library
from bough.device.ops.pages import advise_huge_pages
from bough.device.ops.registry import Ops, resolve_ops
from bough.models.base import CacheSpec, KVShape
from bough.worker.kv_pool import KVPool

Tensor = torch.Tensor

HEADS = {"smollm2-135m": (9, 3, 64), "llama-1b": (32, 8, 64), "llama-8b": (32, 8, 128)}
SMALL = HEADS["smollm2-135m"]
ROTATED_BYTES = 128 << 20
MARKS = "<!-- attention: begin -->", "<!-- attention: end -->"


@dataclass
class Problem:
    """``n_rows`` rows of ``length`` tokens, the last ``new`` of which are computed, the first ``shared`` in common."""

    heads: tuple[int, int, int]
    n_rows: int
    length: int
    new: int = 1
    shared: int = 0
    kv_dtype: torch.dtype = torch.bfloat16

    @property
    def kv_tokens(self) -> int:
        return self.shared + self.n_rows * (self.length - self.shared)

    def gflop(self) -> float:
        n_heads, _, dim = self.heads
        pairs = self.new * self.length - self.new * (self.new - 1) // 2
        return 4e-9 * n_heads * dim * pairs * self.n_rows


class Recorder:
    """What the compiled kernel of the ops that are made while it is entered was last called with, to call it again."""

    def __init__(self) -> None:
        self.again: Callable[[], object] | None = None

    def __enter__(self) -> Recorder:
        found = Library.function
        self._patch = patch.object(Library, "function", lambda library, name: self._wrapped(found(library, name), name))
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()

    def _wrapped(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(dtype: int, described: Any) -> Any:
            kept = AttentionCall.from_buffer_copy(described._obj)
            self.again = lambda: function(dtype, ctypes.byref(kept))
            return function(dtype, described)

        return call if name == "paged_attention" else function


class Bench:
    """The tensors of one problem, shuffled over a pool of several layers."""

    def __init__(self, problem: Problem, ops: Ops, recorder: Recorder) -> None:
        p, (n_heads, n_kv_heads, dim) = problem, problem.heads
        self.problem, self.ops, self.recorder = problem, ops, recorder
        spec = CacheSpec(n_kv_heads, dim, dim)
        token = spec.bytes_per_token(p.kv_dtype)
        self.kv_bytes = p.kv_tokens * token
        layers = min(30, -(-ROTATED_BYTES // self.kv_bytes))
        pool = KVPool(KVShape((spec,) * layers, p.kv_dtype), p.n_rows * p.length, torch.device("cpu"))
        self.layers: list[tuple[Cells, Cells]] = list(zip(pool.k, pool.v))
        self.table = torch.arange(p.n_rows * p.length).view(p.n_rows, p.length).int()
        self.table[:, : p.shared] = self.table[0, : p.shared]
        self.q = torch.randn(p.n_rows * p.new, n_heads, dim).bfloat16()
        values, locs = (
            torch.randn(p.n_rows * p.length, (n_heads + 2 * n_kv_heads) * dim).bfloat16(),
            self.table.flatten(),
        )
        turn = torch.cat((torch.ones(1, dim // 2), torch.zeros(1, dim // 2)), -1)
        for k, v in self.layers:
            ops.rope_kv_write(values, turn, torch.zeros_like(locs), locs, k, v, Heads(n_heads, n_kv_heads, dim))
        self.rows = torch.arange(p.n_rows).int()
        self.q_start = torch.arange(p.n_rows + 1).int() * p.new
        self.seq_len = torch.full((p.n_rows,), p.length).int()

    def kernel(self, layer: int, groups: SharedGroups | None = None) -> Tensor:
        k, v = self.layers[layer]
        how = Scoring(self.problem.heads[2] ** -0.5)
        return self.ops.paged_attention(self.q, k, v, self.table, self.rows, self.q_start, self.seq_len, how, groups)

    def timed(self, seconds: float, groups: SharedGroups | None = None) -> float:
        """Median microseconds of the kernel."""
        outs, calls = [], []
        for layer in range(len(self.layers)):
            self.recorder.again = None
            outs.append(self.kernel(layer, groups))  # kept: the calls write there
            calls.append(self.recorder.again or partial(self.kernel, layer, groups))
        return self.time(lambda layer: calls[layer](), seconds)

    def gathered(self, layer: int) -> Tensor:
        """Every row's cells copied out and given to torch, row by row."""
        k, v = self.layers[layer]
        assert isinstance(k, Tensor) and isinstance(v, Tensor)
        p, outs = self.problem, []
        seen = torch.arange(p.length) <= torch.arange(p.length - p.new, p.length)[:, None] if p.new > 1 else None
        for i, locs in enumerate(self.table):
            q = self.q[i * p.new : (i + 1) * p.new].transpose(0, 1)[None]
            keys, values = (cells[locs].transpose(0, 1)[None] for cells in (k, v))
            attend = torch.nn.functional.scaled_dot_product_attention
            outs.append(attend(q, keys, values, attn_mask=seen, enable_gqa=True)[0])
        return torch.cat(outs, 1).transpose(0, 1)

    def group(self) -> SharedGroups:
        n = self.problem.n_rows
        return SharedGroups(torch.tensor([0, n]).int(), self.rows, torch.tensor([self.problem.shared]).int())

    def time(self, run: Callable[[int], object], seconds: float) -> float:
        """Median microseconds."""
        times: list[float] = []
        end, i = time.perf_counter() + seconds, 0
        while len(times) < 5 or time.perf_counter() < end:
            begin = time.perf_counter()
            run(i % len(self.layers))
            times.append(time.perf_counter() - begin)
            i += 1
        return statistics.median(times[1:]) * 1e6

    def figures(self, us: float) -> dict[str, float]:
        return {
            "us": round(us, 1),
            "gbs": round(self.kv_bytes / us / 1e3, 1),
            "gflops": round(self.problem.gflop() / us * 1e6, 1),
        }


def read_rate(big: Tensor) -> float:
    """GB/s of reading what no cache holds, now: it drifts where a machine is shared."""
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        big.sum()
        times.append(time.perf_counter() - begin)
    return big.nbytes / statistics.median(times) / 1e9


def measure(
    problem: Problem, gather: bool, ops: Ops, recorder: Recorder, seconds: float, big: Tensor
) -> dict[str, Any]:
    bench = Bench(problem, ops, recorder)
    found: dict[str, Any] = {
        "heads": list(problem.heads), "rows": problem.n_rows, "length": problem.length, "new": problem.new,
        "kv_dtype": str(problem.kv_dtype).removeprefix("torch."),
    }  # fmt: skip
    rates, kernel = [read_rate(big)], []
    for _ in range(3):
        kernel.append(bench.timed(seconds / 3))
        rates.append(read_rate(big))
    found["kernel"] = bench.figures(statistics.median(kernel))
    found["read_gbs"] = round(statistics.median(rates), 1)
    if problem.shared:
        group = bench.group()
        found["shared"] = problem.shared
        found["cascade"] = bench.figures(bench.timed(seconds, group))
        assert torch.equal(bench.kernel(0, group), bench.kernel(0))
    if gather:
        found["gather_sdpa"] = bench.figures(bench.time(bench.gathered, seconds))
        error = (bench.kernel(0).float() - bench.gathered(0).float()).abs().max()
        assert error < 0.05, error
    shown = {name: value["us"] for name, value in found.items() if isinstance(value, dict)}
    print({k: v for k, v in found.items() if not isinstance(v, dict)}, shown, flush=True)
    return found


def decode() -> list[tuple[Problem, bool]]:
    cases = [(Problem(SMALL, b, t), True) for b in (1, 4, 16, 64) for t in (256, 1024, 4096) if b * t < 2e5]
    cases += [(Problem(heads, b, 2048), True) for heads in list(HEADS.values())[1:] for b in (1, 8)]
    return [*cases, (Problem(HEADS["llama-8b"], 1, 65536), False)]


def dtypes() -> list[tuple[Problem, bool]]:
    """The same problems with every type of cells."""
    shapes = [(SMALL, 1, 256, 1), (SMALL, 16, 300, 1), (SMALL, 16, 1024, 1), (HEADS["llama-8b"], 8, 2048, 1)]
    shapes += [(SMALL, 1, 512, 512), (SMALL, 1, 2048, 2048), (HEADS["llama-8b"], 1, 2048, 512)]
    return [
        (Problem(heads, b, t, new, kv_dtype=kv_dtype), False)
        for heads, b, t, new in shapes
        for kv_dtype in (torch.bfloat16, torch.float16, torch.int8)
    ]


def extend() -> list[tuple[Problem, bool]]:
    cases = [(Problem(SMALL, 1, n, n), True) for n in (256, 512, 2048)]
    cases += [(Problem(SMALL, 1, 2048, n), True) for n in (16, 128, 512)]
    return [*cases, (Problem(HEADS["llama-8b"], 1, 2048, 512), True)]


def cascade() -> list[tuple[Problem, bool]]:
    return [(Problem(SMALL, b, 1580, 1, 1500), False) for b in (2, 4, 16, 64)]


PARTS = {"decode": decode, "dtypes": dtypes, "extend": extend, "cascade": cascade}


def table(result: dict[str, Any]) -> str:
    """Of each problem: what the kernel takes, and how many times as long it takes otherwise."""
    lines = [
        "| rows | tokens | new | shared | heads | cells | us | GB/s | the machine reads | GFLOP/s | beside |",
        "|--:|--:|--:|--:|---|---|--:|--:|--:|--:|---|",
    ]
    plain: dict[tuple[Any, ...], float] = {}  # what the same problem takes with bfloat16 cells
    for found in (row for part in PARTS for row in result.get(part, ())):
        best, other, name = found["kernel"], found.get("gather_sdpa"), "gathered"
        if "cascade" in found:
            best, other, name = found["cascade"], found["kernel"], "each row by itself"
        heads, sizes = "{}/{} of {}".format(*found["heads"]), (found["rows"], found["length"], found["new"])
        cells = found["kv_dtype"]
        if cells == "bfloat16":
            plain[heads, *sizes] = best["us"]
            beside = "" if other is None else f"{name}: {other['us'] / best['us']:.1f}x"
        else:
            beside = f"bfloat16 cells: {plain[heads, *sizes] / best['us']:.2f}x"
        figures = best["us"], best["gbs"], found["read_gbs"], best["gflops"], beside
        lines.append(f"| {' | '.join(map(str, (*sizes, found.get('shared', 0), heads, cells, *figures)))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them: a whole run takes three minutes")
    parser.add_argument("--document", type=Path, help="put the table of --output between the marks of this file")
    arguments = parser.parse_args()
    if arguments.document:
        text = arguments.document.read_text()
        before, rest = text.split(MARKS[0])
        shown = table(json.loads(arguments.output.read_text()))
        arguments.document.write_text(f"{before}{MARKS[0]}\n{shown}\n{MARKS[1]}{rest.split(MARKS[1])[1]}")
        return
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    with Recorder() as recorder:
        ops = resolve_ops("auto")
    big = torch.empty(1 << 26)
    advise_huge_pages(big)
    big.fill_(1)
    result: dict[str, Any] = {"benchmark": "attention", "machine": facts(), "kernels": ops.reason}
    if arguments.output is not None and arguments.output.exists():
        result = json.loads(arguments.output.read_text()) | result
    result["threads"] = arguments.threads
    for part in arguments.parts.split(","):
        result[part] = [measure(*case, ops, recorder, arguments.seconds, big) for case in PARTS[part]()]
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
