"""Prints docs/models.md from the registry, or with --measure first compares architectures with transformers.

    python scripts/models_page.py [--measure [MODEL_TYPE ...]] > docs/models.md

Measuring needs the tests' tiny checkpoints and takes, for all of them, a few minutes; its figures are kept in
benchmarks/results/parity.json, and the page is made of those.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from bough.device.quant.blocks import PACKERS
from bough.models.decoder import Decoder
from bough.models.registry import MODELS
from bough.weights.formats import FORMATS
from bough.weights.gguf_families import DEEPSEEK_V3, FAMILIES, MIXTRAL
from bough.weights.quantized import METHODS

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "benchmarks" / "results" / "parity.json"
QUALITY_FIGURES = ROOT / "benchmarks" / "results" / "formats.json"

SAME_FILES = {"mistral": "llama", "gemma3": "gemma3_text", "llama4": "llama4_text"}
"""Architectures whose GGUF files load as another one, which computes the same."""

INTRODUCTION = """# Models

An architecture is one file in `bough/models`, named like the `model_type` of its Hugging Face config. Each of them
is compared with `transformers` on random checkpoints (`tests/models/test_parity.py`): logits in float32 within 1e-4
of the largest for prompts in one piece and in chunks, single steps, rows of different lengths side by side, pages
of 1 and of 16 tokens, after a hit in the tree, and after a retraction; 64 greedy tokens.
`tests/models/test_gguf.py` does it with GGUF files. The columns "float32" and "bfloat16" are the largest distance
of a row of log-probabilities from those of `transformers` in float32, as a share of the row, over 40 tokens of such
a model with kernels for this machine. Weights of random models are large, and of random experts that score nearly
alike a rounding chooses: real weights are nearer.

The column "GGUF" has what files call the architecture; safetensors are read of all. "tree, chunks, grammar": prompts
are taken from the tree and computed in chunks, and answers are constrained. "LoRA": rows have [adapters](adapters.md).
"int8, int4": linear layers are [rounded](quantization.md) when they are loaded. Where all layers run as one call, a
step has no overhead between them.

Models with LongRoPE (Phi-3 with 128k) have factors for short and for long sequences. `transformers` goes over to the
others, and computes all keys anew, when a sequence passes the original context; here `--context-length` decides for all
sequences, as their keys are shared: up to the original context (4096) they are short, beyond it long.
"""

FALLBACK = """## Others

Any other causal language model that `transformers` can build runs through it, with attention and KV of this engine:
`pip install 'bough[transformers]'`, and the log says that it is slower. That asks for layers whose attention goes
through transformers' attention interface and sees what is before it, all or a window; whatever else there is is refused
with the reason. Weights load as `transformers` loads them, so mixtures of experts may be stored in any way that it
knows. There are no adapters for such models, and code from model folders is never run. `tests/models/test_fallback.py`
compares fourteen with `transformers`, among them starcoder2, olmo3, gpt_neox, phimoe, jetmoe and glm4_moe. [Add your
model](add_your_model.md) makes it fast.
"""

FORMATS_TEXT = """## Weights

- **safetensors**: one file, shards with an index. `.bin` and `.pt` files are refused, with how to convert them.
- **GGUF**: the architectures with a name in the column "GGUF", every block type of the format.
  Multiplied as integers with the very values: {kept}. Decoded to the dtype of the model, which a line of the log
  says: {decoded}. Files of `bert` hold RoBERTa, too. Those of BERT classifiers lack the pooler that scores go
  through, as llama.cpp leaves it out, and are refused.
- **Quantised folders** (`quantization_config`): {methods}. AWQ with 4 bits; GPTQ with 2, 3, 4 and 8, also with inputs
  in the order of their importance; AutoRound in either packing, one number of bits; compressed-tensors with integers of
  4 and 8 bits, by weight, output or group, with zeros or without, with 8-bit floats by weight, output or block, and
  NVFP4; FP8 (also of fbgemm and Model Optimizer) with scales of weights, outputs and blocks; bitsandbytes with 8 bits,
  nf4 and fp4. Integers are multiplied as they are where groups of inputs are in order and of 32, 64 or multiples of
  128; all else is decoded. Scales for a rounded cache are left alone: `--kv-dtype` has its own. Refused: AWQ in the
  layout for GEMV, Marlin's layouts, 2:4 sparsity, Model Optimizer's NVFP4, compressed-tensors with 2 or 3 bits or MX
  formats, hqq.

## Tokenizers

