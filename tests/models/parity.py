"""Random checkpoints of every architecture, as transformers makes and saves them, and the comparison with its logits.

An architecture that is added gets an entry in ``CASES``; a test fails without one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.base.params import SamplingParams
from tests.driving import Sequence_

VOCAB = 97
WHOLE = SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0, logprob_token_ids=tuple(range(VOCAB)))
"""All ids are asked for, so that a logprob report is a whole row of logits."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A config of ``model_type`` with ``options``; ``ones`` are parts of names of parameters near 1 beside norms."""

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    bfloat16: float = 6e-2
    """Relative distance of bfloat16 with the same choice of experts: a rounding is 4e-3, and three layers of random
    weights have many."""


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 500.0,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0 + i / 9 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)], "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75,
}  # fmt: skip
HALF = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500.0}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
LLAMA4 = {
    "head_dim": 32, "intermediate_size_mlp": 48, "attention_chunk_size": 10, "num_local_experts": 4, "floor_scale": 7,
    "num_hidden_layers": 4, "interleave_moe_layer_step": 2, "attn_scale": 0.4,
}  # fmt: skip
OLMOE = {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32}

# Cells of 32 numbers, which the compiled kernel takes; with a latent of 20 it is the reference.
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 20, "v_head_dim": 12,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_group": 4, "topk_group": 2,
}  # fmt: skip

