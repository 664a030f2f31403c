"""Adapters in PEFT's folders: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bough.base.errors import ConfigError
from bough.device.lora.updates import LowRank, StackedLowRank
from bough.weights.adapter import read_adapter

PREFIX = "base_model.model.model.layers.0.self_attn"


def write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}))
    if tensors is None:
        tensors = {
            f"{PREFIX}.q_proj.lora_A.weight": torch.ones(4, 6),
            f"{PREFIX}.q_proj.lora_B.weight": torch.ones(8, 4),
        }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "scale"),
    [({}, 2.0), ({"use_rslora": True}, 4.0), ({"alpha_pattern": {"q_proj": 4}}, 1.0),
     ({"alpha_pattern": {"k_proj": 4}}, 2.0), ({"alpha_pattern": {r"layers\.\d+\.self_attn\.[qk]_proj": 4}}, 1.0),
     ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 4}}, 1.0), ({"alpha_pattern": {"v_proj|q_proj": 4}}, 1.0),
     ({"alpha_pattern": {"^layers.0.self_attn.q_proj": 4, "_proj": 4, "q": 4}}, 2.0),
     ({"alpha_pattern": {".*q_proj": 12, "q_proj": 4}}, 3.0), ({"alpha_pattern": {r"(\w+\.?)*x": 4}}, 2.0),
     ({"rank_pattern": {"q_proj": 4}, "r": 8, "megatron_core": "megatron.core", "use_dora": False}, 2.0),
     ({"target_parameters": ["q_proj.weight"], "alpha_pattern": {"q_proj": 12, "q_proj.weight": 4}}, 1.0),
     ({"init_lora_weights": "gaussian"}, 2.0), ({"lora_alpha": 1.5}, 0.375), ({"bias": "none"}, 2.0),
     ({"ensure_weight_tying": True}, 2.0)],
)  # fmt: skip
def test_the_scale_is_that_of_peft(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    (name, update), = read_adapter(write(tmp_path, **config)).items()  # fmt: skip
    assert name == "model.layers.0.self_attn.q_proj"
    assert (
        isinstance(update, LowRank) and update.scale == scale and update.a.shape == (4, 6) and update.b.shape == (8, 4)
    )


@pytest.mark.parametrize(
    ("config", "alphas"),
    [({}, (8, 8)), ({"alpha_pattern": {r".*\.gate_up_proj": 16}}, (16, 8)), ({"alpha_pattern": {"experts": 4}}, (8, 8)),
     ({"alpha_pattern": {"experts.down_proj": 4, "_proj": 5}, "rank_pattern": {r".*\.gate_up_proj": 8}}, (8, 4))],
)  # fmt: skip
@pytest.mark.parametrize("name", ["mlp.experts", "mlp.experts.base_layer"])
def test_parameters_of_experts_have_the_names_of_peft(
    tmp_path: Path, config: dict[str, Any], alphas: tuple[int, int], name: str
) -> None:
    tensors = {f"{name}.lora_A.weight": torch.ones(8, 6), f"{name}.lora_B.weight": torch.ones(8, 8)}
    update = read_adapter(write(tmp_path, tensors, target_parameters=["experts.down_proj"], **config))[name]
    assert isinstance(update, StackedLowRank) and update.alphas == alphas


@pytest.mark.parametrize(
    ("config", "match"),
    [({"peft_type": "IA3"}, "IA3"), ({"use_dora": True}, "use_dora"), ({"modules_to_save": ["lm_head"]}, "modules_to_"),
     ({"alora_invocation_tokens": [1]}, "alora_inv"), ({"use_qalora": True}, "use_qalora"),
     ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"), ({"of_tomorrow": 1}, "of_tomorrow"),
     ({"init_lora_weights": "pissa"}, "pissa"), ({"init_lora_weights": ["x"]}, "other weights"),
     ({"alpha_pattern": {"(": 1}}, "RE2"), ({"alpha_pattern": {"\udc80": 1}}, "RE2"), ({"alpha_pattern": ["q"]}, "no"),
     ({"bias": "all"}, "biases"), ({"lora_alpha": "x"}, "lora_alpha"), ({"lora_alpha": True}, "lora_alpha"),
     ({"lora_alpha": 10**400}, "lora_alpha"), ({"alpha_pattern": {"x": None}}, "no number"),
     ({"target_parameters": "x"}, "target_parameters")],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(tmp_path: Path, config: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_adapter(write(tmp_path, **config))


def test_the_head_of_the_model_itself_is_left_out(tmp_path: Path) -> None:
    head = "base_model.model.lm_head"
    tensors = {f"{head}.lora_A.weight": torch.ones(4, 6), f"{head}.lora_B.weight": torch.ones(9, 4)}
    folder = write(tmp_path, {**tensors, f"{head}.base_layer.weight": torch.ones(9, 6)}, target_modules=["lm_head"])
    assert list(read_adapter(folder)) == ["lm_head"]


@pytest.mark.parametrize(
    ("names", "match"),
    [({"x.lora_A.weight": (4, 6)}, "one factor"), ({"x.weight": (4, 6)}, "no factor"),
     ({"x.lora_A.weight": (4, 6), "x.lora_B.weight": (8, 5)}, "shapes"),
     ({"x.lora_A.weight": (4,), "x.lora_B.weight": (8, 4)}, "no factor"),
     ({"x.lora_embedding_A": (4, 6)}, "no factor"), ({"lm_head.weight": (4, 6)}, "no factor"),
     ({"q_proj.base_layer.weight": (4, 6)}, "no factor")],
)  # fmt: skip
def test_wrong_tensors_are_refused(tmp_path: Path, names: dict[str, tuple[int, ...]], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_adapter(write(tmp_path, {name: torch.ones(shape) for name, shape in names.items()}))


def test_missing_and_pickled_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapter_config"):
        read_adapter(tmp_path)
    folder = write(tmp_path)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match="pickles"):
        read_adapter(folder)
