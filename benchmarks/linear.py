"""Linear layers alone: our kernels beside oneDNN's and torch's, and beside what the machine can read and multiply.

    python benchmarks/linear.py [--output FILE] [--threads N] [--rows LIST] [--shapes LIST] [--kinds LIST]
    python benchmarks/linear.py --isa avx2 --output FILE-avx2.json
    python benchmarks/linear.py --output FILE --document docs/quantization.md

Each figure is the fastest of repeated calls, for which all forms take turns; the calls go over copies of the weight
that together exceed the last cache, as the layers of a model do. Our own weights lie on large pages, as the engine lays
them. GB/s counts the bytes of the weight once, GFLOP/s two per weight and row. A run of some shapes, kinds or rows
keeps what the file has of the others; with ``--document`` nothing is measured. ``--isa`` measures our kernels of an
instruction set that is not the machine's best, beside each other; the document has a table of all files FILE-*.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bough.bench.machine import facts
from bough.device.ops.library import load
from bough.device.ops.packed import GROUP, PAIRED, SUPER, Kind, PackedWeight, pack_bf16, pack_groups, pack_int8
from bough.device.ops.pages import Arena
from bough.device.ops.quantise import quantise
from bough.device.ops.registry import Ops, resolve_ops
from bough.device.platform.cpu import spare_onednn
from bough.device.quant.packed import join

Tensor = torch.Tensor
Multiply = Callable[[Tensor], Tensor]

SHAPES = ("576x576", "576x960", "576x3072", "1536x576", "576x49152", "2048x8192", "8192x2048", "2048x49152")
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 2048)
ROUNDED = {
    "int8": "`int8`", "w8a8": "8 bits, a scale per output",
    "q8": "Q8_0", "q4": "Q4_0", "q4_min": "Q4_1", "q4_k": "Q4_K, `int4`", "q6_k": "Q6_K",
    "q4/64": "4 bits, groups of 64", "q4/128": "GPTQ, groups of 128", "q4_zero/128": "AWQ, groups of 128",
}  # fmt: skip
OURS = ("bf16", *ROUNDED)
KINDS = ("onednn", *OURS, "torch int8", "torch int4")
"""Behind a stroke: inputs that share a scale, where it is not 32."""
MARKS = "<!-- linear: begin -->", "<!-- linear: end -->"
ISA_MARKS = "<!-- linear isas: begin -->", "<!-- linear isas: end -->"
CACHE_BYTES = 80 << 20
TURNS = 12
"""That the forms take with each other, as a shared machine is now faster, now slower."""
SECONDS = 0.02
"""Of repeating each measurement, in each turn."""


def fastest(calls: list[Callable[[], Any]], seconds: float = SECONDS) -> float:
    """Seconds of the fastest call, of all of them in turns for so long, or of one."""
    best, end = float("inf"), time.perf_counter() + seconds
    for call in itertools.cycle(calls):
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return best
    raise ValueError("no calls")


def limits() -> dict[str, float]:
    """GB/s of reading, GFLOP/s of bfloat16 and GOP/s of int8 products, all by torch; of float32 instead of bfloat16
    where no instruction multiplies that."""
    big = torch.ones(64 << 20)
    read = big.nbytes / fastest([lambda: big.sum()], 1.0) / 1e9
    n = 2048
    x, w = torch.randn(n, n).bfloat16(), torch.randn(n, n).bfloat16()
    if multiplies_bf16():
        call = partial(onednn, torch.ops.mkldnn._reorder_linear_weight(w, n), x)
    else:
        call = partial(torch.mm, x.float(), w.float())
    bf16 = 2 * n**3 / fastest([call], 1.0) / 1e9
    a, b = torch.ones(n, n, dtype=torch.int8), torch.ones(n, n, dtype=torch.int8)
    int8 = 2 * n**3 / fastest([lambda: torch._int_mm(a, b)], 1.0) / 1e9
    return {"read_gb_s": read, "bf16_gflop_s": bf16, "int8_gop_s": int8}


def multiplies_bf16() -> bool:
    """Whether oneDNN packs weights in bfloat16 here."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def onednn(packed: Tensor, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return out


