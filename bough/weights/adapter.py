"""Reading adapters (LoRA) from folders of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bough.base.errors import ConfigError
from bough.device.lora.updates import LowRank, StackedLowRank, scale_of
from bough.weights.safetensors import SafetensorsFile, read_json, refusal

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")

_HEAD = re.compile(r"(?:.+\.)?lm_head\.base_layer\.weight")
"""The model's own head, which PEFT saves beside what an adapter adds to it."""

_READ = frozenset(
    ("peft_type", "bias", "init_lora_weights", "lora_alpha", "alpha_pattern", "use_rslora", "target_parameters")
)

_NO_MATTER = frozenset((
    # The tensors tell it.
    "r", "rank_pattern", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    # Where it comes from.
    "task_type", "base_model_name_or_path", "revision", "peft_version", "auto_mapping", "inference_mode",
    # Of training, of how weights lie, and of what another setting switches on.
    "lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config", "fan_in_fan_out",
    "megatron_core", "megatron_config", "qalora_group_size",
    # Ties a head's update to one of the embeddings, whose factors have other names, or does nothing.
    "ensure_weight_tying",
))  # fmt: skip
"""Settings that change nothing of what an adapter computes from its tensors."""

_STACKED = re.compile(r"(?P<experts>.*\.experts)(?:\.base_layer)?")
"""What PEFT calls a parameter that holds all experts of a layer, where ``target_parameters`` are changed."""

_KEEP_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Initial values of an adapter that leave the weights of its model as they are."""

_MOST = sys.float_info.max

_PATTERN_MEMORY = 1 << 20
"""Bytes for a compiled pattern."""

Patterns = Sequence[tuple[Any, Any]]
"""Compiled patterns of names, and their values."""


def read_adapter(folder: Path) -> dict[str, LowRank | StackedLowRank]:
    """The updates of an adapter by the names of what they change, in the dtype that the file holds.

    Raises ConfigError for what is damaged, or does more than to add low-rank updates to linear layers.
    """
    config = read_json(folder / CONFIG)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{folder}: adapters of type {kind!r} are not supported; LORA is")
    for name, value in config.items():
        if value and name not in _READ | _NO_MATTER:
            raise ConfigError(f"{folder}: {name} is not supported in an adapter")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{folder}: an adapter with biases is not supported")
    if (initial := config.get("init_lora_weights")) not in _KEEP_BASE:
        raise ConfigError(f"{folder}: an adapter of other weights than its model's ({initial}) is not supported")
    path = folder / WEIGHTS
    if not path.is_file():
        raise ConfigError(f"{folder} has no {WEIGHTS}. {refusal(sorted(p.name for p in folder.iterdir()))}")
    file = SafetensorsFile(path)
    try:
        return _modules(file, config, folder)
    finally:
        file.close()


def _modules(file: SafetensorsFile, config: Mapping[str, Any], folder: Path) -> dict[str, LowRank | StackedLowRank]:
    names: dict[str, dict[str, str]] = {}
    for name, stored in file.tensors.items():
        if _HEAD.fullmatch(name):
            continue
        match = _NAME.fullmatch(name)
        if match is None or len(stored.shape) != 2 or not stored.dtype.is_floating_point:
            raise ConfigError(f"{folder}: {name!r} is no factor of a linear layer's update")
        names.setdefault(match["module"], {})[match["factor"]] = name
    alpha = _alpha_of(config, folder)
    stabilised = bool(config.get("use_rslora"))
    found: dict[str, LowRank | StackedLowRank] = {}
    for module, factors in names.items():
        if len(factors) != 2:
            raise ConfigError(f"{folder}: the update of {module!r} has one factor instead of two")
        a, b = file.tensor(factors["A"]), file.tensor(factors["B"])
        if not len(a) or b.shape[1] != len(a):
            raise ConfigError(f"{folder}: the factors of {module!r} have shapes {list(a.shape)} and {list(b.shape)}")
        if match := _STACKED.fullmatch(module):
            alphas = alpha(f"{match['experts']}.gate_up_proj"), alpha(f"{match['experts']}.down_proj")
            found[module] = StackedLowRank(a, b, alphas, stabilised)
        else:
            found[module] = LowRank(a, b, scale_of(alpha(module), len(a), stabilised))
    return found


def _alpha_of(config: Mapping[str, Any], folder: Path) -> Callable[[str], float]:
    """A function from the name of a module or of a parameter of experts to its alpha."""
    patterns, targets = _patterns(config, "alpha_pattern", folder), config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ConfigError(f"{folder}: target_parameters is no list of names")
    # By PEFT's default where the config says nothing.
    values = [*patterns, (None, config.get("lora_alpha", 8))]
    if wrong := [v for _, v in values if isinstance(v, bool) or not isinstance(v, int | float) or not abs(v) <= _MOST]:
        raise ConfigError(f"{folder}: lora_alpha or alpha_pattern has {wrong[0]!r}, which is no number")

    def alpha(name: str) -> float:
        weight = f"{name}.weight"
        # A layer that was changed by its parameter bears the parameter's name.
        known = weight if any(f".{weight}".endswith(f".{target}") for target in targets) else name
        return float(next(value for pattern, value in values if pattern is None or pattern.fullmatch(known)))

    return alpha


def _patterns(config: Mapping[str, Any], name: str, folder: Path) -> Patterns:
    """The setting ``name`` by regular expressions, the first of which counts that matches a module or its name's end.

    As in PEFT, but in linear time (RE2): nobody's file holds up the engine.
    """
    given = config.get(name) or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{folder}: {name} is no object")
    if not given:
        return ()
    re2: Any = importlib.import_module("re2")
    options = re2.Options()
    options.max_mem, options.log_errors, options.never_capture = _PATTERN_MEMORY, False, True
    try:
        return [(re2.compile(rf"(.*\.)?({key})", options), value) for key, value in given.items()]
    except (re2.error, UnicodeEncodeError) as error:
        raise ConfigError(f"{folder}: {name} has a key that is no regular expression of RE2") from error
