"""Every architecture that llama.cpp writes: GGUF files against transformers with the weights that they stand for."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from bough.base.errors import ConfigError
from bough.weights.gguf import GgufFile
from bough.weights.gguf_families import DEEPSEEK_V3, FAMILIES, MIXTRAL
from bough.weights.gguf_model import describe, join_heads, parameters_of
from tests.driving import make_driver
from tests.models.convert import ARCHITECTURES, write
from tests.models.parity import CASES, WHOLE, YARN, Case, check, distance, ids_of, make_checkpoint

UNSAYABLE = ("mistral-window", "qwen2-window", "qwen3_moe-window", "olmoe-clip", "deepseek_v3-halves")
"""What llama.cpp's files cannot tell, so that they are read as llama.cpp computes them."""

# What the files of these architectures leave open is what the real models have.
ASSUMED = {
    "qwen2_moe": Case("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                    "shared_expert_intermediate_size": 64}),
    "qwen3_moe": Case("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                    "norm_topk_prob": True, "head_dim": 32}),
    "gemma2": Case("gemma2", {"head_dim": 32, "sliding_window": 21, "query_pre_attn_scalar": 32,
                              "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}),
    "gemma3_text": Case("gemma3_text", {**CASES["gemma3_text"].options, "query_pre_attn_scalar": 32}),
    "llama4_text": Case("llama4_text", {
        **CASES["llama4_text"].options, "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1,
    }),
    "llama4_text-yarn": Case("llama4_text", {
        **CASES["llama4_text-yarn"].options, "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1,
    }),
    "gpt_oss": Case("gpt_oss", {**CASES["gpt_oss"].options, "swiglu_limit": 7.0}),
    "deepseek_v2-greedy": Case("deepseek_v2", {**CASES["deepseek_v2-greedy"].options, "attention_bias": False}),
    # Of both scales of YaRN files have one. The latents' projections are whole blocks.
    "deepseek_v3": Case("deepseek_v3", {
        **CASES["deepseek_v3"].options, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
        "rope_parameters": {**YARN, "mscale": 1.3, "mscale_all_dim": 1.3},
    }),
}  # fmt: skip
SAYABLE = {
    name: ASSUMED.get(name, case)
    for name, case in CASES.items()
    if case.model_type in ARCHITECTURES and name not in UNSAYABLE
}


def test_every_architecture_is_tried() -> None:
    tried = {ARCHITECTURES[case.model_type] for case in SAYABLE.values()}
    assert tried == set(FAMILIES) - {"bert"}  # which generates nothing: test_bert_gguf.py
    assert {MIXTRAL.model_type, DEEPSEEK_V3.model_type} <= {case.model_type for case in SAYABLE.values()}


def made(name: str, folder: Path, quantise: gguf.GGMLQuantizationType | None = None) -> tuple[Path, Any]:
    """(GGUF file, transformers' model with the weights that it stands for)."""
    model = make_checkpoint(SAYABLE[name], folder)
    exact = write(folder, folder / "m.gguf", quantise)
    if quantise is not None:
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM

        save_file({k: torch.from_numpy(v).contiguous() for k, v in exact.items()}, folder / "model.safetensors",
                  {"format": "pt"})  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    return folder / "m.gguf", model


@pytest.mark.parametrize("name", SAYABLE)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    path, model = made(name, tmp_path)
    driver = make_driver(path, kernels="reference", context_length=256)
    seqs = [driver.add(row, ids_of(row, n), WHOLE) for row, n in ((1, 50), (2, 3))]
    driver.run(seqs, 4, chunk=17)
    for seq in seqs:
        check(seq, model)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_latents_that_are_not_split(name: str, tmp_path: Path) -> None:
    model = make_checkpoint(SAYABLE[name], tmp_path)
    write(tmp_path, tmp_path / "m.gguf", whole_latents=True)
    driver = make_driver(tmp_path / "m.gguf", kernels="reference", context_length=256)
    seq = driver.add(0, ids_of(1, 40), WHOLE)
    driver.run([seq], 2)
    check(seq, model)


def test_half_a_projection_of_latents_is_refused(tmp_path: Path) -> None:
    path, _ = made("deepseek_v3", tmp_path)
    with GgufFile(path) as file:
        assert parameters_of(file, *describe(file))
        del file.tensors["blk.1.attn_v_b.weight"]
        with pytest.raises(ConfigError, match=r"blk\.1\.attn_v_b\.weight"):
            parameters_of(file, *describe(file))
    with pytest.raises(ConfigError, match="latents"):
        join_heads(torch.zeros(4, 32, 8), torch.zeros(4, 8, 24))


ROUTED = "mixtral", "qwen2_moe", "gpt_oss", "llama4_text", "deepseek_v3"
QUANTISED = [
    *itertools.product(["llama", "mixtral", "gemma3_text", "phi3", "qwen2_moe"], ["Q8_0", "Q4_0", "Q5_0", "Q5_1"]),
    ("gpt_oss", "MXFP4"), ("gpt_oss", "Q8_0"), ("llama4_text", "Q8_0"), ("deepseek_v3", "Q8_0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), QUANTISED)
def test_quantised_files(name: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Kept as the file holds them where there is a kernel, which is told where there is none."""
    path, model = made(name, tmp_path, gguf.GGMLQuantizationType[kind])
    exact = make_driver(path, kernels="reference", context_length=256)
    seq = exact.add(0, ids_of(2, 40), WHOLE)
    exact.run([seq], 2)
    check(seq, model)
    with caplog.at_level(logging.INFO, "bough.weights.loader"):
        kept = make_driver(path, kernels="auto", dtype=torch.bfloat16, context_length=256)
    seq = kept.add(0, ids_of(2, 40), WHOLE)
    kept.run([seq], 2)
    # Of random experts that score nearly alike, a rounding chooses.
    assert distance(seq, model) < (0.5 if name in ROUTED else 0.12)
    assert ("no kernel" in caplog.text) == (kind == "Q5_1")
