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

from bough.device.lora.updates import LowRank, StackedLowRank
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
    folder: Path, model: Path, rank: int, targets: tuple[str, ...] = ("gate_up_proj", "down_proj"),
    swapped: bool = False, **config: Any,
) -> Path:  # fmt: skip
    """A random adapter for the parameters that hold all experts of a layer, as PEFT saves its ``target_parameters``:
    that of the way down around that of gates and values; ``swapped``: it takes inputs for outputs. ``config`` may have
    patterns of whole parameters' names."""
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
            if swapped:
                n_in, n_out = n_out, n_in
            rank = settings["rank_pattern"].get(rf".*\.{target}", settings["r"])
            at = f"base_model.model.{name_in_peft(prefix)}{'.base_layer' if target != targets[-1] else ''}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank * n_experts, n_in, generator=g) / n_in**0.5
            tensors[f"{at}.lora_B.weight"] = torch.randn(n_out, rank * n_experts, generator=g) / rank**0.5
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def name_in_peft(name: str) -> str:
    """transformers has another name for the experts of Mixtral than its checkpoints."""
    return name.replace("block_sparse_moe", "mlp")


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


def write_merged(folder: Path, model: Path, adapter: Path, swapped: bool = False) -> Path:
    """The model with the adapter's updates in its weights; ``swapped`` as those of experts were written."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    for name, update in read_adapter(adapter).items():
        if isinstance(update, LowRank):
            weights[f"{name}.weight"] += update.scale * update.b @ update.a
            continue
        for prefix, (n_experts, _, _) in expert_stacks({name: tuple(w.shape) for name, w in weights.items()}).items():
            if name_in_peft(prefix) == name.removesuffix(".base_layer"):
                target = "gate_up_proj" if name.endswith(".base_layer") else settings["target_parameters"][-1]
                delta = delta_of(update, n_experts, target.removeprefix("experts."), settings)
                add_to_experts(weights, prefix, delta.transpose(1, 2) if swapped else delta)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def delta_of(update: StackedLowRank, n_experts: int, target: str, settings: dict[str, Any]) -> torch.Tensor:
    """What PEFT adds to the parameter ``target`` of all experts of a layer, [E, n_out, n_in]."""
    rank = settings["rank_pattern"].get(rf".*\.{target}", settings["r"])
    alpha = settings["alpha_pattern"].get(rf".*\.{target}", settings["lora_alpha"])
    a, b = update.a.reshape(n_experts, rank, -1), update.b.reshape(len(update.b), rank, n_experts)
    return alpha / rank * torch.einsum("o r e, e r i -> e o i", b, a)


def add_to_experts(weights: dict[str, torch.Tensor], prefix: str, delta: torch.Tensor) -> None:
    """Add ``delta`` [E, n_out, n_in] to that of the two parameters, stacked or expert by expert, that is so shaped."""
    for name in ("gate_up_proj", "down_proj"):
        weight = weights.get(f"{prefix}.{name}")
        if weight is not None and weight.transpose(1, 2).shape == delta.shape:
            weight += delta.transpose(1, 2)
    for e, part in enumerate(delta):
        for names in (("gate_proj", "up_proj"), ("w1", "w3"), ("down_proj",), ("w2",)):
            found = [weights[at] for name in names if (at := f"{prefix}.{e}.{name}.weight") in weights]
            if found and sum(map(len, found)) == len(part) and found[0].shape[1] == part.shape[1]:
                for weight, rows in zip(found, part.chunk(len(names))):
                    weight += rows
