"""Models of known shape with random weights: a folder with a config.json, for vLLM's `load_format="dummy"`, or with
weights of an ordinary size, of which every site can be proved.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen 3 model, by their names in its config.json; `dtype` is the weights'.

    With `num_experts` it is a mixture of experts, whose MLPs are `moe_intermediate_size` wide each.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    dtype: str = "bfloat16"
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0

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
        heads, key_heads = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        widths = {"neurons": self.intermediate_size, "q": heads, "z": heads, "k": key_heads, "v": key_heads}
        return widths.get(site, self.hidden_size)

    def row_bytes(self, site: str) -> int:
        """Bytes of one token's rows at one site of all layers."""
        return self.num_hidden_layers * self.width(site) * self.itemsize


#: The sizes that only a mixture of experts has.
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")

SHAPES = {
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128, 151_936, tie_word_embeddings=True),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8, 128, 151_936, tie_word_embeddings=True),
    "qwen3-8b": Shape(4096, 12_288, 36, 32, 8, 128, 151_936, tie_word_embeddings=False),
    "qwen3-32b": Shape(5120, 25_600, 64, 64, 8, 128, 151_936, tie_word_embeddings=False),
    "qwen3-30b-a3b": Shape(
        *(2048, 6144, 48, 32, 4, 128, 151_936),
        tie_word_embeddings=False,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "tiny": Shape(128, 256, 4, 4, 2, 32, 4096, tie_word_embeddings=False, dtype="float32"),
    "tiny-moe": Shape(
        *(128, 256, 4, 4, 2, 32, 4096),
        tie_word_embeddings=False,
        dtype="float32",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
}


def folder_of(name: str) -> Path:
    """The folder of a shape, made on the first call."""
    from steercap.lab.demo import cached

    config = json.dumps(_config(SHAPES[name]), indent=1)
    return cached(f"shape-{name}-{hashlib.sha256(config.encode()).hexdigest()[:8]}", partial(_write, config))


def random_weights(name: str) -> Path:
    """The same with weights, as transformers initialises them, made on a GPU if there is one; on the first call."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from steercap.lab.demo import cached

    def write(folder: Path) -> None:
        config = AutoConfig.from_pretrained(folder_of(name))
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, SHAPES[name].dtype))
        model.save_pretrained(folder)

    return cached(f"{folder_of(name).name}-weights", write)


def _write(config: str, folder: Path) -> None:
    (folder / "config.json").write_text(config)


def _config(shape: Shape) -> dict[str, Any]:
    sizes = asdict(shape)
    kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
    if not shape.num_experts:
        sizes = {name: size for name, size in sizes.items() if name not in EXPERTS}
        kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return {
        **kind,
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
