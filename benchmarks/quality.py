"""What rounding weights, keys and values costs: perplexity of a fixed text, and how often the greedy choice stays.

    python benchmarks/quality.py [MODEL ...] [--output FILE] [--document docs/quantization.md]

Every way to hold them reads the same text in windows of 512 tokens. Its logits are compared with those of the
model in bfloat16, position by position: perplexity, the share of positions whose most likely token is the same, and
the mean Kullback-Leibler divergence in nats.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from bough.bench.machine import facts
from bough.device.attention.base import AttentionBatch
from bough.device.attention.paged import PagedAttention
from bough.device.layers.context import LayerContext
from bough.device.layers.source import TensorSource
from bough.device.ops.library import load
from bough.device.ops.registry import resolve_ops
from bough.device.quant.scheme import resolve_scheme
from bough.engine.text import load_text
from bough.models.registry import model_class
from bough.weights.fetch import resolve as fetch
from bough.weights.loader import open_checkpoint
from bough.worker.build import KV_DTYPES
from bough.worker.kv_pool import KVPool

TEXT = Path(__file__).parent / "data" / "word_problems.txt"
WINDOW = 512
WAYS = (("none", "auto"), ("auto", "auto"), ("int8", "auto"), ("int4", "auto"), ("none", "int8"), ("int8", "int8"))
"""Of weights, and of keys and values."""

COLUMNS = ("weights", "keys and values", "perplexity", "against bf16", "same greedy token", "divergence")
MARKS = "<!-- quality: begin -->", "<!-- quality: end -->"


class Weights(TensorSource, Protocol):
    """Parameters, and the config that they belong to; an open checkpoint is one."""

    @property
    def config(self) -> dict[str, Any]: ...


class Reader:
    """A model whose logits of whole windows can be asked for."""

    def __init__(self, checkpoint: Weights, quantize: Any, n_ids: int, kv_dtype: str = "auto") -> None:
        ops, dtype, device = resolve_ops("auto"), torch.bfloat16, torch.device("cpu")
        self._attention = PagedAttention(ops)
        scheme = resolve_scheme(quantize, ops, dtype)
        context = LayerContext(checkpoint, ops, scheme, self._attention, dtype, device)
        make = model_class(checkpoint.config["model_type"])
        self._model = make(checkpoint.config, context, n_ids, WINDOW + 1)
        shape = self._model.kv_shape
        if kv_dtype != "auto":
            shape = replace(shape, dtype=KV_DTYPES[kv_dtype])
        self._pool = KVPool(shape, WINDOW, device)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] int32 -> [T, V] float32."""
        n = len(ids)
        span = torch.arange(n, dtype=torch.int32)
        ends = torch.tensor([0, n], dtype=torch.int32)
        row = torch.zeros(1, dtype=torch.int32)
        table = torch.arange(WINDOW, dtype=torch.int32)[None]
        self._attention.plan(AttentionBatch(table, row, ends, ends[1:], span, span))
        return self._model.logits(self._model.forward(ids, self._pool.k, self._pool.v)).float()


def windows(ids: list[int]) -> Iterator[torch.Tensor]:
    for first in range(0, len(ids) - 1, WINDOW):
        yield torch.tensor(ids[first : first + WINDOW], dtype=torch.int32)


def measure(path: Path) -> list[dict[str, Any]]:
    checkpoint = open_checkpoint(path)
    tokenizer, _ = load_text(checkpoint.tokenizer_source)
    ids = tokenizer.encode_plain(TEXT.read_text())
    results = []
    with torch.inference_mode():
        exact = Reader(checkpoint, "none", tokenizer.vocab_size)
        references = [exact.logits(window)[:-1].log_softmax(-1) for window in windows(ids)]
        for way, kv in WAYS:
            reader = Reader(checkpoint, way, tokenizer.vocab_size, kv)
            results.append({"weights": way, "kv": kv, **score(reader, list(windows(ids)), references)})
            print(results[-1], flush=True)
    checkpoint.close()
    return results


def score(reader: Reader, text: list[torch.Tensor], references: list[torch.Tensor]) -> dict[str, Any]:
    """Perplexity of ``text``, and the distance from the log-probabilities ``references``."""
    loss = same = divergence = 0.0
    n = 0
    for window, reference in zip(text, references):
        found = reader.logits(window)[:-1].log_softmax(-1)
        targets = window[1:].long()[:, None]
        n += len(targets)
        loss -= float(found.gather(1, targets).double().sum())
        same += float((found.argmax(-1) == reference.argmax(-1)).sum())
        divergence += float((reference.exp() * (reference - found)).sum(-1).double().sum())
    perplexity = float(torch.tensor(loss / n, dtype=torch.float64).exp())
    return {"tokens": n, "perplexity": perplexity, "same": same / n, "divergence": divergence / n}


def table(results: list[dict[str, Any]]) -> str:
    base = results[0]["perplexity"]
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|--:|--:|--:|--:|"]
    for r in results:
        name = "bfloat16 (`none`)" if r["weights"] == "none" else f"`{r['weights']}`"
        cells = (
            "bfloat16" if r["kv"] == "auto" else f"`{r['kv']}`",
            f"{r['perplexity']:.3f}",
            f"{r['perplexity'] / base - 1:+.2%}",
            f"{r['same']:.1%}",
            f"{r['divergence']:.4f}",
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", help="GGUF files, folders or hub ids, beside the embedded default model")
    parser.add_argument("--output", type=Path, help="write the result here, as JSON")
    parser.add_argument("--document", type=Path, help="put the table between the marks of this file")
    arguments = parser.parse_args()
    found = {}
    for model in [None, *arguments.model]:
        path = fetch(model, None)
        found[path.stem] = measure(path)
        print(table(found[path.stem]))
    if arguments.output:
        library = load().library
        whole = {"benchmark": "quality", "machine": facts(), "isa": library.isa() if library else None, "models": found}
        arguments.output.write_text(json.dumps(whole, indent=1) + "\n")
    if arguments.document:
        text = arguments.document.read_text()
        before, rest = text.split(MARKS[0])
        after = rest.split(MARKS[1])[1]
        shown = "\n\n".join(f"{name}, {r[0]['tokens']} tokens:\n\n{table(r)}" for name, r in found.items())
        arguments.document.write_text(f"{before}{MARKS[0]}\n{shown}\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
