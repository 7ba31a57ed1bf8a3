"""Models of known shape with random weights: a folder with a config.json, for vLLM's `load_format="dummy"`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen 3 model, by their names in its config.json; `dtype` is the weights'."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    dtype: str = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * self.itemsize

    def width(self, site: str) -> int:
        """Elements of a row at a site."""
        return self.intermediate_size if site == "neurons" else self.hidden_size

    def row_bytes(self, site: str) -> int:
        """Bytes of one token's rows at one site of all layers."""
        return self.num_hidden_layers * self.width(site) * self.itemsize


SHAPES = {
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128, 151_936, tie_word_embeddings=True),
    "qwen3-8b": Shape(4096, 12_288, 36, 32, 8, 128, 151_936, tie_word_embeddings=False),
    "qwen3-32b": Shape(5120, 25_600, 64, 64, 8, 128, 151_936, tie_word_embeddings=False),
    "tiny": Shape(128, 256, 4, 4, 2, 32, 4096, tie_word_embeddings=False, dtype="float32"),
}


def folder_of(name: str) -> Path:
    """The folder of a shape, made on the first call."""
    from steercap.testing.cache import cached

    config = json.dumps(_config(SHAPES[name]), indent=1)
    return cached(f"shape-{name}-{hashlib.sha256(config.encode()).hexdigest()[:8]}", partial(_write, config))


def _write(config: str, folder: Path) -> None:
    (folder / "config.json").write_text(config)


def _config(shape: Shape) -> dict[str, Any]:
    sizes = asdict(shape)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": shape.vocab_size - 2,
        "eos_token_id": shape.vocab_size - 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "torch_dtype": sizes.pop("dtype"),
        "use_cache": True,
        **sizes,
    }
