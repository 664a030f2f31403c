"""What a config leaves out is what the config class of transformers assumes, or the model is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.base.config import KVConfig
from bough.base.errors import ConfigError
from bough.device.layers.dummy import DummyContext
from bough.models.registry import MODELS
from bough.weights.loader import open_checkpoint
from bough.worker.build import WorkerSizes, build_worker
from tests.driving import Driver, device_parts
from tests.models.parity import CASES, COMMON, EACH, WHOLE, ids_of

TEXT_PART = {"gemma3": "gemma3_text", "llama4": "llama4_text"}

SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
"""Of models that are refused without them, or else have the large ones that are assumed."""

NOT_READ = {
    "attention_dropout", "bos_token_id", "embd_pdrop", "eos_token_id", "initializer_range", "output_router_logits",
    "pad_token_id", "pretraining_tp", "qk_head_dim", "resid_pdrop", "residual_dropout", "router_aux_loss_coef",
    "router_jitter_noise", "use_cache",
}  # fmt: skip
"""Settings of training, those that follow from others, and ids that come from the tokenizer and for generation."""


def as_transformers_reads(model_type: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The config that ``settings`` become, with nothing left out."""
    from transformers import AutoConfig

    # Which fills in what it is given.
    given = {key: value for key, value in json.loads(json.dumps(settings)).items() if key != "model_type"}
    config = AutoConfig.for_model(TEXT_PART.get(model_type, model_type), **given)
    read: dict[str, Any] = {**config.to_dict(), "model_type": model_type}
    return read


@pytest.fixture
def outcome(tmp_path: Path) -> Callable[[dict[str, Any]], Any]:
    """What the model of a config is, and computes with random parameters; None: it is refused."""
    known: dict[str, Any] = {}

    class Counted(DummyContext):
        def _count(self, name: str, shape: tuple[int, ...]) -> None:
            self.shapes = {**getattr(self, "shapes", {}), name: shape}
            super()._count(name, shape)

    def compute(config: dict[str, Any]) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(config))
        checkpoint = open_checkpoint(tmp_path, weights=False)
        context = Counted(checkpoint, *device_parts("reference", torch.float32))
        sizes = WorkerSizes(n_ids=1 << 20, context_length=300, n_rows=1)
        torch.manual_seed(0)
        try:
            built = build_worker(checkpoint.config, context, sizes, KVConfig(pool_tokens=300), lambda: 1 << 40)
        except ConfigError:
            return None
        driver = Driver(built.worker, built.pool_tokens)
        seq = driver.add(0, ids_of(1, 20), WHOLE)
        driver.run([seq], 1)
        assert not seq.failed
        model: Any = built.worker._runner._model
        return context.shapes, model.c, model.kv_shape, [entry.asked for entry in seq.prompt_logprobs]

    def of(config: dict[str, Any]) -> Any:
        key = json.dumps({name: value for name, value in config.items() if name not in NOT_READ}, sort_keys=True)
        if key not in known:
            known[key] = compute(config)
        return known[key]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_every_setting_may_be_left_out(name: str, outcome: Callable[[dict[str, Any]], Any]) -> None:
    from transformers import PretrainedConfig

    model_type, options = CASES[name].model_type, CASES[name].options
    whole = as_transformers_reads(model_type, {**COMMON, **options.get("text_config", options)})
    of_any_model = PretrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
    left_out = whole.keys() - of_any_model - NOT_READ - SIZES
    assert outcome(whole) is not None and len(left_out) > 5
    for key in sorted(left_out):
        config = {name: value for name, value in whole.items() if name != key}
        found = outcome(config)
        assert found == outcome(as_transformers_reads(model_type, config)), key


@pytest.mark.parametrize("model_type", MODELS.names())
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    assumed = as_transformers_reads(model_type, {})
    if "use_sliding_window" in assumed:  # without which a window is none
        assumed = as_transformers_reads(model_type, {"use_sliding_window": True})
    rope = assumed.pop("rope_parameters", {})
    rope = rope.get("full_attention", rope)
    model: Any = MODELS.get(model_type)
    for key, value in model.defaults.items():
        if key == "rope_scaling":
            assert {**value, "rope_theta": rope["rope_theta"]} == rope
        else:
            assert value == {**rope, **assumed}[key], key
