"""Reading adapters (LoRA) from folders of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bough.base.errors import ConfigError
from bough.device.lora.pool import LowRank
from bough.weights.safetensors import SafetensorsFile, read_json, refusal

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")

_UNSUPPORTED = ("use_dora", "modules_to_save", "lora_bias", "layer_replication", "trainable_token_indices")


def read_adapter(folder: Path) -> dict[str, LowRank]:
    """The updates of an adapter by the names of the projections, in the dtype that the file holds.

    Raises ConfigError for what is damaged, or does more than to add low-rank updates to linear layers.
    """
    config = read_json(folder / CONFIG)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{folder}: adapters of type {kind!r} are not supported; LORA is")
    for name in _UNSUPPORTED:
        if config.get(name):
            raise ConfigError(f"{folder}: {name} is not supported in an adapter")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{folder}: an adapter with biases is not supported")
    path = folder / WEIGHTS
    if not path.is_file():
        raise ConfigError(f"{folder} has no {WEIGHTS}. {refusal(sorted(p.name for p in folder.iterdir()))}")
    file = SafetensorsFile(path)
    try:
        return _modules(file, config, folder)
    finally:
        file.close()


def _modules(file: SafetensorsFile, config: Mapping[str, Any], folder: Path) -> dict[str, LowRank]:
    names: dict[str, dict[str, str]] = {}
    for name, stored in file.tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or len(stored.shape) != 2 or not stored.dtype.is_floating_point:
            raise ConfigError(f"{folder}: {name!r} is no factor of a linear layer's update")
        names.setdefault(match["module"], {})[match["factor"]] = name
    found = {}
    for module, factors in names.items():
        if len(factors) != 2:
            raise ConfigError(f"{folder}: the update of {module!r} has one factor instead of two")
        a, b = file.tensor(factors["A"]), file.tensor(factors["B"])
        if not len(a) or b.shape[1] != len(a):
            raise ConfigError(f"{folder}: the factors of {module!r} have shapes {list(a.shape)} and {list(b.shape)}")
        found[module] = LowRank(a, b, _scale(config, module, len(a), folder))
    return found


def _scale(config: Mapping[str, Any], module: str, rank: int, folder: Path) -> float:
    """``alpha / rank``, or over its root with rank-stabilised adapters (Kalajdzievski 2023)."""
    alpha = _pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", rank))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ConfigError(f"{folder}: lora_alpha is {alpha!r} and no number")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pattern(patterns: Any, module: str, default: Any) -> Any:
    """The value of the first key of ``patterns`` that names ``module`` or the end of its name, as in PEFT."""
    for key, value in patterns.items() if isinstance(patterns, dict) else ():
        if module == key.lstrip("^") or module.endswith(f".{key}"):
            return value
    return default
