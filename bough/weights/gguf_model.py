"""GGUF metadata and tensor names in the terms of a Hugging Face folder.

Some things differ between the two worlds, and all of them end here and in :mod:`bough.weights.gguf_families`: parameter
names, configuration keys, experts of a layer in one tensor, Gemma's norms, which are larger by 1, DeepSeek's projection
of latents, in two parts (:func:`join_heads`), and, for some architectures, the order of the rows of the query and key
projections. llama.cpp rotates neighbouring pairs of a head's dimensions and stores the rows so that this is right;
Hugging Face rotates dimension i with i + head_dim / 2. :func:`restore_rows` goes back to the latter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bough.base.errors import ConfigError
from bough.base.params import Pooling
from bough.weights.gguf import GgufFile
from bough.weights.gguf_families import IN_LAYER, Family, family_of
from bough.weights.gguf_metadata import Metadata

_ROPE_FACTORS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"

_POOLINGS: tuple[Pooling | None, ...] = (None, "mean", "first", "last", None)
"""As files number them: not told, of the tokens' hidden states, and what a classifier gives scores of."""

_BY_HEAD = "attn_k_b", "attn_v_b"
_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a parameter lies and how it differs from the Hugging Face one.

    Attributes:
        tensor: its name in the file.
        expert: which of the tensor's leading dimension it is; None: all of it.
        heads: rows are permuted within as many heads; 0: they are in order.
        offset: what the values are larger by.
        values: the tensor with the heads' values, where ``tensor`` holds their keys, see :func:`join_heads`.
    """

    tensor: str
    expert: int | None = None
    heads: int = 0
    offset: float = 0.0
    values: str | None = None


def describe(file: GgufFile) -> tuple[Metadata, Family]:
    """The metadata of a whole file, and its architecture; ConfigError for others."""
    meta, family = family_of(file)
    parts = meta.get("split.count")
    if parts is not None and parts not in (0, 1):
        raise ConfigError(f"{file.path} is one part of a split GGUF; join the parts with llama-gguf-split --merge")
    return meta, family


def parameters_of(file: GgufFile, meta: Metadata, family: Family) -> dict[str, Stored]:
    """Hugging Face parameter name -> where it is, in the file's order; ConfigError for an unknown tensor."""
    found: dict[str, Stored] = {}
    in_layer = {**IN_LAYER, **family.names}
    for name, info in file.tensors.items():
        if name in (_ROPE_FACTORS, _LONG, _SHORT):
            continue
        stem, _, end = name.rpartition(".")
        ours = f"{family.outer[stem]}.{end}" if stem in family.outer else None
        match = _LAYER_NAME.fullmatch(name)
        if match and f"{match[2]}.{match[3]}" in in_layer:
            ours = f"{family.layers}.{match[1]}.{in_layer[f'{match[2]}.{match[3]}']}"
        elif match and match[2] in in_layer:
            ours = f"{family.layers}.{match[1]}.{in_layer[match[2]]}.{match[3]}"
        elif match and match[2] in _BY_HEAD and "attn_kv_b" in in_layer:
            found |= _by_head(file, match[1], in_layer["attn_kv_b"])
            continue
        if ours is None:
            raise ConfigError(f"{file.path}: no supported model has a tensor {name!r}")
        if "{}" in ours:
            if len(info.shape) != (3 if ours.endswith(".weight") else 2):
                raise ConfigError(f"{file.path}: {name!r} is not one parameter for each expert")
            if info.shape[0] != (n_experts := meta.size("{}.expert_count")):
                raise ConfigError(f"{file.path}: {name!r} holds {info.shape[0]} experts of {n_experts}")
            found |= {ours.format(e): Stored(name, e) for e in range(info.shape[0])}
            continue
        offset = family.norm_offset if ours.endswith("norm.weight") else 0.0
        found[ours] = Stored(name, heads=_permuted_heads(meta, family, ours), offset=offset)
    return found


def _by_head(file: GgufFile, layer: str, name: str) -> dict[str, Stored]:
    """The projection ``name`` of a layer's latents, from its two halves; nothing where the file has it whole, too."""
    keys, values = (f"blk.{layer}.{half}.weight" for half in _BY_HEAD)
    if f"blk.{layer}.attn_kv_b.weight" in file.tensors:
        return {}
    if not {keys, values} <= set(file.tensors):
        raise ConfigError(f"{file.path}: of {keys!r} and {values!r} one is missing")
    return {f"model.layers.{layer}.{name}.weight": Stored(keys, values=values)}


def _permuted_heads(meta: Metadata, family: Family, name: str) -> int:
    """Number of heads whose rows are permuted in the parameter ``name``; 0 if its rows are in order."""
    if not family.permuted or not (".q_proj." in name or ".k_proj." in name):
        return 0
    heads = meta.size("{}.attention.head_count")
    return heads if ".q_proj." in name else meta.size("{}.attention.head_count_kv", heads)


def restore_rows(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rows of a llama query or key projection [n_heads * head_dim, ...] in Hugging Face order.

    Within each head, llama.cpp stores dimension i at row 2i and dimension i + head_dim / 2 at row 2i + 1.
    ConfigError if the rows are not ``n_heads`` heads of an even size.
    """
    rows = weight.shape[0]
    if rows % (2 * n_heads):
        raise ConfigError(f"a query or key projection of {rows} rows does not suit {n_heads} heads")
    return weight.view(n_heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def join_heads(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The projection [H * (N + V), R] of latents to the keys and values of H heads.

    ``keys`` are [H, R, N], transposed for what llama.cpp multiplies them with; ``values`` [H, V, R]. ConfigError for
    shapes that do not go together.
    """
    if keys.ndim != 3 or values.ndim != 3 or (len(keys), keys.shape[1]) != (len(values), values.shape[2]):
        raise ConfigError(f"keys {list(keys.shape)} and values {list(values.shape)} of latents do not go together")
    return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)


