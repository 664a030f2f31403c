"""GGUF metadata and tensor names in the terms of a Hugging Face folder.

Three things differ between the two worlds, and all of them end here: parameter names, configuration
keys, and, for the ``llama`` architecture, the order of the rows of the query and key projections.
llama.cpp rotates neighbouring pairs of a head's dimensions and stores the rows so that this is right;
Hugging Face rotates dimension i with i + head_dim / 2. :func:`restore_rows` goes back to the latter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from bough.base.errors import ConfigError
from bough.weights.gguf import GgufFile, Value

#: GGUF architecture -> Hugging Face ``model_type``.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

_PERMUTED = ("llama",)
_ROPE_FACTORS = "rope_freqs.weight"
_MAX_SIZE = 1 << 31

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")


class Metadata:
    """Typed access to metadata; keys with ``{}`` stand for the architecture's own."""

    def __init__(self, values: Mapping[str, Value], arch: str) -> None:
        self.values = values
        self.arch = arch

    def get(self, key: str) -> Value | None:
        return self.values.get(key.format(self.arch))

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; a per-layer array counts if all its elements agree."""
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MAX_SIZE:
            raise ConfigError(f"GGUF metadata: {key.format(self.arch)} is not one positive integer: {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"GGUF metadata: {key.format(self.arch)} is not a positive number: {value!r}")
        return float(value)

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"GGUF metadata: {key.format(self.arch)} is not a string")
        return value

    def token(self, name: str, n_tokens: int) -> int | None:
        """A special token's id, None if absent."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < n_tokens:
            raise ConfigError(f"GGUF metadata: {key} is not the id of a token: {value!r}")
        return value


def describe(file: GgufFile) -> Metadata:
    """The metadata of a file whose architecture is known; ConfigError otherwise."""
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: GGUF architecture {arch!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    meta = Metadata(file.metadata, arch)
    parts = meta.get("split.count")
    if parts is not None and parts not in (0, 1):
        raise ConfigError(f"{file.path} is one part of a split GGUF; join the parts with llama-gguf-split --merge")
    return meta


def tensor_names(file: GgufFile) -> dict[str, str]:
    """Hugging Face parameter name -> GGUF tensor name, in the file's order; ConfigError for an unknown tensor."""
    names: dict[str, str] = {}
    for name in file.tensors:
        if name == _ROPE_FACTORS:
            continue
        ours = _OUTER.get(name)
        match = _LAYER_NAME.fullmatch(name)
        if match and match[2] in _IN_LAYER:
            ours = f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"
        if ours is None:
            raise ConfigError(f"{file.path}: no supported model has a tensor {name!r}")
        names[ours] = name
    return names


def restore_rows(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rows of a llama query or key projection [n_heads * head_dim, ...] in Hugging Face order.

    Within each head, llama.cpp stores dimension i at row 2i and dimension i + head_dim / 2 at row 2i + 1.
    ConfigError if the rows are not ``n_heads`` heads of an even size.
    """
    rows = weight.shape[0]
    if rows % (2 * n_heads):
        raise ConfigError(f"a query or key projection of {rows} rows does not suit {n_heads} heads")
    return weight.view(n_heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def heads_to_restore(meta: Metadata, hf_name: str) -> int | None:
    """Number of heads whose rows are permuted in the tensor that is ``hf_name``; None if its rows are in order."""
    if meta.arch not in _PERMUTED:
        return None
    heads = meta.size("{}.attention.head_count")
    if ".q_proj." in hf_name:
        return heads
    return meta.size("{}.attention.head_count_kv", heads) if ".k_proj." in hf_name else None


def config_of(file: GgufFile, meta: Metadata) -> dict[str, Any]:
    """The configuration that the model's Hugging Face ``config.json`` would hold; ConfigError if keys lack."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{file.path}: there is no embedding matrix (token_embd.weight)")
    heads = meta.size("{}.attention.head_count")
    hidden = meta.size("{}.embedding_length")
    head_dim = meta.size("{}.attention.key_length", max(1, hidden // heads))
    if meta.size("{}.attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"{file.path}: keys and values of different sizes are not supported")
    if meta.size("{}.rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(f"{file.path}: rotary embedding of a part of the head is not supported")
    n_tokens = embedding.shape[0]
    return {
        "model_type": ARCHITECTURES[meta.arch],
        "hidden_size": hidden,
        "num_hidden_layers": meta.size("{}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.size("{}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": meta.size("{}.feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": meta.number("{}.attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number("{}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, meta, head_dim),
        "vocab_size": n_tokens,
        "max_position_embeddings": meta.size("{}.context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "bos_token_id": meta.token("bos", n_tokens),
        "eos_token_id": meta.token("eos", n_tokens),
    }


def _rope_scaling(file: GgufFile, meta: Metadata, head_dim: int) -> dict[str, Any] | None:
    """Hugging Face's ``rope_scaling``, or None.

    Llama 3's scaling arrives as a tensor of one divisor per frequency instead of the four numbers that
    made it. It becomes ``{"rope_type": "factors", "factors": [...]}``: inv_freq[i] /= factors[i].
    """
    if _ROPE_FACTORS in file.tensors:
        if file.tensors[_ROPE_FACTORS].shape != (head_dim // 2,):
            raise ConfigError(f"{file.path}: {_ROPE_FACTORS} does not hold {head_dim // 2} factors")
        factors = file.tensor(_ROPE_FACTORS, torch.float32)
        if not bool((torch.isfinite(factors) & (factors > 0)).all()):
            raise ConfigError(f"{file.path}: {_ROPE_FACTORS} holds a factor that is not positive and finite")
        return {"rope_type": "factors", "factors": factors.tolist()}
    kind = meta.text("{}.rope.scaling.type")
    if kind is None or kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{file.path}: rope scaling of type {kind!r} is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": meta.number("{}.rope.scaling.factor", 1.0)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = meta.size("{}.rope.scaling.original_context_length")
    return scaling


def generation_config_of(meta: Metadata, n_tokens: int) -> dict[str, Any]:
    """What ``generation_config.json`` would hold: the special ids; every id that ends a turn is an end of sequence."""
    ends = [meta.token(name, n_tokens) for name in ("eos", "eot", "eom")]
    return {
        "bos_token_id": meta.token("bos", n_tokens),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        "pad_token_id": meta.token("padding", n_tokens),
    }


def tokenizer_of(file: GgufFile) -> dict[str, Any]:
    """The file's ``tokenizer.*`` entries under their own names, arrays as lists; ConfigError if there are none."""
    entries = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.")
    }
    if not entries:
        raise ConfigError(f"{file.path}: the file holds no tokenizer")
    return entries
