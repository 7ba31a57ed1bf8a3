"""Tiny random LoRA adapters in PEFT's format, and a checkpoint with one merged in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

#: What an adapter changes: every linear module of a decoder layer of the Llama kind.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path, checkpoint: Path, *, seed: int, rank: int = 4, scale: float = 0.1, **config: Any
) -> Path:
    """A random adapter for a checkpoint, in PEFT's format.

    Args:
        folder: where to write it.
        checkpoint: the model's folder.
        seed: of its weights.
        rank: its rank.
        scale: standard deviation of its weights.
        **config: entries of adapter_config.json to set otherwise.

    Returns:
        The folder.
    """
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if name.split(".")[-2] in TARGETS:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=draw) * scale
            tensors[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=draw) * scale
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(TARGETS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(folder: Path, checkpoint: Path, adapter: Path) -> Path:
    """The checkpoint with an adapter added to its weights: what a request with the adapter must compute."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, folder)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    weights, change = load_file(checkpoint / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in sorted({name.rsplit(".", 2)[0] for name in change}):
        product = change[f"{name}.lora_B.weight"].double() @ change[f"{name}.lora_A.weight"].double()
        target = f"{name.removeprefix('base_model.model.')}.weight"
        merged = weights[target].double() + product * (settings["lora_alpha"] / settings["r"])
        weights[target] = merged.to(weights[target].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
