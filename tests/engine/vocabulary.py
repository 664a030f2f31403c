"""A folder with a byte-level tokenizer of single bytes and a small chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = "{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}{% endfor %}<|turn|>assistant:"


def write_vocabulary(folder: Path, template: str | None = TEMPLATE) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|turn|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>"} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
