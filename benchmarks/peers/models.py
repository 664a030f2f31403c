"""The two models of the comparison, in the formats of every engine, with the same values in each.

``135m`` is the embedded default model: its Q4_1 file, dequantised and rounded to bfloat16 once, is the
Hugging Face folder that all bf16 rows use. ``1b`` has the shape of Llama 3.2 1B with the vocabulary of
the first and random weights: fast enough to make, and large enough for memory bandwidth to decide.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.peers.home import Home, Unavailable
from bough.text.gguf_vocab import build_from_gguf
from bough.weights.embedded import default_model
from bough.weights.loader import FolderCheckpoint, GgufCheckpoint

MODELS = ("135m", "1b")

GGUF_QUANTS = ("q8_0", "q4_1", "q4_0")

SHAPE_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}

_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def folder(home: Home, model: str) -> Path:
    """The Hugging Face folder of a model, whether it was made already or not."""
    return home.models / {"135m": "smollm2-135m", "1b": "llama-1b"}[model]


def gguf_path(home: Home, model: str, kind: str) -> Path:
    """The GGUF file of a model; the 4-bit file of ``135m`` is the one that everything comes from."""
    if (model, kind) == ("135m", "q4_1"):
        return default_model()
    return home.models / f"{folder(home, model).name}-{kind}.gguf"


def openvino_path(home: Home, model: str, kind: str) -> Path:
    return home.models / "openvino" / f"{folder(home, model).name}-{kind}"


def make_folder(home: Home, model: str) -> None:
    """Write the Hugging Face folder (bfloat16 safetensors, config, tokenizer); nothing if it is there."""
    target = folder(home, model)
    if (target / "config.json").exists():
        return
    source = GgufCheckpoint(default_model())
    target.mkdir(parents=True, exist_ok=True)
    try:
        config = dict(source.config)
        if model == "1b":
            config |= SHAPE_1B
            tensors = dict(_random(config))
        else:
            tensors = {name: source.tensor(name, torch.bfloat16) for name in source.names()}
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        _write_tokenizer(target, source)
        generation = {k: v for k, v in source.generation_config.items() if v is not None}
        _write(target / "generation_config.json", generation)
        # Last: its presence says that the folder is complete.
        config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
        _write(target / "config.json", config)
    finally:
        source.close()


def _random(config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Seeded weights small enough that activations stay in range through all layers."""
    rng = torch.Generator().manual_seed(0)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]

    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(std=0.02, generator=rng).to(torch.bfloat16)

    yield "model.embed_tokens.weight", weight(config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, shape in (
            ("self_attn.q_proj", (q, hidden)),
            ("self_attn.k_proj", (kv, hidden)),
            ("self_attn.v_proj", (kv, hidden)),
            ("self_attn.o_proj", (hidden, q)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
        ):
            yield f"{layer}{name}.weight", weight(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{name}.weight", torch.ones(hidden, dtype=torch.bfloat16)
    yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16)


def _write_tokenizer(target: Path, source: GgufCheckpoint) -> None:
    metadata = source.tokenizer_source
    assert isinstance(metadata, dict)
    vocabulary = build_from_gguf(metadata)
    vocabulary.tokenizer.save(str(target / "tokenizer.json"))
    eos = vocabulary.tokenizer.id_to_token(vocabulary.eos_ids[0])
    _write(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": vocabulary.tokenizer.id_to_token(vocabulary.bos_id or 0),
            "eos_token": eos,
            "pad_token": eos,
            "chat_template": metadata["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
        },
    )


def make_gguf(home: Home, model: str) -> None:
    """Write the bfloat16 GGUF file from the Hugging Face folder, value for value; nothing if it is there."""
    target = gguf_path(home, model, "bf16")
    if target.exists():
        return
    source = FolderCheckpoint(folder(home, model))
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    _add_metadata(writer, source.config, gguf.LlamaFileType.MOSTLY_BF16)
    heads = {"q_proj": source.config["num_attention_heads"], "k_proj": source.config["num_key_value_heads"]}
    try:
        for name in source.names():
            weight = source.tensor(name)
            part = name.split(".")[-2]
            if part in heads:
                weight = interleave_rows(weight, heads[part])
            _add_tensor(writer, _gguf_name(name), weight)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
        source.close()
    partial.rename(target)


def interleave_rows(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rows of a query or key projection in llama.cpp's order: dimensions i and i + head_dim / 2 side by side."""
    return weight.view(n_heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _gguf_name(name: str) -> str:
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    _, _, layer, *part, kind = name.split(".")
    return f"blk.{layer}.{_GGUF_IN_LAYER['.'.join(part)]}.{kind}"


def _add_tensor(writer: gguf.GGUFWriter, name: str, weight: torch.Tensor) -> None:
    if weight.dim() == 1:
        writer.add_tensor(name, weight.float().numpy())
    else:
        data = weight.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], file_type: gguf.LlamaFileType) -> None:
    writer.add_file_type(file_type)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    for key, field in gguf.GGUFReader(default_model()).fields.items():
        if key.startswith("tokenizer."):
            sub = field.types[1] if len(field.types) > 1 else None
            value = field.contents()
            if isinstance(value, np.ndarray):
                value = value.tolist()
            writer.add_key_value(key, value, field.types[0], sub)


def quantize(home: Home, model: str, tool: Path) -> None:
    """Make the quantised GGUF files that are missing, with llama.cpp's own tool."""
    if not tool.exists():
        raise Unavailable("quantised GGUF files need llama-quantize: set up llamacpp first")
    for kind in GGUF_QUANTS:
        target = gguf_path(home, model, kind)
        if not target.exists():
            partial = target.with_suffix(".partial")
            home.call("models", [tool, gguf_path(home, model, "bf16"), partial, kind.upper()])
            partial.rename(target)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
