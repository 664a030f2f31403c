"""GGUF files of tiny checkpoints as llama.cpp's converter writes them; names and keys are those of the gguf package."""

from __future__ import annotations

import json
import re
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
    "llama4_text": "llama4", "gpt_oss": "gpt-oss", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
}  # fmt: skip
"""``model_type`` -> architecture of GGUF."""

EXPERT_COUNTS = "n_routed_experts", "num_local_experts", "num_experts"


def write(
    folder: Path, path: Path, quantise: gguf.GGMLQuantizationType | None = None, *, whole_latents: bool = False
) -> dict[str, Array]:
    """The model of ``folder`` as a GGUF file at ``path``, its matrices rounded to ``quantise``.

    ``whole_latents``: DeepSeek's projections of latents are not split, as until 2025. The weights that the file then
    stands for, by their names in the folder.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    _settings(writer, config, arch)
    if arch == "deepseek2":
        _latent_settings(writer, config, whole_latents)
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    exact: dict[str, Array] = {}
    for name, parts, weight in _merged(_split(load_file(folder / "model.safetensors"), config, whole_latents)):
        stem, end = name.rsplit(".", 1)
        theirs = names.get_name(stem)
        assert theirs is not None, name
        stored = _changed(name, weight, config, arch)
        if quantise is None or end != "weight" or weight.ndim < 2 or "gate_inp" in theirs or stored.shape[-1] % 32:
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
    return _joined(exact, config, whole_latents)


def _split(weights: dict[str, Array], config: dict[str, Any], whole_latents: bool) -> dict[str, Array]:
    """Weights as the converter cuts and calls them, where that is not as folders do."""
    found: dict[str, Array] = {}
    for name, weight in weights.items():
        if name.endswith(("gate_up_proj", "gate_up_proj_bias")) and config["model_type"] == "gpt_oss":
            end = ".bias" if name.endswith("bias") else ".weight"
            for i, part in enumerate(("gate_proj", "up_proj")):
                half = weight[..., i::2] if end == ".bias" else weight[..., i::2].swapaxes(1, 2)
                found[name.split("gate_up_proj")[0] + part + end] = np.ascontiguousarray(half)
        elif name.endswith("gate_up_proj") and config["model_type"] == "llama4_text":
            for half, part in zip(np.split(weight.swapaxes(1, 2), 2, axis=1), ("gate_proj", "up_proj")):
                found[name.replace("gate_up_proj", f"{part}.weight")] = np.ascontiguousarray(half)
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = np.ascontiguousarray(weight.swapaxes(1, 2))
        elif name.endswith("kv_b_proj.weight") and not whole_latents:
            by_head = weight.reshape(config["num_attention_heads"], -1, weight.shape[1])
            keys, values = np.split(by_head, [config["qk_nope_head_dim"]], axis=1)
            found[name.replace("kv_b_proj", "k_b_proj")] = np.ascontiguousarray(keys.swapaxes(1, 2))
            found[name.replace("kv_b_proj", "v_b_proj")] = np.ascontiguousarray(values)
        elif name.endswith("sinks"):
            found[f"{name}.weight"] = weight
        else:
            found[re.sub("(down_proj|e_score_correction)_bias$", r"\1.bias", name)] = weight
    return found


def _joined(weights: dict[str, Array], config: dict[str, Any], whole_latents: bool) -> dict[str, Array]:
    """What :func:`_split` was given."""
    found: dict[str, Array] = {}
    for name, weight in weights.items():
        if ".experts.gate_proj" in name:
            up = weights[name.replace("gate_proj", "up_proj")]
            both = np.stack((weight, up), axis=1 if config["model_type"] == "llama4_text" else 2)
            flat = both.reshape(len(both), -1, *weight.shape[2:])
            end = "_bias" if name.endswith("bias") else ""
            found[name.rsplit("gate_proj", 1)[0] + f"gate_up_proj{end}"] = flat if end else flat.swapaxes(1, 2)
        elif ".experts.down_proj.weight" in name:
            found[name.removesuffix(".weight")] = weight.swapaxes(1, 2)
        elif name.endswith(".k_b_proj.weight"):
            keys, values = weight.swapaxes(1, 2), weights[name.replace("k_b_proj", "v_b_proj")]
            both = np.concatenate((keys, values), axis=1)
            found[name.replace("k_b_proj", "kv_b_proj")] = both.reshape(-1, both.shape[-1])
        elif not (name.endswith(".v_b_proj.weight") or ".experts.up_proj" in name):
            name = name.removesuffix(".weight") if name.endswith("sinks.weight") else name
            found[re.sub(r"(experts.down_proj|e_score_correction)\.bias$", r"\1_bias", name)] = weight
    return found


def _merged(weights: dict[str, Array]) -> Iterator[tuple[str, list[str], Array]]:
    """(name, names that it is made of, values): the experts of a layer are one tensor."""
    merged: dict[str, list[str]] = {}
    for name in weights:
        parts = name.split(".experts.")
        single = len(parts) == 2 and parts[1][0].isdigit()
        key = f"{parts[0]}.experts.{parts[1].split('.', 1)[1]}" if single else name
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
        (writer.add_feed_forward_length, config.get("intermediate_size_mlp", config["intermediate_size"])),
        (writer.add_head_count, heads),
        *(
            []
            if arch == "deepseek2"
            else [
                (writer.add_head_count_kv, config["num_key_value_heads"]),
                (writer.add_key_length, head_dim),
                (writer.add_value_length, head_dim),
            ]
        ),
        (writer.add_layer_norm_rms_eps, config.get("rms_norm_eps")),
        (writer.add_layer_norm_eps, config.get("layer_norm_eps")),
        (writer.add_rope_freq_base, full.get("rope_theta")),
        (writer.add_rope_freq_base_swa, sliding.get("rope_theta")),
        (writer.add_rope_dimension_count, int(head_dim * full.get("partial_rotary_factor", 1))),
        (writer.add_sliding_window, config.get("sliding_window") if arch not in ("llama", "qwen2") else None),
        (writer.add_attn_logit_softcapping, config.get("attn_logit_softcapping")),
        (writer.add_final_logit_softcapping, config.get("final_logit_softcapping")),
        (writer.add_expert_count, next((config[key] for key in EXPERT_COUNTS if key in config), None)),
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
    if arch == "llama4":
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    if arch in ("gpt-oss", "llama4"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    _rope_scaling(writer, full, head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])


def _latent_settings(writer: Any, config: dict[str, Any], whole_latents: bool) -> None:
    rotated, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    latent, v3 = config["kv_lora_rank"], config["model_type"] == "deepseek_v3"
    if whole_latents:
        writer.add_head_count_kv(config["num_attention_heads"])
        writer.add_key_length(nope + rotated)
        writer.add_value_length(value)
    else:
        writer.add_head_count_kv(1)
        writer.add_key_length(latent + rotated)
        writer.add_value_length(latent)
        writer.add_key_length_mla(nope + rotated)
        writer.add_value_length_mla(value)
    writer.add_kv_lora_rank(latent)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if v3 and config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if config["n_group"]:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if v3 or not whole_latents:
        kind = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kind.SIGMOID if v3 else kind.SOFTMAX)
    if weight := config["rope_parameters"].get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * weight)


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
