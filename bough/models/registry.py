"""Architectures that can be served, by the ``model_type`` of their config."""

from __future__ import annotations

from importlib.util import find_spec

from bough.base.errors import ConfigError
from bough.base.registry import Registry
from bough.models.base import Model

MODELS: Registry[type[Model]] = Registry("model type")
MODELS.add("bert", "bough.models.bert:Bert")
MODELS.add("cohere2", "bough.models.cohere2:Cohere2")
MODELS.add("deepseek_v2", "bough.models.deepseek_v2:DeepseekV2")
MODELS.add("deepseek_v3", "bough.models.deepseek_v3:DeepseekV3")
MODELS.add("ernie4_5", "bough.models.ernie4_5:Ernie45")
MODELS.add("gemma2", "bough.models.gemma2:Gemma2")
MODELS.add("gemma3", "bough.models.gemma3:Gemma3")
MODELS.add("gemma3_text", "bough.models.gemma3:Gemma3")
MODELS.add("glm4", "bough.models.glm4:Glm4")
MODELS.add("gpt_oss", "bough.models.gpt_oss:GptOss")
MODELS.add("granite", "bough.models.granite:Granite")
MODELS.add("llama", "bough.models.llama:Llama")
MODELS.add("llama4", "bough.models.llama4:Llama4")
MODELS.add("llama4_text", "bough.models.llama4:Llama4")
MODELS.add("mistral", "bough.models.mistral:Mistral")
MODELS.add("mixtral", "bough.models.mixtral:Mixtral")
MODELS.add("olmo2", "bough.models.olmo2:Olmo2")
MODELS.add("olmoe", "bough.models.olmoe:Olmoe")
MODELS.add("phi3", "bough.models.phi3:Phi3")
MODELS.add("qwen2", "bough.models.qwen2:Qwen2")
MODELS.add("qwen2_moe", "bough.models.qwen2_moe:Qwen2Moe")
MODELS.add("qwen3", "bough.models.qwen3:Qwen3")
MODELS.add("qwen3_moe", "bough.models.qwen3_moe:Qwen3Moe")
MODELS.add("seed_oss", "bough.models.seed_oss:SeedOss")
MODELS.add("smollm3", "bough.models.smollm3:SmolLM3")


def model_class(model_type: str) -> type[Model]:
    """The architecture with that name, or the one that runs what transformers builds; ConfigError without that."""
    if model_type in MODELS.names():
        return MODELS.get(model_type)
    if find_spec("transformers") is None:
        raise ConfigError(
            f"there is no model file for {model_type!r} (there are {', '.join(MODELS.names())}); "
            "pip install 'bough[transformers]' to run it through transformers, more slowly"
        )
    from bough.models.fallback import TransformersModel

    return TransformersModel
