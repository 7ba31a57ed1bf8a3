"""Smallest configurations of the architecture families that are tested at every change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: Shape shared by the tiny models: 4 layers of width 128, 4 heads of 32, the least that vLLM's CPU attention accepts.
TINY: Final = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}

#: Keyword arguments of transformers' `AutoConfig.for_model`, by family; each exercises all parts of its layers.
FAMILY_CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma": {"model_type": "gemma", **TINY, "head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {"model_type": "gemma2", **TINY, "head_dim": 32, "sliding_window": 24, "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3_text",
        **TINY,
        "head_dim": 32,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": True,
    },
    "gpt2": {"model_type": "gpt2", "vocab_size": 512, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 512},
    "llama": {"model_type": "llama", **TINY},
    "mistral": {"model_type": "mistral", **TINY, "sliding_window": 24},
    "olmo2": {"model_type": "olmo2", **TINY},
    "opt": {
        "model_type": "opt",
        "vocab_size": 512,
        "hidden_size": 128,
        "ffn_dim": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "word_embed_proj_dim": 128,
    },
    "qwen2": {"model_type": "qwen2", **TINY},
    "qwen3": {"model_type": "qwen3", **TINY, "head_dim": 32},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **TINY,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "stablelm": {"model_type": "stablelm", **TINY},
}