def config_of(file: GgufFile, meta: Metadata, family: Family) -> dict[str, Any]:
    """The configuration that the model's Hugging Face ``config.json`` would hold; ConfigError if keys lack."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{file.path}: there is no embedding matrix (token_embd.weight)")
    n_layers = meta.size("{}.block_count")
    if n_layers > len(file.tensors):  # before anything of that many is made
        raise ConfigError(f"{file.path}: {n_layers} layers cannot be made of {len(file.tensors)} tensors")
    heads = meta.size("{}.attention.head_count")
    hidden = meta.size("{}.embedding_length")
    head_dim, rotated = _head_sizes(file, meta, family)
    n_tokens = embedding.shape[0]
    return {
        "model_type": family.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": n_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.size("{}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": meta.size("{}.feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": meta.number("{}.attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": meta.number("{}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, meta, family, rotated),
        "partial_rotary_factor": rotated / head_dim,
        "vocab_size": n_tokens,
        "max_position_embeddings": meta.size("{}.context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "bos_token_id": meta.token("bos", n_tokens),
        "eos_token_id": meta.token("eos", n_tokens),
        **family.settings(meta, file.tensors),
    }


def _head_sizes(file: GgufFile, meta: Metadata, family: Family) -> tuple[int, int]:
    """(head_dim, dimensions of it that are rotated); ConfigError for sizes that are not computed."""
    if meta.get("{}.attention.kv_lora_rank") is not None:
        rotated = meta.size("{}.rope.dimension_count")
        return rotated, rotated
    whole = max(1, meta.size("{}.embedding_length") // meta.size("{}.attention.head_count"))
    head_dim = meta.size("{}.attention.key_length", whole)
    if meta.size("{}.attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"{file.path}: keys and values of different sizes are not supported")
    rotated = meta.size("{}.rope.dimension_count", head_dim)
    if rotated > head_dim or (family.permuted and rotated != head_dim):
        raise ConfigError(f"{file.path}: {rotated} of {head_dim} dimensions of a head cannot be rotated")
    return head_dim, rotated


def _rope_scaling(file: GgufFile, meta: Metadata, family: Family, rotated: int) -> dict[str, Any] | None:
    """Hugging Face's ``rope_scaling``, or None.

    Llama 3's scaling arrives as a tensor of one divisor per frequency instead of the four numbers that
    made it. It becomes ``{"rope_type": "factors", "factors": [...]}``: inv_freq[i] /= factors[i].
    """
    if _ROPE_FACTORS in file.tensors:
        return {"rope_type": "factors", "factors": _factors(file, _ROPE_FACTORS, rotated)}
    original, length = "{}.rope.scaling.original_context_length", meta.size("{}.context_length")
    if _LONG in file.tensors and _SHORT in file.tensors:
        attention = meta.get("{}.rope.scaling.attn_factor")
        return {
            "rope_type": "longrope",
            "long_factor": _factors(file, _LONG, rotated),
            "short_factor": _factors(file, _SHORT, rotated),
            "original_max_position_embeddings": meta.size(original, length),
            "attention_factor": None if attention is None else meta.number("{}.rope.scaling.attn_factor"),
        }
    kind = meta.text("{}.rope.scaling.type")
    if kind is None or kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{file.path}: rope scaling of type {kind!r} is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": meta.number("{}.rope.scaling.factor", 1.0)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = meta.size(original)
        names = {"attn_factor": "attention_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
        for name, theirs in names.items():
            if meta.get(key := f"{{}}.rope.scaling.yarn_{name}") is not None:
                scaling[theirs] = meta.number(key)
        if meta.get("{}.rope.scaling.yarn_log_multiplier") is not None:
            # Both are the same in the models that have them; files hold a tenth of the one.
            scaling["mscale"] = scaling["mscale_all_dim"] = 10 * meta.number("{}.rope.scaling.yarn_log_multiplier")
        if family.model_type == "gpt_oss":
            scaling["truncate"] = False
    return scaling


def _factors(file: GgufFile, name: str, rotated: int) -> list[float]:
    """The divisors of all frequencies; ConfigError for others than so many positive numbers."""
    if file.tensors[name].shape != (rotated // 2,):
        raise ConfigError(f"{file.path}: {name} does not hold {rotated // 2} factors")
    factors = file.tensor(name, torch.float32)
    if not bool((torch.isfinite(factors) & (factors > 0)).all()):
        raise ConfigError(f"{file.path}: {name} holds a factor that is not positive and finite")
    found: list[float] = factors.tolist()
    return found


def generation_config_of(meta: Metadata, n_tokens: int) -> dict[str, Any]:
    """What ``generation_config.json`` would hold: the special ids; every id that ends a turn is an end of sequence."""
    ends = [meta.token(name, n_tokens) for name in ("eos", "eot", "eom")]
    return {
        "bos_token_id": meta.token("bos", n_tokens),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        "pad_token_id": meta.token("padding", n_tokens),
    }


def pooling_of(meta: Metadata) -> Pooling | None:
    """How embeddings are made of hidden states, where the file tells; ConfigError for a way that is not supported."""
    number = meta.size("{}.pooling_type", 0)
    if number >= len(_POOLINGS):
        raise ConfigError(f"GGUF metadata: pooling of type {number} is not supported")
    return _POOLINGS[number]


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
