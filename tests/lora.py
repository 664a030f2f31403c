"""Random adapters for checkpoints in folders, as PEFT saves them, and the same merged into the weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bough.device.lora.updates import StackedLowRank
from bough.weights.adapter import read_adapter

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path, model: Path, targets: tuple[str, ...] = TARGETS, rank: int = 8, seed: int = 0, size: float = 1.0
) -> Path:
    """A random adapter for the linear layers of ``model`` with these names; ``size`` is that of its updates."""
    g, tensors = torch.Generator().manual_seed(seed), {}
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in file.keys():
            module = name.removesuffix(".weight")
            if module.endswith(targets):
                prefix = f"base_model.model.{module}"
                n_out, n_in = file.get_slice(name).get_shape()
                tensors[f"{prefix}.lora_A.weight"] = size * torch.randn(rank, n_in, generator=g) / n_in**0.5
                tensors[f"{prefix}.lora_B.weight"] = torch.randn(n_out, rank, generator=g) / rank**0.5
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_stacked_adapter(
    folder: Path, model: Path, rank: int, targets: tuple[str, ...] = ("gate_up_proj", "down_proj"), **config: Any
) -> Path:
    """A random adapter for the parameters that hold all experts of a layer, as PEFT saves its ``target_parameters``:
    that of the way down around that of gates and values. ``config`` may have patterns of whole parameters' names."""
    settings = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "rank_pattern": {}, "alpha_pattern": {},
        "target_parameters": [f"experts.{target}" for target in targets], **config,
    }  # fmt: skip
    g, tensors = torch.Generator().manual_seed(3), {}
    with safe_open(model / "model.safetensors", "pt") as file:
        stacks = expert_stacks({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})
    for prefix, (n_experts, hidden, inner) in stacks.items():
        for target in targets:
            n_in, n_out = (hidden, 2 * inner) if target == "gate_up_proj" else (inner, hidden)
            rank = settings["rank_pattern"].get(rf".*\.{target}", settings["r"])
            at = f"base_model.model.{prefix}{'.base_layer' if target != targets[-1] else ''}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank * n_experts, n_in, generator=g) / n_in**0.5
            tensors[f"{at}.lora_B.weight"] = torch.randn(n_out, rank * n_experts, generator=g) / rank**0.5
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def expert_stacks(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, int, int]]:
    """By the names of the experts of a layer: how many, of which hidden and inner size."""
    found = {}
    for name, shape in shapes.items():
        if match := re.fullmatch(r"(.+\.experts)\.down_proj", name):
            n_experts, inner, hidden = shape
            found[match[1]] = n_experts, hidden, inner
        elif match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(?:down_proj|w2)\.weight", name):
            hidden, inner = shape
            found[match[1]] = max(found.get(match[1], (0,))[0], int(match[2]) + 1), hidden, inner
    return found


def write_merged(folder: Path, model: Path, adapter: Path) -> Path:
    """The model with the adapter's updates in its weights."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    stacks = expert_stacks({name: tuple(weight.shape) for name, weight in weights.items()})
    for name, update in read_adapter(adapter).items():
        if isinstance(update, StackedLowRank):
            add_to_experts(weights, name, stacks[name.removesuffix(".base_layer")][0], update, settings)
        else:
            weights[f"{name}.weight"] += update.scale * update.b @ update.a
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def add_to_experts(
    weights: dict[str, torch.Tensor], name: str, n_experts: int, update: StackedLowRank, settings: dict[str, Any]
) -> None:
    """Add what PEFT adds to one of the parameters that hold all experts of a layer."""
    first = name.endswith(".base_layer") or settings["target_parameters"] == ["experts.gate_up_proj"]
    prefix, target = name.removesuffix(".base_layer"), "gate_up_proj" if first else "down_proj"
    rank = settings["rank_pattern"].get(rf".*\.{target}", settings["r"])
    alpha = settings["alpha_pattern"].get(rf".*\.{target}", settings["lora_alpha"])
    a = update.a.reshape(n_experts, rank, -1)
    b = update.b.reshape(-1, rank, n_experts)
    delta = alpha / rank * torch.einsum("o r e, e r i -> e o i", b, a)
    if f"{prefix}.{target}" in weights:
        weights[f"{prefix}.{target}"] += delta.transpose(1, 2)
        return
    names = ("gate_proj", "up_proj") if first else ("down_proj",)
    for e in range(n_experts):
        for name, part in zip(names, delta[e].chunk(len(names))):
            weights[f"{prefix}.{e}.{name}.weight"] += part
