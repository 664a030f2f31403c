"""Real weights end to end: K-quants with biases, windows with 262,144 ids; against transformers and as recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bough.base.params import SamplingParams
from bough.engine.text import load_text
from bough.weights.loader import open_checkpoint
from bough.weights.packaged import PackagedModel
from tests.driving import make_driver
from tests.real import GEMMA, QWEN, fetched

pytestmark = pytest.mark.slow

TEXT = (
    "The river had risen in the night, and by morning the lower field was a lake. Anna counted the sheep twice:\n"
    "forty-one, one more than the evening before. def area(r): return 3.14159 * r ** 2  # Größe, 長さ, 🐑\n"
)
PROMPTS = ("The capital of France is", "def fibonacci(n):\n    ", "1, 2, 3, 4,")
RECORDED = {
    "qwen2": (
        " Paris. Paris is located in the northwestern part of France. The capital of France is located in the"
        " northwestern part",
        ' if n <= 0:\n         return "Invalid input"\n     elif n == 1:\n         return 0\n',
        " 5, 6, 7, 8, 9, 10, 11, ",
    ),
    "gemma3_text": (
        " the capital of the country of France. It is the capital of the country of France. It is the capital of the",
        "if n == 0:\n        return 0\n    elif n == 1:\n        return 1",
        " 5, 6, 7, 8, 9, 10, 11, ",
    ),
}
NEAR = 0.75
"""Of two continuations whose logits are this near, rounding to 8 bits may choose either."""


def transformers_of(path: Any) -> Any:
    """transformers' model in float32 with the weights that the file stands for."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    checkpoint = open_checkpoint(path)
    config = {key: value for key, value in checkpoint.config.items() if value is not None}
    maker: Any = AutoModelForCausalLM
    with no_init_weights():
        model = maker.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    model.tie_weights()
    weights = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}
    checkpoint.close()
    return model


@pytest.mark.parametrize("packaged", [QWEN, GEMMA], ids=lambda model: model.title)
def test_text_and_logits(packaged: PackagedModel) -> None:
    path = fetched(packaged)
    checkpoint = open_checkpoint(path)
    tokenizer, _ = load_text(checkpoint.tokenizer_source)
    expected = RECORDED[checkpoint.config["model_type"]]
    checkpoint.close()
    model = transformers_of(path)

    ids = tokenizer.encode(TEXT, add_special=True)
    assert tokenizer.decode(ids).strip() == TEXT.strip()
    ids = ids * (700 // len(ids) + 1)  # beyond Gemma's window
    asked = SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0, logprob_token_ids=tuple(range(0, 2000, 7)))
    with torch.inference_mode():
        exact = make_driver(path, kernels="auto", n_tokens=1024, n_ids=tokenizer.vocab_size, context_length=1024)
        seq = exact.add(0, ids, asked)
        exact.run([seq], 1, chunk=300)
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)[:-1, list(asked.logprob_token_ids)]
        found = torch.tensor([[value for _, value in entry.asked] for entry in seq.prompt_logprobs])
        assert (found - rows).abs().max() < 2e-3
        del exact

        kept = make_driver(path, dtype=torch.bfloat16, kernels="auto", n_tokens=512, n_ids=tokenizer.vocab_size)
        seqs = [
            kept.add(i, tokenizer.encode(prompt, add_special=True), SamplingParams(temperature=0.0))
            for i, prompt in enumerate(PROMPTS)
        ]
        kept.run(seqs, 24)
        for seq, recorded in zip(seqs, expected, strict=True):
            if (text := tokenizer.decode(seq.generated)) != recorded:
                print(f"{packaged.title}: {text!r} in place of {recorded!r}")
            logits = model(torch.tensor([seq.ids])).logits[0]
            for position in range(seq.n_prompt, len(seq.ids)):
                row = logits[position - 1]
                assert row[seq.ids[position]] > row.max() - NEAR, f"{text!r} at {position}"
        assert sum(tokenizer.decode(s.generated) == r for s, r in zip(seqs, expected)) >= 2
