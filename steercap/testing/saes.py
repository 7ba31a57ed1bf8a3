"""Random SAEs in the file formats of other programs, with a forward pass in NumPy independent of `steercap.saes`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file

Array: TypeAlias = "npt.NDArray[np.float32]"

#: Tensors of each architecture besides `W_enc`, `W_dec` and `b_dec`, with one number per feature.
OWN: Final[Mapping[str, tuple[str, ...]]] = {
    "standard": ("b_enc",),
    "topk": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "b_mag", "r_mag"),
    "transcoder": ("b_enc",),
    "jumprelu_transcoder": ("b_enc", "threshold"),
}
#: Relative error of a float32 scalar product, over the product of the norms: a few roundings.
NEAR: Final = 2e-6


@dataclass(frozen=True)
class RandomSAE:
    """SAE with random weights, with its files and its forward pass.

    Args:
        architecture: SAELens's name of the architecture, a key of `OWN`.
        d_in, d_sae: number of elements of a row, and of features.
        d_out: number of elements of a transcoder's output; 0 for `d_in`.
        k: number of active features of "topk".
        seed: seed of the weights.
        configuration: further fields of `cfg.json`, which override the defaults.
    """

    architecture: str
    d_in: int
    d_sae: int
    d_out: int = 0
    k: int = 16
    seed: int = 0
    configuration: tuple[tuple[str, Any], ...] = ()

    @property
    def tensors(self) -> dict[str, Array]:
        """Weights by SAELens's names, float32; biases and thresholds make about a tenth of all features active."""
        drawn, scale = np.random.default_rng(self.seed), self.d_in**-0.5
        found = {
            "W_enc": drawn.standard_normal((self.d_in, self.d_sae)) * scale,
            "W_dec": drawn.standard_normal((self.d_sae, self.d_out or self.d_in)) * scale,
            "b_dec": drawn.standard_normal(self.d_out or self.d_in),
        }
        for name in OWN[self.architecture]:
            numbers = drawn.standard_normal(self.d_sae) * 0.3
            found[name] = np.abs(numbers) + 0.5 if name == "threshold" else numbers - (name != "r_mag")
        return {name: numbers.astype(np.float32) for name, numbers in found.items()}

    @property
    def config(self) -> dict[str, Any]:
        """Content of the SAE's `cfg.json`, as SAELens 6 writes it."""
        transcodes = "transcoder" in self.architecture
        hooks = {"hook_name": "blocks.1.hook_resid_post"}
        if transcodes:
            hooks = {"hook_name": "blocks.1.hook_resid_pre", "hook_name_out": "blocks.1.hook_mlp_out"}
        found = {
            "d_in": self.d_in,
            "d_sae": self.d_sae,
            "dtype": "float32",
            "device": "cpu",
            "apply_b_dec_to_input": not transcodes,
            "normalize_activations": "none",
            "reshape_activations": "none",
            "metadata": {"sae_lens_version": "6.54.12", **hooks},
            "architecture": self.architecture,
        }
        found |= {"k": self.k} if self.architecture == "topk" else {}
        found |= {"d_out": self.d_out or self.d_in} if transcodes else {}
        return found | dict(self.configuration)

    def write(self, folder: Path) -> Path:
        """Write `cfg.json` and `sae_weights.safetensors`, SAELens's files, to a folder; return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cfg.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "sae_weights.safetensors")
        return folder

    def write_npz(self, folder: Path) -> Path:
        """Write `params.npz`, Gemma Scope's file for jumprelu SAEs, to a folder; return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {name.lower(): tensor for name, tensor in self.tensors.items()}
        np.savez(folder / "params.npz", **arrays)
        return folder

    def encode(self, rows: torch.Tensor) -> npt.NDArray[np.float64]:
        """Return the feature activations of rows [rows, ...], computed in float64: [rows, d_sae]."""
        config, of = self.config, {name: tensor.astype(np.float64) for name, tensor in self.tensors.items()}
        inputs = rows.flatten(1).double().numpy()
        match config["normalize_activations"]:
            case "layer_norm":
                inputs = inputs - inputs.mean(1, keepdims=True)
                inputs = inputs / (inputs.std(1, keepdims=True, ddof=1) + 1e-5)
            case "constant_norm_rescale":
                inputs = inputs * np.sqrt(self.d_in) / np.linalg.norm(inputs, axis=1, keepdims=True)
        if config["apply_b_dec_to_input"]:
            inputs = inputs - of["b_dec"]
        products = inputs @ of["W_enc"]
        if self.architecture == "gated":
            opened = products + of["b_gate"] > 0
            return np.where(opened, np.maximum(products * np.exp(of["r_mag"]) + of["b_mag"], 0), 0)
        products = products + of["b_enc"]
        if self.architecture == "topk":
            least = np.sort(products, axis=1)[:, -self.k, None]
            products = np.where(products >= least, products, 0)
        floor = of.get("threshold", np.zeros(self.d_sae))
        return np.where((products > floor) & (products > 0), products, 0)

    def slack(self, rows: torch.Tensor) -> npt.NDArray[np.float64]:
        """Return the tolerance of float32 against `encode` where a feature is active in both: float64 [rows, 1].

        If it is active in only one, its pre-activation is within this tolerance of the threshold, or of the k-th.
        """
        lengths = np.linalg.norm(rows.flatten(1).double().numpy(), axis=1) + np.linalg.norm(self.tensors["b_dec"])
        factor = np.exp(np.abs(self.tensors["r_mag"]).max()) if self.architecture == "gated" else 1.0
        found: npt.NDArray[np.float64] = (NEAR * factor * lengths * 4 + NEAR)[:, None]
        return found
