"""Random adapters for checkpoints in folders, as PEFT saves them, and the same merged into the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

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


def write_stacked_adapter(folder: Path, model: Path, rank: int) -> Path:
    """A random adapter for the parameters that hold all experts of a layer, as PEFT saves its ``target_parameters``:
    that of the way down around that of gates and values."""
    g, tensors = torch.Generator().manual_seed(3), {}
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in file.keys():
            module, _, parameter = name.rpartition(".")
            if module.endswith(".experts") and parameter in ("gate_up_proj", "down_proj"):
                n_experts, n_in, n_out = file.get_slice(name).get_shape()
                at = f"base_model.model.{module}{'.base_layer' if parameter == 'gate_up_proj' else ''}"
                tensors[f"{at}.lora_A.weight"] = torch.randn(rank * n_experts, n_in, generator=g) / n_in**0.5
                tensors[f"{at}.lora_B.weight"] = torch.randn(n_out, rank * n_experts, generator=g) / rank**0.5
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_merged(folder: Path, model: Path, adapter: Path) -> Path:
    """The model with the adapter's updates in its weights."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    for name, update in read_adapter(adapter).items():
        if f"{name}.weight" in weights:
            weights[f"{name}.weight"] += update.scale * update.b @ update.a
            continue
        into = f"{name.removesuffix('.base_layer')}.{'gate_up' if name.endswith('base_layer') else 'down'}_proj"
        n_experts, n_in, n_out = weights[into].shape
        a, b = update.a.reshape(n_experts, -1, n_in), update.b.reshape(n_out, -1, n_experts)
        weights[into] += update.scale * torch.einsum("o r e, e r i -> e i o", b, a)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
