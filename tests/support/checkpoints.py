"""Formulas of a checkpoint's blocks, from its files, in NumPy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from steercap.lab.mechanism.weights.model import ModelWeights


def cosine(one: np.ndarray, other: np.ndarray) -> Any:
    return (one * other).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1)


class Checkpoint:
    """One checkpoint's formulas, from its files, float64."""

    def __init__(self, family: str, path: Path) -> None:
        self.family = family
        self.tensors: dict[str, torch.Tensor] = {}
        for file in path.glob("*.safetensors"):
            self.tensors |= load_file(file)
        self.weights = ModelWeights.open(path)
        self.eps = self.weights._config.rms_norm_eps
        self.query_heads = self.weights._config.num_attention_heads

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name].double().numpy()

    def norm(self, rows: np.ndarray, name: str) -> Any:
        """RMSNorm; Gemma's gains are 1 + w."""
        gain = self[f"{name}.weight"] + (self.family == "gemma2")
        return gain * rows / np.sqrt((rows**2).mean(-1, keepdims=True) + self.eps)

    def linear(self, rows: np.ndarray, name: str) -> Any:
        bias = self[f"{name}.bias"] if f"{name}.bias" in self.tensors else 0.0
        return rows @ self[f"{name}.weight"].T + bias

    def before(self, rows: np.ndarray, layer: int, block: str) -> Any:
        names = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}
        if self.family == "gemma2":
            names["mlp"] = "pre_feedforward_layernorm"
        return self.norm(rows, f"model.layers.{layer}.{names[block]}")

    def feed_forward(self, rows: np.ndarray, layer: int) -> Any:
        prefix = f"model.layers.{layer}"
        normed = self.before(rows, layer, "mlp")
        gate, up = (self.linear(normed, f"{prefix}.mlp.{part}_proj") for part in ("gate", "up"))
        if self.family == "gemma2":  # GELU by tanh
            gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        found = self.linear(gate * up, f"{prefix}.mlp.down_proj")
        return self.norm(found, f"{prefix}.post_feedforward_layernorm") if self.family == "gemma2" else found

    def heads(self, rows: np.ndarray, layer: int, part: str) -> Any:
        """Queries, keys or values of each query head, [rows, heads, head_dim]."""
        name = f"model.layers.{layer}.self_attn.{part}"
        found = self.linear(self.before(rows, layer, "attention"), f"{name}_proj")
        dim = self[f"model.layers.{layer}.self_attn.q_proj.weight"].shape[0] // self.query_heads
        found = found.reshape(len(rows), -1, dim)
        if self.family == "qwen3" and part != "v":
            found = self.norm(found, f"{name}_norm")
        return found.repeat(self.query_heads // found.shape[1], axis=1)

    def scores(self, queries: np.ndarray, keys: np.ndarray, layer: int) -> Any:
        """q · k / √head_dim of pairs of rows, mean over heads."""
        q, k = self.heads(queries, layer, "q"), self.heads(keys, layer, "k")
        return (q * k).sum(2).mean(1) / math.sqrt(q.shape[2])

    def writes(self, rows: np.ndarray, layer: int) -> Any:
        prefix = f"model.layers.{layer}"
        values = self.heads(rows, layer, "v").reshape(len(rows), -1)
        found = self.linear(values, f"{prefix}.self_attn.o_proj")
        return self.norm(found, f"{prefix}.post_attention_layernorm") if self.family == "gemma2" else found
