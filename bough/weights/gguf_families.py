"""The architectures of GGUF files: what each calls its parameters and settings, in the terms of Hugging Face.

The names and keys are those that llama.cpp's converter writes, and what it leaves out is what llama.cpp assumes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bough.base.errors import ConfigError
from bough.weights.gguf import GgufFile, TensorInfo
from bough.weights.gguf_metadata import Metadata

FULL, SLIDING = "full_attention", "sliding_attention"

_SOFTMAX, _SIGMOID = 1, 2
"""What scores experts, as files number it."""

Settings = Callable[[Metadata, Mapping[str, TensorInfo]], dict[str, Any]]

IN_LAYER = {
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
"""Names within a layer, where an architecture does not say otherwise."""

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Names outside of layers, where an architecture does not say otherwise."""

_NORMS_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_BESIDE_SHARED = {
    **_EXPERTS,
    **{f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_WITH_SINKS = {
    **_EXPERTS,
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
}
_OF_LLAMA4 = {
    **{
        key: name.replace("mlp.", "feed_forward.")
        for key, name in {**IN_LAYER, **_EXPERTS}.items()
        if name.startswith("mlp.")
    },
    "ffn_gate_inp": "feed_forward.router",
}
_OF_BERT = {
    **{f"attn_{name[0]}": f"attention.self.{name}" for name in ("query", "key", "value")},
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_AROUND_BERT = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "cls": "pooler.dense",
    "cls.output": "classifier",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture.

    Attributes:
        model_type: of the Hugging Face config.
        names: within a layer, where they are not those of ``IN_LAYER``, without or with what they end with; ``{}``
            stands for the number of an expert.
        layers: what the names of a layer's parameters begin with, before its number.
        outer: names outside of layers, where they are not those of ``OUTER``.
        permuted: rows of queries and keys are in llama.cpp's order.
        norm_offset: what the file's norms are larger by.
        settings: what the config has beside what all have.
    """

    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    layers: str = "model.layers"
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    permuted: bool = False
    norm_offset: float = 0.0
    settings: Settings = lambda meta, tensors: {}


def family_of(file: GgufFile) -> tuple[Metadata, Family]:
    """The metadata of a file and its architecture; ConfigError if that is not known."""
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in FAMILIES:
        raise ConfigError(f"{file.path}: GGUF architecture {arch!r} is not supported; supported: {', '.join(FAMILIES)}")
    meta = Metadata(file.metadata, arch)
    if arch == "llama" and meta.size("{}.expert_count", 0):
        return meta, MIXTRAL
    if arch == "deepseek2" and meta.size("{}.expert_gating_func", _SOFTMAX) == _SIGMOID:
        return meta, DEEPSEEK_V3
    return meta, FAMILIES[arch]


def _layer_types(meta: Metadata, period: int) -> dict[str, Any]:
    """Windows, which every layer has but each ``period``-th, unless the file tells."""
    window, n_layers = meta.size("{}.attention.sliding_window", 0), meta.size("{}.block_count")
    pattern = meta.get("{}.attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray) and pattern.dtype == np.bool_ and len(pattern) >= n_layers:
        sliding = [bool(x) for x in pattern[:n_layers]]
    else:
        period = meta.size("{}.attention.sliding_window_pattern", period)
        sliding = [(i + 1) % period != 0 for i in range(n_layers)]
    return {
        "sliding_window": window or None,
        "layer_types": [SLIDING if window and slides else FULL for slides in sliding],
    }


def _query_scale(meta: Metadata, largest: int) -> float:
    """What scores of Gemma are divided by the root of; in the release with ``largest`` layers it is another."""
    heads, hidden = meta.size("{}.attention.head_count"), meta.size("{}.embedding_length")
    by_width = meta.size("{}.block_count") == largest
    return hidden // heads if by_width else meta.size("{}.attention.key_length", max(1, hidden // heads))


def _gemma2(meta: Metadata, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    return {
        **_layer_types(meta, 2),
        "query_pre_attn_scalar": _query_scale(meta, 46),
        "attn_logit_softcapping": meta.number("{}.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.number("{}.final_logit_softcapping", 30.0),
    }


def _gemma3(meta: Metadata, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    return {
        **_layer_types(meta, 6),
        "query_pre_attn_scalar": _query_scale(meta, 62),
        "final_logit_softcapping": meta.number("{}.final_logit_softcapping", 0.0) or None,
        "rope_theta": meta.number("{}.rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": meta.number("{}.rope.freq_base_swa", 10000.0),
    }


def _phi3(meta: Metadata, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    return {"sliding_window": meta.size("{}.attention.sliding_window", 0) or None}


def _granite(meta: Metadata, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    hidden, heads = meta.size("{}.embedding_length"), meta.size("{}.attention.head_count")
    return {
        "attention_multiplier": meta.number("{}.attention.scale", max(1, hidden // heads) ** -0.5),
        "embedding_multiplier": meta.number("{}.embedding_scale", 1.0),
        "residual_multiplier": meta.number("{}.residual_scale", 1.0),
        "logits_scaling": meta.number("{}.logit_scale", 1.0),
    }


def _olmo2(meta: Metadata, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    if meta.size("{}.attention.sliding_window", 0):
        raise ConfigError("GGUF files of OLMo 3, with windows, are not supported")
    return {}


def _cohere2(meta: Metadata, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    return {
        **_layer_types(meta, 4),
        "layer_norm_eps": meta.number("{}.attention.layer_norm_epsilon"),
        "logit_scale": meta.number("{}.logit_scale"),
    }


def _seed_oss(meta: Metadata, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    return {"attention_out_bias": "blk.0.attn_output.bias" in tensors}


def _ernie(meta: Metadata, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    return {"use_bias": "blk.0.attn_q.bias" in tensors}


def _mixtral(meta: Metadata, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    return {
        "num_local_experts": meta.size("{}.expert_count"),
        "num_experts_per_tok": meta.size("{}.expert_used_count"),
    }


def _gpt_oss(meta: Metadata, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    return {
        **_mixtral(meta, tensors),
        **_layer_types(meta, 2),
        "intermediate_size": meta.size("{}.expert_feed_forward_length"),
    }


def _llama4(meta: Metadata, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """What files do not tell is as in the releases: chunks, which layers rotate, and what late queries grow by."""
    if meta.get("{}.attention.sliding_window") == 0:
        raise ConfigError("GGUF files of the architecture llama4 whose layers all see everything are not supported")
    n_experts = meta.size("{}.expert_count")
    return {
        "intermediate_size": meta.size("{}.expert_feed_forward_length"),
        "intermediate_size_mlp": meta.size("{}.feed_forward_length"),
        "num_local_experts": n_experts,
        "num_experts_per_tok": meta.size("{}.expert_used_count"),
        "interleave_moe_layer_step": meta.size("{}.interleave_moe_layer_step"),
        "use_qk_norm": n_experts != 128,  # as Maverick
    }


def _deepseek(meta: Metadata, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Sizes of heads have names of their own since the others became those of what is cached, a latent."""
    rotated = meta.size("{}.rope.dimension_count")
    key = meta.size("{}.attention.key_length_mla", meta.size("{}.attention.key_length"))
    if key <= rotated:
        raise ConfigError(f"heads of {key} dimensions, of which {rotated} are rotated, are not supported")
    groups = meta.size("{}.expert_group_count", 1)
    has_query_latent = meta.get("{}.attention.q_lora_rank") is not None
    return {
        "num_key_value_heads": meta.size("{}.attention.head_count"),
        "q_lora_rank": meta.size("{}.attention.q_lora_rank") if has_query_latent else None,
        "kv_lora_rank": meta.size("{}.attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": meta.size("{}.attention.value_length_mla", meta.size("{}.attention.value_length")),
        "n_routed_experts": meta.size("{}.expert_count"),
        "num_experts_per_tok": meta.size("{}.expert_used_count"),
        "n_shared_experts": meta.size("{}.expert_shared_count"),
        "moe_intermediate_size": meta.size("{}.expert_feed_forward_length"),
        "first_k_dense_replace": meta.size("{}.leading_dense_block_count", 0),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": meta.size("{}.expert_group_used_count", 1),
        "norm_topk_prob": meta.get("{}.expert_weights_norm") is True,
        "routed_scaling_factor": meta.number("{}.expert_weights_scale", 1.0),
    }


def _bert(meta: Metadata, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    if meta.get("{}.attention.causal") is True:
        raise ConfigError("BERT whose tokens see only what is before them is not supported")
    config = {
        "hidden_act": "gelu",
        "layer_norm_eps": meta.number("{}.attention.layer_norm_epsilon"),
        "type_vocab_size": meta.size("tokenizer.ggml.token_type_count", 1),
    }
    pooler, head = (tensors.get(f"{name}.weight") for name in ("cls", "cls.output"))
    if pooler is None and head is None:
        return config
    if pooler is None or head is None:
        raise ConfigError(
            "the GGUF file holds half of its classifier (cls, cls.output): llama.cpp leaves BERT's pooler out"
        )
    labels = meta.get("{}.classifier.output_labels")
    return {
        **config,
        "architectures": ["BertForSequenceClassification"],
        "num_labels": head.shape[0],
        "id2label": {str(i): label for i, label in enumerate(labels)} if isinstance(labels, list) else None,
    }


def _routing(normalise: bool) -> Settings:
    def settings(meta: Metadata, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
        def outputs(name: str) -> int | None:
            info = tensors.get(f"blk.0.{name}.weight")
            return None if info is None or len(info.shape) < 2 else info.shape[-2]

        return {
            "num_experts": meta.size("{}.expert_count"),
            "num_experts_per_tok": meta.size("{}.expert_used_count"),
            "norm_topk_prob": normalise,
            "moe_intermediate_size": outputs("ffn_gate_exps"),
            "shared_expert_intermediate_size": outputs("ffn_gate_shexp"),
        }

    return settings


MIXTRAL = Family(
    model_type="mixtral",
    names={
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    permuted=True,
    settings=_mixtral,
)
"""Which GGUF files call llama, too."""

DEEPSEEK_V3 = Family(model_type="deepseek_v3", names=_BESIDE_SHARED, settings=_deepseek)
"""Which GGUF files call deepseek2, too."""

FAMILIES = {
    "llama": Family(model_type="llama", permuted=True),
    "qwen2": Family(model_type="qwen2"),
    "qwen3": Family(model_type="qwen3"),
    "qwen2moe": Family(model_type="qwen2_moe", names=_EXPERTS, settings=_routing(False)),
    "qwen3moe": Family(model_type="qwen3_moe", names=_EXPERTS, settings=_routing(True)),
    "gemma2": Family(model_type="gemma2", names=_NORMS_AROUND, norm_offset=1.0, settings=_gemma2),
    "gemma3": Family(model_type="gemma3_text", names=_NORMS_AROUND, norm_offset=1.0, settings=_gemma3),
    "phi3": Family(
        model_type="phi3",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        settings=_phi3,
    ),
    "granite": Family(model_type="granite", permuted=True, settings=_granite),
    "olmo2": Family(
        model_type="olmo2",
        names={
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        settings=_olmo2,
    ),
    "olmoe": Family(model_type="olmoe", names=_EXPERTS, settings=_routing(False)),
    "glm4": Family(
        model_type="glm4",
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "cohere2": Family(model_type="cohere2", settings=_cohere2),
    "seed_oss": Family(
        model_type="seed_oss",
        names={"post_attention_norm": "post_attention_layernorm"},
        settings=_seed_oss,
    ),
    "ernie4_5": Family(model_type="ernie4_5", settings=_ernie),
    "smollm3": Family(model_type="smollm3", permuted=True),
    "llama4": Family(model_type="llama4_text", names=_OF_LLAMA4, settings=_llama4),
    "gpt-oss": Family(model_type="gpt_oss", names=_WITH_SINKS, settings=_gpt_oss),
    "deepseek2": Family(model_type="deepseek_v2", names=_BESIDE_SHARED, settings=_deepseek),
    "bert": Family(
        model_type="bert",
        names=_OF_BERT,
        layers="encoder.layer",
        outer=_AROUND_BERT,
        settings=_bert,
    ),
}
"""GGUF architecture -> what it is."""
