"""The rotary table against transformers' own rotary embedding, for every scaling and both spellings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from bough.base.errors import ConfigError
from bough.device.layers.rotary import rope_parameters, rotary_table

DIM = 16
MOST = 128

SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "legacy": {"type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.3},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-untruncated": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16, "beta_slow": 2,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0 + i / 9 for i in range(8)], "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 4 * MOST, "factor": 4.0,
    },
    "yarn-factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.7},
}  # fmt: skip


def hf_config(scaling: dict[str, Any] | None, **extra: Any) -> Any:
    from transformers import LlamaConfig

    rope = {"rope_theta": 5000.0, **copy.deepcopy(scaling or {})}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return LlamaConfig(
        hidden_size=4 * DIM, num_attention_heads=4, max_position_embeddings=MOST, rope_parameters=rope, **extra
    )


def hf_table(config: Any, n: int) -> torch.Tensor:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(n)[None])
    return torch.cat((cos[0, :, : DIM // 2], sin[0, :, : DIM // 2]), -1)


@pytest.mark.parametrize("name", SCALINGS)
def test_equals_transformers(name: str) -> None:
    scaling = SCALINGS[name]
    expected = hf_table(hf_config(scaling), MOST)
    old = {"rope_theta": 5000.0, "rope_scaling": scaling, "max_position_embeddings": MOST}
    new = {"rope_parameters": {"rope_theta": 5000.0, **(scaling or {})}, "max_position_embeddings": MOST}
    for config in (old, new):
        torch.testing.assert_close(rotary_table(rope_parameters(config), DIM, MOST), expected, rtol=0, atol=2e-6)


def test_dynamic_beyond_the_maximum_equals_transformers_token_by_token() -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = SCALINGS["dynamic"]
    config = {"rope_theta": 5000.0, "rope_scaling": scaling, "max_position_embeddings": MOST}
    table = rotary_table(rope_parameters(config), DIM, 2 * MOST)
    embedding = LlamaRotaryEmbedding(hf_config(scaling))
    for position in range(MOST - 2, 2 * MOST):
        cos, sin = embedding(torch.zeros(1), torch.tensor([[position]]))
        expected = torch.cat((cos[0, 0, : DIM // 2], sin[0, 0, : DIM // 2]))
        torch.testing.assert_close(table[position], expected, rtol=0, atol=5e-5)


def test_longrope_takes_the_long_factors_where_longer_sequences_are_served() -> None:
    config = copy.deepcopy(hf_config({
        "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 32,
    }))  # fmt: skip
    ours = rope_parameters({"max_position_embeddings": MOST, "rope_parameters": config.rope_parameters})
    # One position more than the context that is served.
    for n in (33, MOST + 1):
        torch.testing.assert_close(rotary_table(ours, DIM, n)[: n - 1], hf_table(config, n - 1), rtol=0, atol=2e-6)


def test_a_longer_table_does_not_change_earlier_positions() -> None:
    for name, scaling in SCALINGS.items():
        if name == "longrope":
            continue
        settings = rope_parameters({"rope_scaling": scaling, "max_position_embeddings": MOST})
        assert torch.equal(rotary_table(settings, DIM, MOST), rotary_table(settings, DIM, 3 * MOST)[:MOST])


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": "two"}},
        {"rope_scaling": {"rope_type": "linear", "factor": 0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    ],
)
def test_unusable_settings_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        rotary_table(rope_parameters({"max_position_embeddings": MOST, **config}), DIM, MOST)


def test_factors_of_a_gguf_file_equal_the_scaling_that_they_were_made_from() -> None:
    plain = rope_parameters({"rope_theta": 10000.0, "max_position_embeddings": MOST})
    scaled = rope_parameters(
        {"rope_theta": 10000.0, "max_position_embeddings": MOST, "rope_scaling": SCALINGS["llama3"]}
    )
    # Angles of position 1 are the frequencies.
    half = DIM // 2
    angle = [torch.atan2(t[1, half:], t[1, :half]) for t in (rotary_table(s, DIM, 2) for s in (plain, scaled))]
    factors = (angle[0] / angle[1]).tolist()
    from_file = rope_parameters(
        {"max_position_embeddings": MOST, "rope_scaling": {"rope_type": "factors", "factors": factors}}
    )
    torch.testing.assert_close(rotary_table(from_file, DIM, MOST), rotary_table(scaled, DIM, MOST), atol=1e-4, rtol=0)
    with pytest.raises(ConfigError):
        rotary_table({**from_file, "factors": factors[:-1]}, DIM, MOST)
