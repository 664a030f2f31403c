"""Vocabularies to test with: the default model's, and small ones of every kind, trained here."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Fast

from bough.base.errors import ConfigError
from bough.text.tokenizer import Tokenizer
from bough.weights.embedded import default_model
from bough.weights.gguf import GgufFile

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.", "def main(argv):\n    return [x ** 2 for x in range(10)]\n",
    "Größe, façade, naïve, Ærøskøbing, İstanbul", "Привет, как дела? Съешь ещё этих мягких булок.",
    "日本語のテキストと漢字。", "한국어 문장입니다.", "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦 family 🇩🇪 flag 👍🏽 tone 🫠", "e\u0301 combining \u200b zero \u00a0 nbsp \ufeff bom",
    "1234567890 3.14159 ½ ² Ⅷ ٣",
    "it's we'll they've I'M YOU'RE", "<html><body class='x'>&amp;</body></html>", "{\"a\": [1, 2, {\"b\": null}]}",
    "   leading and   inner   spaces   ", "\n\n\t mixed \r\n whitespace \x0b\x0c", "SELECT * FROM t WHERE a<>'b';",
    "https://example.org/path?q=1&r=%20#frag", "$x^2 + \\frac{1}{2}$", "", " ", "\n", "a", "\x00\x7f",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀 🜁",
    "snake_case camelCase SCREAMING_CASE kebab-case", "<|user|> [INST] <s> </s> <unk> <pad>",
    "###Instruction:---===~~~",
]  # fmt: skip


def varied_strings(count: int) -> list[str]:
    """``SENTENCES`` and pieces, joins and random characters, the same at every run."""
    rng = random.Random(7)
    found = list(SENTENCES)
    while len(found) < count:
        kind = rng.randrange(3)
        if kind == 0:
            a, b = rng.choice(SENTENCES), rng.choice(SENTENCES)
            found.append(
                a[rng.randrange(len(a) + 1) :] + rng.choice(["", " ", "\n", "  "]) + b[: rng.randrange(len(b) + 1)]
            )
        elif kind == 1:
            found.append("".join(rng.choice("aeiou tnsrh,.'  \n0123") for _ in range(rng.randrange(60))))
        else:
            ranges = [(32, 126), (0xA0, 0x24F), (0x370, 0x52F), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF), (9, 13)]
            low, high = rng.choice(ranges)
            found.append("".join(chr(rng.randint(low, high)) for _ in range(rng.randrange(30))))
    return found


@pytest.fixture(scope="session")
def strings() -> list[str]:
    return varied_strings(700)


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    try:
        return default_model()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm_metadata(smollm_path: Path) -> dict[str, Any]:
    with GgufFile(smollm_path) as file:
        return dict(file.metadata)


@pytest.fixture(scope="session")
def smollm(smollm_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(smollm_metadata)


SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "[INST]"]


def _byte_level() -> Fast:
    fast = Fast(models.BPE())
    fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(varied_strings(300), trainer)
    fast.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    fast.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return fast


def _sentencepiece(prefix: str) -> Fast:
    """A BPE over whole texts with ``▁`` for spaces and byte fallback; ``prefix``: first, always or legacy."""
    fast = Fast(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    strip = [decoders.Strip(" ", 1, 0)] if prefix != "never" else []
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIALS + [f"<0x{b:02X}>" for b in range(256)], limit_alphabet=150,
        show_progress=False,
    )  # fmt: skip
    fast.train_from_iterator(varied_strings(300), trainer)
    data = json.loads(fast.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    fast = Fast.from_str(json.dumps(data))
    if prefix == "legacy":
        fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        fast.pre_tokenizer = None
    else:
        fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", fast.token_to_id("<s>"))]
    )
    return fast


KINDS: dict[str, Callable[[], Fast]] = {
    "byte-level": _byte_level,
    "sentencepiece-first": lambda: _sentencepiece("first"),
    "sentencepiece-never": lambda: _sentencepiece("never"),
    "sentencepiece-legacy": lambda: _sentencepiece("legacy"),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Hugging Face folder of every kind."""
    found = {}
    for name, build in KINDS.items():
        folder = tmp_path_factory.mktemp(name)
        build().save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        found[name] = folder
    return found


@pytest.fixture(scope="session")
def all_kinds(folders: dict[str, Path], smollm: Tokenizer) -> dict[str, Tokenizer]:
    """One tokenizer of every kind, by name."""
    return {"smollm": smollm, **{name: Tokenizer.from_folder(folder) for name, folder in folders.items()}}


@pytest.fixture(params=["smollm", *KINDS])
def tokenizer(request: pytest.FixtureRequest, all_kinds: dict[str, Tokenizer]) -> Tokenizer:
    return all_kinds[request.param]