`tokenizer.json`; without one sentencepiece's `.model` (unigram and bpe) and tiktoken's files (`cl100k_base`,
`o200k_base`, `qwen`, Llama 3's `tokenizer.model`); in GGUF files the kinds gpt2, llama, t5 and bert. Ids equal those of
the libraries on a corpus of many scripts, emoji, code and broken pieces (`tests/text`); not exact are sentencepiece
models that fold case (`nmt_nfkc_cf`) where marks enclose letters, those that normalise (`nmt_nfkc`, `nfkc`) where a
mark or a joiner follows a character that is normalised (it is lost), those that remove spaces where a text begins or
ends with a literal `▁`, and those whose user-defined symbols are ordinary words or runs of spaces. Chat templates come
from `tokenizer_config.json`, `chat_template.jinja` or the GGUF file.
"""

QUALITY = """## What formats cost

Perplexity of `benchmarks/data/word_problems.txt` with the layers of the default model rounded to the nearest value that
a format has (`python -m benchmarks.formats`). Nothing is calibrated: files made with AWQ, GPTQ or an importance matrix
are better than the row of their format. The model is small and comes in Q4_1, which "bfloat16" decodes; other grids of
few bits are laid over that one, so their rows are worse than of weights that were never rounded, that of Q5_1 most: it
has 32 levels where the model's own 16 span the same range. Rows of 576 inputs have no K formats, of blocks of 256.
"""


def page(figures: dict[str, Any]) -> str:
    gguf = {}
    for name, family in [*FAMILIES.items(), ("llama", MIXTRAL), ("deepseek2", DEEPSEEK_V3)]:
        gguf[family.model_type] = name
    gguf |= {name: gguf[same] for name, same in SAME_FILES.items()}
    features = ["tree, chunks, grammar", "LoRA", "int8, int4", "one call"]
    lines = [
        f"| model_type | architecture | GGUF | {' | '.join(features)} | float32 | bfloat16 |",
        "|---|---|---|---|---|---|---|--:|--:|",
    ]
    for name in MODELS.names():
        model: Any = MODELS.get(name)
        told = (sys.modules[model.__module__].__doc__ or "").split("\n", 1)[0].split(":")[0].rstrip(".")
        found = figures.get(name, {})
        distances = [f"{found[key]:.1e}" if key in found else "" for key in ("float32", "bfloat16")]
        kind = "" if issubclass(model, Decoder) else " (embeds)"
        generates = issubclass(model, Decoder)
        has = [generates, generates, generates, bool(found.get("one_call"))]
        marks = ["yes" if feature else "" for feature in has]
        cells = [f"`{name}`", told + kind, gguf.get(name, ""), *marks, *distances]
        lines.append(f"| {' | '.join(cells)} |")
    kept = list(PACKERS)
    decoded = [f.name for f in FORMATS.values() if f.name not in PACKERS and f.values > 1]
    formats = FORMATS_TEXT.format(kept=", ".join(kept), decoded=", ".join(decoded), methods=", ".join(METHODS))
    return "\n".join([INTRODUCTION, *lines, "", FALLBACK, formats, QUALITY, *quality()]).rstrip()


def quality() -> list[str]:
    """The lines of the table of what formats cost."""
    measured = json.loads(QUALITY_FIGURES.read_text())["results"]
    base = measured["bfloat16"]["perplexity"]
    lines = ["| weights of the layers | perplexity | against bfloat16 | same greedy token |", "|---|--:|--:|--:|"]
    for name, row in measured.items():
        lines.append(f"| {name} | {row['perplexity']:.3f} | {row['perplexity'] / base - 1:+.2%} | {row['same']:.1%} |")
    return lines


def measure(model_types: Collection[str]) -> dict[str, Any]:
    """Distances of every case of these architectures, or of all that generate; the largest of an architecture's."""
    import torch

    sys.path.insert(0, str(ROOT))
    from tests.driving import make_driver
    from tests.models.parity import CASES, WHOLE, distance, ids_of, make_checkpoint

    found: dict[str, Any] = {}
    for name, case in CASES.items():
        if model_types and case.model_type not in model_types:
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = make_checkpoint(case, Path(folder))
            row = found.setdefault(case.model_type, {"float32": 0.0, "bfloat16": 0.0, "one_call": False})
            for dtype in ("float32", "bfloat16"):
                driver = make_driver(Path(folder), kernels="auto", dtype=getattr(torch, dtype))
                seq = driver.add(0, ids_of(2, 40), WHOLE)
                driver.run([seq], 3)
                row[dtype] = max(row[dtype], distance(seq, model))
                served: Any = driver.worker._runner._model
                row["one_call"] |= getattr(served, "_stack", None) is not None
        print(name, row, file=sys.stderr, flush=True)
    if not model_types or "bert" in model_types:
        found["bert"] = measure_vectors()
    return found


def measure_vectors() -> dict[str, Any]:
    """The same of the mean hidden states of BERT, over several texts."""
    import numpy as np

    from bough.engine.engine import Engine
    from tests.models.test_bert import TEXTS, expected, make_tiny_bert

    row: dict[str, Any] = {"one_call": False}
    with tempfile.TemporaryDirectory() as name:
        folder = make_tiny_bert(Path(name))
        for dtype in ("float32", "bfloat16"):
            with Engine(str(folder), dtype=dtype, threads=1, max_running=4) as engine:
                ids = [engine.tokenize(text) for text in TEXTS]
                pairs = [(e.vector, expected(folder, i).mean(0)) for e, i in zip(engine.embed(ids), ids, strict=True)]
            row[dtype] = max(float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)) for ours, theirs in pairs)
    print("bert", row, file=sys.stderr, flush=True)
    return row


def main() -> None:
    logging.disable()
    figures = json.loads(FIGURES.read_text())
    if "--measure" in sys.argv[1:]:
        figures |= measure(sys.argv[2:])
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    print(page(figures))


if __name__ == "__main__":
    main()
