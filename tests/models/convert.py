"""GGUF files of tiny checkpoints as llama.cpp's converter writes them; names and keys are those of the gguf package."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[np.float32]

PERMUTED = ("llama", "granite", "smollm3")
"""Architectures whose converter stores queries and keys in llama.cpp's order."""

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3",
    "granite": "granite", "olmo2": "olmo2", "olmoe": "olmoe", "glm4": "glm4", "cohere2": "cohere2",
    "smollm3": "smollm3", "seed_oss": "seed_oss", "ernie4_5": "ernie4_5",
}  # fmt: skip
"""``model_type`` -> architecture of GGUF."""


def write(folder: Path, path: Path, quantise: gguf.GGMLQuantizationType | None = None) -> dict[str, Array]:
    """The model of ``folder`` as a GGUF file at ``path``, its matrices rounded to ``quantise``.

    The weights that the file then stands for, by their names in the folder.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    _settings(writer, config, arch)
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    exact: dict[str, Array] = {}
    for name, parts, weight in _merged(load_file(folder / "model.safetensors")):
        stem, end = name.rsplit(".", 1)
        theirs = names.get_name(stem)
        assert theirs is not None, name
        stored = _changed(name, weight, config, arch)
        if quantise is None or weight.ndim < 2 or "gate_inp" in theirs:
            writer.add_tensor(f"{theirs}.{end}", stored)
            held = weight
        else:
            blocks = gguf.quants.quantize(stored, quantise)
            writer.add_tensor(f"{theirs}.{end}", blocks, raw_dtype=quantise)
            rounded = gguf.quants.dequantize(blocks, quantise).astype(np.float32).reshape(stored.shape)
            held = _changed_back(name, rounded, config, arch)
        exact |= {part: held if part == name else held[i] for i, part in enumerate(parts)}
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


def _merged(weights: dict[str, Array]) -> Iterator[tuple[str, list[str], Array]]:
    """(name, names that it is made of, values): the experts of a layer are one tensor."""
    merged: dict[str, list[str]] = {}
    for name in weights:
        parts = name.split(".experts.")
        key = f"{parts[0]}.experts.{parts[1].split('.', 1)[1]}" if len(parts) == 2 else name
        merged.setdefault(key, []).append(name)
    for key, names in merged.items():
        if key == names[0]:
            yield key, names, weights[key]
        else:
            names.sort(key=lambda name: int(name.split(".experts.")[1].split(".")[0]))
            # The converter gives Mixtral's experts the names of the original release.
            ours = key.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
            yield ours if "block_sparse_moe" in key else key, names, np.stack([weights[name] for name in names])


def _heads(name: str, config: dict[str, Any], arch: str) -> int:
    if arch not in PERMUTED or not (".q_proj." in name or ".k_proj." in name):
        return 0
    heads: int = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
    return heads


def _changed(name: str, weight: Array, config: dict[str, Any], arch: str) -> Array:
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return weight + 1
    if heads := _heads(name, config, arch):
        halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
    return weight


def _changed_back(name: str, weight: Array, config: dict[str, Any], arch: str) -> Array:
    if heads := _heads(name, config, arch):
        pairs = weight.reshape(heads, len(weight) // heads // 2, 2, *weight.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))
    return weight


def _settings(writer: Any, config: dict[str, Any], arch: str) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    rope = config.get("rope_parameters") or {}
    full, sliding = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    given: list[tuple[Callable[[Any], None], Any]] = [
        (writer.add_block_count, config["num_hidden_layers"]),
        (writer.add_context_length, config["max_position_embeddings"]),
        (writer.add_embedding_length, hidden),
        (writer.add_feed_forward_length, config["intermediate_size"]),
        (writer.add_head_count, heads),
        (writer.add_head_count_kv, config["num_key_value_heads"]),
        (writer.add_key_length, head_dim),
        (writer.add_value_length, head_dim),
        (writer.add_layer_norm_rms_eps, config.get("rms_norm_eps")),
        (writer.add_layer_norm_eps, config.get("layer_norm_eps")),
        (writer.add_rope_freq_base, full.get("rope_theta")),
        (writer.add_rope_freq_base_swa, sliding.get("rope_theta")),
        (writer.add_rope_dimension_count, int(head_dim * full.get("partial_rotary_factor", 1))),
        (writer.add_sliding_window, config.get("sliding_window") if arch not in ("llama", "qwen2") else None),
        (writer.add_attn_logit_softcapping, config.get("attn_logit_softcapping")),
        (writer.add_final_logit_softcapping, config.get("final_logit_softcapping")),
        (writer.add_expert_count, config.get("num_local_experts") or config.get("num_experts")),
        (writer.add_expert_used_count, config.get("num_experts_per_tok")),
        (writer.add_attention_scale, config.get("attention_multiplier")),
        (writer.add_embedding_scale, config.get("embedding_multiplier")),
        (writer.add_residual_scale, config.get("residual_multiplier")),
        (writer.add_logit_scale, config.get("logits_scaling") or config.get("logit_scale")),
    ]
    for add, value in given:
        if value is not None:
            add(value)
    if arch in ("gemma2", "gemma3", "cohere2"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    _rope_scaling(writer, full, head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])


def _rope_scaling(writer: Any, rope: dict[str, Any], head_dim: int) -> None:
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("longrope", "yarn"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    if kind == "llama3":
        frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
        waves, original = 2 * np.pi / frequencies, rope["original_max_position_embeddings"]
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        smooth = (original / waves - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        found = np.where(waves < original / high, 1, np.where(waves > original / low, factor, between))
        writer.add_tensor("rope_freqs.weight", found.astype(np.float32))