CASES = {
    "llama": Case("llama", {"rope_parameters": LLAMA3}),
    "llama-biases": Case("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": Case("mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": Case("mistral", {"sliding_window": 20}),
    "qwen2": Case("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-window": Case("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": Case("qwen3", {"head_dim": 32}),
    "mixtral": Case("mixtral", {"num_local_experts": 4}),
    "qwen2_moe": Case("qwen2_moe", {
        **EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2, "norm_topk_prob": True,
    }, 4.5e-2),
    "qwen3_moe": Case("qwen3_moe", {
        **EXPERTS, "head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [1],
    }, 4.5e-2),
    "qwen3_moe-window": Case("qwen3_moe", {
        **EXPERTS, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1,
    }, 3.5e-2),
    "gemma2": Case("gemma2", {
        "head_dim": 32, "sliding_window": 21, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    }),
    "gemma3_text": Case("gemma3_text", {
        "head_dim": 32, "sliding_window": 10, "query_pre_attn_scalar": 20, "num_hidden_layers": 4,
        "attn_logit_softcapping": 5.0, "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    }),
    "gemma3": Case("gemma3", {
        "text_config": {**COMMON, "head_dim": 32, "sliding_window": 10, "sliding_window_pattern": 2},
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14,
        },
        "image_token_index": 96,
    }),
    "phi3": Case("phi3", {"sliding_window": 33}),
    "phi3-half": Case("phi3", {"rope_parameters": HALF}),
    "phi3-longrope": Case("phi3", {"rope_parameters": LONGROPE}),
    "granite": Case("granite", {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    }),
    "olmo2": Case("olmo2", {"rms_norm_eps": 1e-5}),
    "olmoe": Case("olmoe", OLMOE, 2.5e-2),
    "olmoe-clip": Case("olmoe", {**OLMOE, "norm_topk_prob": True, "clip_qkv": 0.9, "attention_bias": True}, 3e-2),
    "glm4": Case("glm4", {"head_dim": 32}),
    "glm4-whole": Case("glm4", {"head_dim": 32, "rope_parameters": {**HALF, "partial_rotary_factor": 1.0}}),
    "cohere2": Case("cohere2", {"sliding_window": 12, "num_hidden_layers": 4, "logit_scale": 0.3}),
    "seed_oss": Case("seed_oss", {"head_dim": 32}),
    "seed_oss-biases": Case("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    "ernie4_5": Case("ernie4_5", {"head_dim": 32}),
    "ernie4_5-biases": Case("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "llama4_text": Case("llama4_text", {**LLAMA4, "num_experts_per_tok": 2, "rope_parameters": LLAMA3}, 0.2),
    "llama4_text-yarn": Case("llama4_text", {**LLAMA4, "rms_norm_eps": 1e-2, "rope_parameters": YARN}, 0.2),
    "llama4": Case("llama4", {
        "text_config": {**COMMON, **LLAMA4, "attention_bias": True, "use_qk_norm": False, "moe_layers": [0, 1]},
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14, "vision_output_dim": 16, "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
    }, 0.2),
    "smollm3": Case("smollm3", {"num_hidden_layers": 4}),
    "gpt_oss": Case("gpt_oss", {
        "head_dim": 32, "sliding_window": 11, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 2.0,
        "num_hidden_layers": 4, "rope_parameters": {**YARN, "truncate": False},
    }, 9e-2),
    "deepseek_v2": Case("deepseek_v2", {
        **LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5,
    }, 4.5e-2),
    "deepseek_v2-greedy": Case("deepseek_v2", {
        **LATENT, "q_lora_rank": 16, "attention_bias": True, "n_group": None, "topk_group": None, "v_head_dim": 20,
    }, 2.5e-2),
    "deepseek_v3": Case("deepseek_v3", {
        **LATENT, "q_lora_rank": 16, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    }, 3e-2),
    "deepseek_v3-halves": Case("deepseek_v3", {
        **LATENT, "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "kv_lora_rank": 20,
        "routed_scaling_factor": 1.0,
    }, 3.5e-2),
}  # fmt: skip

EACH: list[Any] = [
    name if name == case.model_type else pytest.param(name, marks=pytest.mark.slow) for name, case in CASES.items()
]
"""The cases as parameters of a test: one of each architecture by default, variants of it where there is time."""


def make_checkpoint(case: Case, folder: Path) -> Any:
    """Write the case's model to ``folder``; the model in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(case.model_type, **{**COMMON, **case.options})
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM  # whose methods are not annotated
    model = made.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    centred = case.model_type.startswith("gemma")
    for name, value in model.named_parameters():
        norm = "norm" in name
        # Wide enough that attention and tokens really vary.
        spread = 0.2 if norm or name.endswith("bias") else 0.25
        torch.nn.init.normal_(value, 1.0 if norm and not centred else 0.0, spread)
    for name, value in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(value, 0.0, 0.2)
    model.save_pretrained(folder)
    return model


def ids_of(seed: int, n: int) -> list[int]:
    """Random ids."""
    return random.Random(seed).choices(range(VOCAB), k=n)


@torch.no_grad()
def reference(model: Any, ids: list[int]) -> torch.Tensor:
    """[len(ids), VOCAB] log-probabilities of transformers, computed in one piece."""
    logprobs: torch.Tensor = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return logprobs


def check(seq: Sequence_, model: Any, tolerance: float = 1e-4) -> None:
    """Every reported row of logprobs equals the one of transformers, and greedy tokens are its largest."""
    assert not seq.failed
    expected = reference(model, seq.ids)
    entries = [*seq.prompt_logprobs, *seq.logprobs]
    first = len(seq.ids) - len(entries)
    for position, entry in enumerate(entries, first):
        got, row = torch.tensor([value for _, value in entry.asked]), expected[position - 1]
        assert entry.token == seq.ids[position]
        assert (got - row).abs().max() <= tolerance * row.abs().max(), f"logits behind {position} tokens"
    for position in range(seq.n_prompt, len(seq.ids)):
        row = expected[position - 1]
        assert row[seq.ids[position]] >= row.max() - tolerance * row.abs().max()


def distance(seq: Sequence_, model: Any) -> float:
    """Largest relative distance of a reported row from transformers' in float32."""
    expected = reference(model, seq.ids)
    entries = [*seq.prompt_logprobs, *seq.logprobs]
    first = len(seq.ids) - len(entries)
    found = torch.tensor([[value for _, value in entry.asked] for entry in entries])
    rows = expected[first - 1 : -1] if first else expected[:-1]
    return float(((found - rows).norm(dim=1) / rows.norm(dim=1)).max())