def contestant(kind: str, ops: Ops, k: int, n: int) -> tuple[Callable[[], Multiply], int]:
    """A function that makes another copy of the layer, and the bytes of its weight."""
    weight = (torch.randn(n, k) * 0.02).bfloat16()
    if kind == "onednn":
        return lambda: partial(onednn, torch.ops.mkldnn._reorder_linear_weight(weight, 16)), weight.nbytes
    if kind == "torch int8":
        q, scale = torch.zeros(n, k, dtype=torch.int8), torch.ones(n).bfloat16()
        return lambda: _weight_only(torch._weight_int8pack_mm, q.clone(), scale), q.nbytes
    if kind == "torch int4":
        q4 = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.zeros(n, k, dtype=torch.int32), 1)
        scales = torch.ones(k // 32, n, 2).bfloat16()
        mm = torch.ops.aten._weight_int4pack_mm_for_cpu
        return lambda: partial(_int4, mm, q4.clone(), scales), q4.nbytes + scales.nbytes
    packed, arena = ops.suited(example(kind, weight)), Arena()
    return lambda: ops.packed_linear(join([packed], arena)[0], None), packed.nbytes


def _weight_only(mm: Any, q: Tensor, scale: Tensor) -> Multiply:
    return lambda x: mm(x, q, scale)


def _int4(mm: Any, q: Tensor, scales: Tensor, x: Tensor) -> Tensor:
    out: Tensor = mm(x, q, 32, scales)
    return out


def example(kind: str, weight: Tensor) -> PackedWeight:
    n, k = weight.shape
    if kind == "bf16":
        return pack_bf16(weight)
    if kind == "int8":
        return quantise(Kind.ROTATED, weight)
    q = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    if kind == "w8a8":
        return pack_int8(q, torch.ones(n))
    name, _, group = kind.partition("/")
    packed, inputs = Kind[name.upper()], int(group or GROUP)
    groups = -(-k // (256 if packed in SUPER else inputs))
    size = (n, groups, 2) if packed in PAIRED else (n, groups)
    sub = torch.ones((n, -(-k // 32), 2), dtype=torch.uint8) if packed in SUPER else None
    return pack_groups(packed, q, torch.ones(size).half(), sub, inputs)


def measure(ops: Ops, shapes: list[str], kinds: list[str], rows: list[int]) -> list[dict[str, Any]]:
    results = []
    for shape in shapes:
        k, n = map(int, shape.split("x"))
        layers, sizes = {}, {}
        for kind in kinds:
            make, sizes[kind] = contestant(kind, ops, k, n)
            layers[kind] = [make() for _ in range(max(1, min(256, CACHE_BYTES // sizes[kind])))]
        best = {(kind, m): float("inf") for kind in layers for m in rows}
        for m in rows:
            x = torch.randn(m, k).bfloat16()
            for kind in [*layers] * TURNS:
                best[kind, m] = min(best[kind, m], fastest([partial(layer, x) for layer in layers[kind]]))
        for kind, nbytes in sizes.items():
            for m in rows:
                seconds = best[kind, m]
                row = {"shape": shape, "kind": kind, "rows": m, "us": seconds * 1e6, "gb_s": nbytes / seconds / 1e9,
                       "gflop_s": 2 * m * n * k / seconds / 1e9}  # fmt: skip
                results.append(row)
            shown = "  ".join(f"{r['us']:.0f}us {r['gb_s']:.0f} {r['gflop_s']:.0f}" for r in results[-len(rows) :])
            print(f"{shape:>10} {kind:10} {shown}", flush=True)
    return results


def table(results: list[dict[str, Any]]) -> str:
    """How many times faster than the better one of both bf16 products each form is: at worst, and in the median of the
    shapes that it can hold."""
    gains = all_gains(results)
    known = {kind: name for kind, name in ROUNDED.items() if any(of == kind for _, of in gains)}
    return lines({name: {m: gains[m, kind] for m, of in gains if of == kind} for kind, name in known.items()})


def isa_table(files: list[dict[str, Any]]) -> str:
    """The same for instruction sets, of all forms."""
    found: dict[str, dict[int, list[float]]] = {}
    for file in files:
        of = found.setdefault(f"`{file['isa']}`", {})
        for (m, _), gains in all_gains(file["results"]).items():
            of.setdefault(m, []).extend(gains)
    return lines(found)


def all_gains(results: list[dict[str, Any]]) -> dict[tuple[int, str], list[float]]:
    """How many times faster than bfloat16, for each number of rows and form: in every shape."""
    times = {(r["shape"], r["rows"], r["kind"]): r["us"] for r in results}
    gains: dict[tuple[int, str], list[float]] = {}
    for (shape, m, kind), us in times.items():
        if kind in ROUNDED:
            wide = min(times[shape, m, form] for form in ("onednn", "bf16") if (shape, m, form) in times)
            gains.setdefault((m, kind), []).append(wide / us)
    return gains


def lines(found: dict[str, dict[int, list[float]]]) -> str:
    """A table of the least and the median of gains, by name and number of rows."""
    rows = sorted({m for of in found.values() for m in of})
    shown = [f"| rows | {' | '.join(map(str, rows))} |", "|---|" + "--:|" * len(rows)]
    for name, of in found.items():
        cells = (f"{min(of[m]):.2f} / {statistics.median(of[m]):.2f}" for m in rows)
        shown.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(shown)


def put(text: str, marks: tuple[str, str], what: str) -> str:
    before, rest = text.split(marks[0])
    return f"{before}{marks[0]}\n{what}\n{marks[1]}{rest.split(marks[1])[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the result here, as JSON")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--kinds", help="default: all; with --isa, ours")
    parser.add_argument("--isa", help="of our kernels (default: the machine's best)")
    parser.add_argument("--document", type=Path, help="put the tables of --output between the marks of this file")
    arguments = parser.parse_args()
    if arguments.document:
        text = put(arguments.document.read_text(), MARKS, table(json.loads(arguments.output.read_text())["results"]))
        isas = sorted(arguments.output.parent.glob(f"{arguments.output.stem}-*.json"))
        text = put(text, ISA_MARKS, isa_table([json.loads(path.read_text()) for path in isas]))
        arguments.document.write_text(text)
        return
    spare_onednn()
    torch.set_num_threads(arguments.threads)
    library, kinds = load().library, KINDS if multiplies_bf16() else OURS
    if library is None:
        raise SystemExit("there are no kernels: see `bough doctor`")
    if arguments.isa:
        library.set_isa(arguments.isa)
        kinds = OURS
    with torch.inference_mode():
        found = limits()
        print("  ".join(f"{name} {value:.0f}" for name, value in found.items()))
        print(f"rows {arguments.rows}: microseconds, GB/s, GFLOP/s")
        rows = [int(m) for m in arguments.rows.split(",")]
        chosen = arguments.kinds.split(",") if arguments.kinds else [*kinds]
        results = measure(resolve_ops("auto"), arguments.shapes.split(","), chosen, rows)
        found_after = limits()
    if arguments.output:
        done = {(r["shape"], r["kind"], r["rows"]) for r in results}
        before = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
        if before.get("threads", arguments.threads) != arguments.threads:
            raise SystemExit(f"{arguments.output} was measured with {before['threads']} threads")
        kept = [r for r in before.get("results", ()) if (r["shape"], r["kind"], r["rows"]) not in done]
        results = kept + results
        whole = {"benchmark": "linear", "machine": facts(), "isa": library.isa(), "threads": arguments.threads,
                 "limits": found, "limits_after": found_after, "results": results}  # fmt: skip
        arguments.output.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
