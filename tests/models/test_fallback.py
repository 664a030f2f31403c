"""Architectures without a file here run through transformers, on our KV, and compute what transformers computes."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bough.base.config import KVConfig
from bough.base.errors import ConfigError
from bough.device.layers.context import LayerContext
from bough.models.registry import MODELS
from bough.weights.loader import open_checkpoint
from bough.worker.build import WorkerSizes, build_worker
from tests.driving import device_parts, make_driver
from tests.models.parity import HALF, LONGROPE, WHOLE, Case, check, distance, ids_of, make_checkpoint

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
"""Checkpoints hold them one by one or stacked, modules of transformers in other shapes."""

CASES = {
    "starcoder2": Case("starcoder2", {"sliding_window": 20, "use_bias": True}),
    "olmo3": Case("olmo3", {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2,
                            "num_hidden_layers": 4, "rms_norm_eps": 1e-5}),
    "cohere": Case("cohere", {"logit_scale": 0.3}),
    "gpt2": Case("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "opt": Case("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt_bigcode": Case("gpt_bigcode", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "biogpt": Case("biogpt"),
    "stablelm": Case("stablelm", {"rope_parameters": HALF}),
    "gpt_neox": Case("gpt_neox"),  # whose head has another name in checkpoints
    # The class's own window is not none, and with none all layers rotate.
    "exaone4": Case("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "apertus": Case("apertus"),  # with buffers in checkpoints
    "phimoe": Case("phimoe", EXPERTS),
    "granitemoe": Case("granitemoe", EXPERTS),
    "jetmoe": Case("jetmoe", {**EXPERTS, "kv_channels": 16}),
    "glm4_moe": Case("glm4_moe", {
        **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "head_dim": 16,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert name not in MODELS.names()
    model = make_checkpoint(CASES[name], tmp_path)
    with caplog.at_level(logging.WARNING):
        driver = make_driver(tmp_path, kernels="auto", page_size=4)
    assert "slower" in caplog.text
    whole = driver.add(0, ids_of(1, 60), WHOLE)
    others = [driver.add(row, ids_of(row, n), WHOLE) for row, n in ((1, 1), (2, 30))]
    rng = random.Random(3)
    while waiting := [s for s in [whole, *others] if len(s.generated) < 3]:
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        driver.step(*[(s, rng.randint(1, s.left)) for s in chosen])
    hit = driver.add(5, [*whole.ids[:48], *ids_of(6, 9)], WHOLE, shared=whole.locs[:48], logprob_from=49)
    driver.run([hit, whole], 6)
    for seq in (whole, *others, hit):
        check(seq, model)
    if name == "starcoder2":
        rounded = make_driver(tmp_path, kernels="auto", dtype=torch.bfloat16)
        seq = rounded.add(0, ids_of(2, 40), WHOLE)
        rounded.run([seq], 3)
        assert distance(seq, model) < 6e-2


@pytest.mark.parametrize(("name", "routed"), [("phimoe", True), ("granitemoe", True), ("opt", False)])
def test_models_with_experts_say_so(name: str, routed: bool, tmp_path: Path) -> None:
    make_checkpoint(CASES[name], tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    context = LayerContext(checkpoint, *device_parts("reference", torch.float32))
    sizes = WorkerSizes(n_ids=97, context_length=64, n_rows=2)
    built = build_worker(checkpoint.config, context, sizes, KVConfig(pool_tokens=128), lambda: 1 << 40)
    checkpoint.close()
    assert built.routed == routed


ROTARIES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0},
    "longrope": {**LONGROPE, "short_factor": [1.0 + i / 9 for i in range(8)], "long_factor": [2.0, *range(3, 10)],
                 "original_max_position_embeddings": 32, "partial_rotary_factor": 1.0, "factor": 8.0},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROTARIES)
def test_an_answer_does_not_depend_on_its_company(kind: str, tmp_path: Path) -> None:
    """Where transformers takes other frequencies once any position of a call is large."""
    options = {"rope_parameters": ROTARIES[kind], "max_position_embeddings": 32 if kind == "dynamic" else 256}
    make_checkpoint(Case("starcoder2", options), tmp_path)
    outcomes = []
    for company in (0, 60):
        driver = make_driver(tmp_path, kernels="auto")
        others = [driver.add(1, ids_of(1, company), WHOLE)] if company else []
        seq = driver.add(0, ids_of(2, 20), WHOLE)
        driver.run([*others, seq], 8)
        outcomes.append(torch.tensor([[value for _, value in e.asked] for e in (*seq.prompt_logprobs, *seq.logprobs)]))
    torch.testing.assert_close(*outcomes, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options"),
    [("bloom", {"n_layer": 1, "hidden_size": 32, "n_head": 2}), ("mamba", {"num_hidden_layers": 1, "hidden_size": 32}),
     ("diffllama", {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}),
     ("mpt", {"d_model": 32, "n_heads": 2, "n_layers": 1}), ("nothing", {}),
     ("codegen", {"n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8}),
     ("bart", {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}),
     ("camembert", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}),
     ("falcon_h1", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
                    "intermediate_size": 32, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8})],
)  # fmt: skip
def test_what_is_no_such_model_is_refused(name: str, options: dict[str, int], tmp_path: Path) -> None:
    """Layers that attend in another way than through transformers' interface, in both directions, from positions of
    their own, or not only."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if name == "nothing":
        make_checkpoint(CASES["cohere"], tmp_path)
        config = tmp_path / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "nothing"}))
    else:
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, vocab_size=97, **options))
        made.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="not supported|cannot build|do not run|need a model file"):
        make_driver(tmp_path)


@pytest.mark.parametrize(("change", "message"), [("lacks", "lacks 1"), ("has", "has, of no known use, 1")])
def test_parameters_that_do_not_fit_are_refused(change: str, message: str, tmp_path: Path) -> None:
    make_checkpoint(CASES["phimoe"], tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    if change == "lacks":
        del held["model.norm.weight"]
    else:
        held["model.layers.0.mlp.extra.weight"] = torch.zeros(3)
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        make_driver(tmp_path)
