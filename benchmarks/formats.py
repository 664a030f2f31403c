"""What each format of weights costs in quality: perplexity of a fixed text with weights rounded to it.

    python -m benchmarks.formats && python scripts/models_page.py > docs/models.md

The layers of the default model are rounded to the nearest value that a format has, without calibration (AWQ, GPTQ and
importance matrices of llama.cpp choose better), decoded, and run in bfloat16; see benchmarks/quality.py. That model
comes as a Q4_1 file, whose grid Q4_1 would find again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from benchmarks.quality import TEXT, Reader, score, windows
from bough.bench.machine import facts
from bough.engine.text import load_text
from bough.weights.embedded import default_model
from bough.weights.loader import Checkpoint, open_checkpoint

OUTPUT = Path(__file__).parent / "results" / "formats.json"

Tensor = torch.Tensor
Round = Callable[[Tensor], Tensor]
"""float32 [N, K] -> the nearest weight that a format has."""

NF4 = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626,
       0.7230, 1.0)  # fmt: skip
"""Levels of nf4 (Dettmers et al. 2023), to four digits."""


def ggml(kind: str) -> Round:
    number = gguf.GGMLQuantizationType[kind]

    def rounded(w: Tensor) -> Tensor:
        blocks = gguf.quants.quantize(w.numpy(), number)
        return torch.from_numpy(gguf.quants.dequantize(blocks, number).astype(np.float32)).reshape(w.shape)

    return rounded


def integers(bits: int, group: int = 0) -> Round:
    """With a scale for each output, or with a scale and a zero for each group of inputs."""

    def rounded(w: Tensor) -> Tensor:
        grouped = w.view(len(w), -1, group or w.shape[1])
        if not group:
            scale = grouped.abs().amax(2, keepdim=True) / ((1 << bits - 1) - 1)
            return ((grouped / scale).round() * scale).view_as(w)
        low, high = grouped.amin(2, keepdim=True).clamp(max=0), grouped.amax(2, keepdim=True).clamp(min=0)
        scale = ((high - low) / ((1 << bits) - 1)).half().float()
        zero = (-low / scale).round()
        return (((grouped / scale + zero).round().clamp(0, (1 << bits) - 1) - zero) * scale).view_as(w)

    return rounded


def fp8(n_out: int = 0, n_in: int = 0) -> Round:
    """With a scale for each tile of so many outputs and inputs; 0: all of them."""

    def rounded(w: Tensor) -> Tensor:
        rows, columns = n_out or len(w), n_in or w.shape[1]
        padded = torch.nn.functional.pad(w, (0, -w.shape[1] % columns, 0, -len(w) % rows))
        largest = padded.view(len(padded) // rows, rows, -1, columns).abs().amax((1, 3))
        spread = largest.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: len(w), : w.shape[1]]
        scale = spread / torch.finfo(torch.float8_e4m3fn).max
        return (w / scale).to(torch.float8_e4m3fn).float() * scale

    return rounded


def nf4(w: Tensor) -> Tensor:
    levels = torch.tensor(NF4)
    blocks = w.reshape(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    between = (levels[1:] + levels[:-1]) / 2
    return (levels[torch.bucketize(blocks / scale, between)] * scale).view_as(w)


FORMATS: dict[str, Round] = {
    "GGUF Q8_0": ggml("Q8_0"),
    "GGUF Q5_1": ggml("Q5_1"),
    "GGUF Q5_0": ggml("Q5_0"),
    "GGUF Q4_0": ggml("Q4_0"),
    "MXFP4": ggml("MXFP4"),
    "compressed-tensors, bitsandbytes: 8 bits by output": integers(8),
    "AWQ, GPTQ, compressed-tensors: 4 bits, groups of 64": integers(4, 64),
    "FP8 by weight": fp8(),
    "FP8 by output": fp8(1),
    "FP8 in blocks of 128 x 128": fp8(128, 128),
    "bitsandbytes nf4": nf4,
}


@dataclass(frozen=True, slots=True)
class Rounded:
    """A :class:`bough.device.layers.source.TensorSource` whose layers are rounded."""

    checkpoint: Checkpoint
    round: Round

    @property
    def config(self) -> dict[str, Any]:
        return self.checkpoint.config

    def names(self) -> list[str]:
        return self.checkpoint.names()

    def tensor(self, name: str, dtype: torch.dtype | None = None, rows: slice | None = None) -> Tensor:
        weight = self.checkpoint.tensor(name)
        if name.endswith("_proj.weight"):
            weight = self.round(weight)
        return weight.to(dtype or torch.float32)

    def blocks(self, name: str, rows: slice | None = None) -> None:
        return None

    def shape(self, name: str) -> None:
        return None


def main() -> None:
    path = default_model()
    checkpoint = open_checkpoint(path)
    tokenizer, _ = load_text(checkpoint.tokenizer_source)
    text = list(windows(tokenizer.encode_plain(TEXT.read_text())))
    found = {}
    with torch.inference_mode():
        exact = Reader(checkpoint, "none", tokenizer.vocab_size)
        references = [exact.logits(window)[:-1].log_softmax(-1) for window in text]
        found["bfloat16"] = score(exact, text, references)
        for name, rounding in FORMATS.items():
            found[name] = score(Reader(Rounded(checkpoint, rounding), "none", tokenizer.vocab_size), text, references)
            print(name, found[name], flush=True)
    checkpoint.close()
    whole = {"benchmark": "formats", "machine": facts(), "model": path.stem, "results": found}
    OUTPUT.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
